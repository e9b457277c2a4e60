"""Block8's kernels on the device, launched by C++."""

from __future__ import annotations

import torch

from fastddp import _C
from fastddp.kernel_loading.launching import load_block8_kernels
from on_ranks import on_ranks


@on_ranks(1, pool="gpu_ranks")
def test_parts_of_a_bucket_have_tables_of_their_own(rank: int, device: str) -> None:
    here = torch.device(device, 0)
    load_block8_kernels([(here, torch.float32)], "e4m3", 128, False)
    gradients = [(torch.randn(size).to(here), block) for size, block in ((600, 0), (0, 5), (600, 5), (600, 10))]
    wires = [torch.zeros(4 * 528, dtype=torch.uint8, device=here) for _ in range(2)]
    once, in_parts = (_C.Block8Kernels("e4m3", 128, here) for _ in range(2))
    once.encode(gradients, None, wires[0])
    for _ in range(3):
        in_parts.encode(gradients[1:], None, wires[1])
        in_parts.encode(gradients[:1], None, wires[1])
    assert torch.equal(wires[0].cpu(), wires[1].cpu())
    assert (in_parts.launches, in_parts.uploads) == (6, 4)


@on_ranks(1, pool="gpu_ranks")
def test_what_no_kernel_takes_goes_to_operators(rank: int, device: str) -> None:
    """Gradients of two dtypes."""
    here = torch.device(device, 0)
    load_block8_kernels([(here, torch.float32), (here, torch.float16)], "int8", 128, False)
    kernels = _C.Block8Kernels("int8", 128, here)
    wire = torch.zeros(528, dtype=torch.uint8, device=here)
    given = [(torch.tensor([127.0, -3.0], device=here), 0), (torch.tensor([127.0], device=here).half(), 1)]
    kernels.encode(given, None, wire)
    back = [(torch.zeros_like(gradient), block) for gradient, block in given]
    kernels.decode(back, wire)
    assert all(torch.equal(mine.cpu(), theirs.cpu()) for (mine, _), (theirs, _) in zip(back, given, strict=True))
    assert kernels.launches == 0
