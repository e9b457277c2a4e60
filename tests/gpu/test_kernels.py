"""The kernels on the device: through all of their paths, as trials lead, and with what trials have not."""

from __future__ import annotations

import pytest
import torch

from fastddp import _C
from fastddp.kernel_loading import proofs
from fastddp.kernel_loading.launching import load_kernels
from fastddp.tools.doctor.kernel_checks import check_kernels
from on_ranks import on_ranks
from ranks import RankPool


@on_ranks(1, pool="gpu_ranks")
def test_gradients_without_elements_and_with_many(rank: int, device: str) -> None:
    """Trials have neither."""
    here = torch.device(device, 0)
    load_kernels([(here, torch.float32, torch.bfloat16)])
    gradients = [torch.randn(size, device=here) for size in (0, 1_000_003, 0)]
    wire = torch.full((1_000_103,), 7.0, dtype=torch.bfloat16, device=here)
    views = wire.split([0, 1_000_003, 0, 100])
    kernels = _C.Kernels(here)
    kernels.pack([*gradients, None], views, 0.5)
    assert torch.equal(views[1].cpu(), (gradients[1] / 2).bfloat16().cpu())
    assert not bool(views[3].any())
    partials = kernels.unpack(gradients, views[:3], measuring=True)
    assert torch.equal(gradients[1].cpu(), views[1].float().cpu())
    assert (kernels.launches, kernels.uploads) == (2, 4)
    expected = pytest.approx(float(wire.double().square().sum()), rel=1e-5)
    assert partials.view(-1, 2).sum(0).tolist() == [expected, 0] == kernels.measure(wire).tolist()


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


@on_ranks(1, pool="fresh_gpu_ranks", time_limit=1400)  # it compiles some 80 kernels
def test_every_kernel_proves_itself(rank: int, device: str) -> None:
    trusted, proofs.proof_of = proofs.proof_of, lambda kernel, device: None
    try:
        checks = check_kernels(torch.device(device, 0))
    finally:
        proofs.proof_of = trusted
    assert [text for check in checks for text in (*check.wrong, *check.given_up, check.error) if text] == []
    assert {check.made_of for check in checks} == {"Triton"}
