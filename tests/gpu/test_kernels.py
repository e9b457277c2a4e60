"""The launched kernels against plain torch on the same device: copies bitwise, everything else rounded once."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fastddp import _C
from fastddp.exchange import proofs
from fastddp.exchange.launching import load_kernels, load_sum_kernels
from fastddp.tools.doctor.kernel_checks import check_kernels
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


def packed_and_unpacked(rank: int, gradient: torch.dtype, wire: torch.dtype, scale: float, device: str) -> list[str]:
    """What was wrong."""
    here = torch.device(device, 0)
    load_kernels([(here, gradient, wire)])
    torch.manual_seed(0)
    gradients = gradients_of_all_kinds(gradient, device)
    sizes = [part.numel() for part in gradients]
    flat = torch.full((1 + sum(sizes) + 100,), 7.0, dtype=wire, device=here)[1:]  # misaligned, too
    views = [view.view(part.shape) for view, part in zip(flat[:-100].split(sizes), gradients, strict=True)]
    kernels = _C.Kernels(here)
    copied = scale == 1.0 and gradient == wire
    wrong = []
    for _ in range(2):
        kernels.pack([*gradients, None], [*views, flat[-100:]], scale)
        for index, (part, view) in enumerate(zip(gradients, views, strict=True)):
            if not same(view, scaled(part, scale, wire), copied):
                wrong.append(f"pack of gradient {index}")
    if bool(flat[-100:].any()):
        wrong.append("pack of an undefined gradient")
    if (kernels.launches, kernels.uploads) != (2, 2):
        wrong.append(f"{kernels.launches} launches and {kernels.uploads} uploads for two packs")
    targets = [torch.zeros_like(part) for part in gradients]
    partials = kernels.unpack(targets, views, measuring=True)
    for index, (target, view) in enumerate(zip(targets, views, strict=True)):
        if not same(target, scaled(view, 1.0, gradient), gradient == wire):
            wrong.append(f"unpack of gradient {index}")
    return wrong + wrong_measures(kernels, partials, targets, flat)


def wrong_measures(kernels: _C.Kernels, partials: Tensor | None, targets: list[Tensor], wire: Tensor) -> list[str]:
    if partials is None:
        return ["unpack measured nothing"]
    found = {
        "unpack": (partials.view(-1, 2).sum(0), torch.cat([target.flatten() for target in targets])),
        "measure": (kernels.measure(wire), wire),
    }
    wrong = []
    for name, (measured, flat) in found.items():
        odd = int(flat.isfinite().logical_not().sum())
        if int(measured[1]) != odd:
            wrong.append(f"{name} counted {int(measured[1])} of {odd}")
        if bool(measured[0].isfinite()):
            wrong.append(f"{name} found finite squares")
    flat = flat.nan_to_num(0, 0, 0).clamp(-1e3, 1e3)
    squares = float(kernels.measure(flat)[0])
    expected = float(flat.double().square().sum())
    return wrong if abs(squares - expected) <= 1e-5 * expected else [*wrong, f"measure: {squares}, not {expected}"]


@pytest.mark.parametrize(("gradient", "wire"), PAIRS, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.5, 1 / 3])
def test_pack_and_unpack(
    gpu_ranks: RankPool, device: str, gradient: torch.dtype, wire: torch.dtype, scale: float
) -> None:
    assert gpu_ranks.run(packed_and_unpacked, 1, gradient, wire, scale, device) == [[]]


def more_than_two_to_the_31_elements(rank: int) -> str:
    elements = 2**31 + 12_345
    if torch.cuda.mem_get_info()[0] < 5 * elements * torch.float16.itemsize:
        return "too little memory"
    here = torch.device("cuda", 0)
    load_kernels([(here, torch.float16, torch.float16)])
    gradient = torch.randint(-(2**15), 2**15, (elements,), dtype=torch.int16, device=here).view(torch.float16)
    small = torch.arange(100.0, device=here).half()
    wire = torch.zeros(elements + 100, dtype=torch.float16, device=here)
    kernels = _C.Kernels(here)
    kernels.pack([gradient, small], [wire[:elements], wire[elements:]])
    for begin in range(0, elements, 2**28):
        ours, theirs = wire[begin : begin + 2**28][: elements - begin], gradient[begin : begin + 2**28]
        if not torch.equal(ours.view(torch.int16), theirs.view(torch.int16)):
            return f"wrong from element {begin} on"
    return "" if torch.equal(wire[elements:], small) else "wrong behind it"


@pytest.mark.needs_cuda
def test_a_bucket_of_more_than_two_to_the_31_elements(gpu_ranks: RankPool) -> None:
    (found,) = gpu_ranks.run(more_than_two_to_the_31_elements, 1)
    if found == "too little memory":
        pytest.skip(found)
    assert found == ""


def shards_added_up(rank: int, dtype: torch.dtype, ranks: int, elements: int, shift: int, device: str) -> bool:
    from fastddp.kernels.sum_shards_reference import sum_shards

    here = torch.device(device, 0)
    load_sum_kernels([here], dtype)
    shards = torch.stack([values(elements, dtype).roll(rank) for rank in range(ranks)])
    target = torch.full((shift + elements + 9,), 7.0, dtype=dtype, device=here)
    _C.sum_shards(shards.to(here), target[shift : shift + elements])
    ours, beside = target[shift : shift + elements], torch.cat([target[:shift], target[shift + elements :]])
    return same(ours, sum_shards(shards), copied=False) and bool((beside == 7.0).all())


@pytest.mark.parametrize("dtype", NARROW[1:], ids=str)
@pytest.mark.parametrize(
    ("ranks", "elements", "shift"), [(1, 4096, 0), (2, 100_000, 8), (8, 1_000_003, 0), (5, 4097, 3)], ids=str
)
def test_the_sum_of_shards(
    gpu_ranks: RankPool, device: str, dtype: torch.dtype, ranks: int, elements: int, shift: int
) -> None:
    assert gpu_ranks.run(shards_added_up, 1, dtype, ranks, elements, shift, device) == [True]


def given_up_in_first_calls(rank: int, device: str) -> list[str]:
    trusted, proofs.proof_of = proofs.proof_of, lambda kernel, device: None
    try:
        checks = check_kernels(torch.device(device, 0))
    finally:
        proofs.proof_of = trusted
    return [text for check in checks for text in (*check.wrong, *check.given_up, check.error) if text]


def test_every_kernel_proves_itself(fresh_gpu_ranks: RankPool, device: str) -> None:
    assert fresh_gpu_ranks.run(given_up_in_first_calls, 1, device) == [[]]
