"""The launched kernels against plain torch on the same device: copies bitwise, everything else rounded once."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fastddp import _C
from fastddp.kernel_loading import proofs
from fastddp.kernel_loading.launching import load_kernels, load_sum_kernels
from fastddp.tools.doctor.kernel_checks import check_kernels
from on_ranks import on_ranks
from ranks import RankPool

NARROW = [torch.float32, torch.float16, torch.bfloat16]
PAIRS = [*itertools.product(NARROW, NARROW), (torch.float64, torch.float64)]
SIZES = [0, 1, 7, 4095, 4096, 4097, 1_000_003]


def scaled(gradient: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    if gradient.dtype == dtype and scale == 1.0:
        return gradient
    compute = torch.promote_types(gradient.dtype, torch.float32)
    return (gradient.to(compute) * torch.tensor(scale, dtype=compute, device=gradient.device)).to(dtype)


def bits(tensor: Tensor) -> Tensor:
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    return tensor.cpu().contiguous().view(integer)


def same(ours: Tensor, theirs: Tensor, copied: bool) -> bool:
    if copied:
        return torch.equal(bits(ours), bits(theirs))
    ours, theirs = ours.cpu(), theirs.cpu()
    return bool(((ours == theirs) | (ours.isnan() & theirs.isnan())).all())


def values(size: int, dtype: torch.dtype) -> Tensor:
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 1e-7, 1e-40, 65504.0, 1e30])
    return torch.cat([special, torch.randn(size, dtype=torch.float64) * 100])[:size].to(dtype)


def gradients_of_all_kinds(dtype: torch.dtype, device: str) -> list[Tensor]:
    flat = [values(size, dtype).to(device) for size in SIZES]
    base = values(30_000, dtype).to(device)
    table = base[:20_000].view(100, 200)
    return [*flat, base[1:5000], base[3::7], table.t(), table[:, ::2], base[:1].expand(300), table[1:50, 3:9]]


@pytest.mark.parametrize(("gradient", "wire"), PAIRS, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.5, 1 / 3])
@on_ranks(1, pool="gpu_ranks")
def test_pack_and_unpack(rank: int, device: str, gradient: torch.dtype, wire: torch.dtype, scale: float) -> None:
    here = torch.device(device, 0)
    load_kernels([(here, gradient, wire)])
    gradients = gradients_of_all_kinds(gradient, device)
    sizes = [part.numel() for part in gradients]
    flat = torch.full((1 + sum(sizes) + 100,), 7.0, dtype=wire, device=here)[1:]  # misaligned, too
    views = [view.view(part.shape) for view, part in zip(flat[:-100].split(sizes), gradients, strict=True)]
    kernels = _C.Kernels(here)
    copied = scale == 1.0 and gradient == wire
    for _ in range(2):
        kernels.pack([*gradients, None], [*views, flat[-100:]], scale)
        for part, view in zip(gradients, views, strict=True):
            assert same(view, scaled(part, scale, wire), copied)
    assert not bool(flat[-100:].any())
    assert (kernels.launches, kernels.uploads) == (2, 2)
    targets = [torch.zeros_like(part) for part in gradients]
    partials = kernels.unpack(targets, views, measuring=True)
    for target, view in zip(targets, views, strict=True):
        assert same(target, scaled(view, 1.0, gradient), gradient == wire)
    assert partials is not None
    written = torch.cat([target.flatten() for target in targets])
    for (squares, odd), moved in ((partials.view(-1, 2).sum(0), written), (kernels.measure(flat), flat)):
        assert int(odd) == int(moved.isfinite().logical_not().sum())
        assert not bool(squares.isfinite())
    finite = flat.nan_to_num(0, 0, 0).clamp(-1e3, 1e3)
    assert float(kernels.measure(finite)[0]) == pytest.approx(float(finite.double().square().sum()), rel=1e-5)


@pytest.mark.needs_cuda
def test_a_bucket_of_more_than_two_to_the_31_elements(gpu_ranks: RankPool) -> None:
    if not gpu_ranks.run(more_than_two_to_the_31_elements, 1)[0]:
        pytest.skip("too little memory")


def more_than_two_to_the_31_elements(rank: int) -> bool:
    elements = 2**31 + 12_345
    if torch.cuda.mem_get_info()[0] < 5 * elements * torch.float16.itemsize:
        return False
    here = torch.device("cuda", 0)
    load_kernels([(here, torch.float16, torch.float16)])
    gradient = torch.randint(-(2**15), 2**15, (elements,), dtype=torch.int16, device=here).view(torch.float16)
    small = torch.arange(100.0, device=here).half()
    wire = torch.zeros(elements + 100, dtype=torch.float16, device=here)
    kernels = _C.Kernels(here)
    kernels.pack([gradient, small], [wire[:elements], wire[elements:]])
    for begin in range(0, elements, 2**28):
        ours, theirs = wire[begin : begin + 2**28][: elements - begin], gradient[begin : begin + 2**28]
        assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16)), f"from element {begin} on"
    assert torch.equal(wire[elements:], small)
    return True


@pytest.mark.parametrize("dtype", NARROW[1:], ids=str)
@pytest.mark.parametrize(
    ("ranks", "elements", "shift"), [(1, 4096, 0), (2, 100_000, 8), (8, 1_000_003, 0), (5, 4097, 3)], ids=str
)
@on_ranks(1, pool="gpu_ranks")
def test_the_sum_of_shards(rank: int, device: str, dtype: torch.dtype, ranks: int, elements: int, shift: int) -> None:
    from fastddp.kernels.sum_shards_reference import sum_shards

    here = torch.device(device, 0)
    load_sum_kernels([here], dtype)
    shards = torch.stack([values(elements, dtype).roll(each) for each in range(ranks)])
    target = torch.full((shift + elements + 9,), 7.0, dtype=dtype, device=here)
    ours = target[shift : shift + elements]
    _C.sum_shards(shards.to(here), ours)
    assert same(ours, sum_shards(shards), copied=False)
    assert bool((torch.cat([target[:shift], target[shift + elements :]]) == 7.0).all())


@on_ranks(1, pool="fresh_gpu_ranks", time_limit=1400)  # it compiles some 80 kernels
def test_every_kernel_proves_itself(rank: int, device: str) -> None:
    trusted, proofs.proof_of = proofs.proof_of, lambda kernel, device: None
    try:
        checks = check_kernels(torch.device(device, 0))
    finally:
        proofs.proof_of = trusted
    assert [text for check in checks for text in (*check.wrong, *check.given_up, check.error) if text] == []
    assert {check.made_of for check in checks} == {"Triton"}
