"""Block8's kernels on the device, launched by C++, against those of the CPU: every bit."""

from __future__ import annotations

import pytest
import torch
from fastddp.kernels.block8_reference import Format
from torch import Tensor

from block8_given import Given
from fastddp import _C
from fastddp.kernel_loading.launching import load_block8_kernels
from on_ranks import on_ranks

SIZES = (1, 128, 5000, 0, 4096, 300, 12_345)
KEY = 0xFEDCBA9876543210


def gradients(dtype: torch.dtype) -> list[Tensor]:
    """One block is not finite."""
    generator = torch.Generator().manual_seed(0)
    exponents = [torch.randint(-12, 3, (size,), generator=generator).float() for size in SIZES]
    found = [(torch.randn(len(each), generator=generator) * torch.exp2(each)).to(dtype) for each in exponents]
    found[SIZES.index(4096)][500] = torch.inf
    return found


@pytest.mark.parametrize(
    ("dtype", "key"), [(torch.float32, None), (torch.float16, None), (torch.bfloat16, KEY)], ids=str
)
@pytest.mark.parametrize("number", ["int8", "e4m3", "e5m2"])
@pytest.mark.parametrize("block", [128, 256])
@pytest.mark.parametrize(("errors", "shift"), [(True, 0), (False, 1)], ids=["", "misaligned, without errors"])
@on_ranks(1, pool="gpu_ranks")
def test_windows(
    rank: int, device: str, dtype: torch.dtype, key: int | None, number: str, block: int, errors: bool, shift: int
) -> None:
    here = f"{device}:0"
    load_block8_kernels([(torch.device(here), dtype)], number, block, key is not None)
    both = [Given(Format(number, block), gradients(dtype), shift, error=1e-3, device=where) for where in ("cpu", here)]
    kernels = [_C.Block8Kernels(number, block, torch.device(where)) for where in ("cpu", here)]
    targets = [torch.zeros_like(given.wire) for given in both]
    for _ in range(2):
        for given, each in zip(both, kernels, strict=True):
            error, before = (given.error, given.before) if errors else (None, None)
            each.encode(given.gradients, error, given.wire, 1 / 3, key, before)
        both[1].assert_equal(both[0])
        for given, each, target in zip(both, kernels, targets, strict=True):
            each.add([given.wire] * 5, target, given.error if errors else None, key, 512)
        both[1].assert_equal(both[0])
        assert torch.equal(targets[1].cpu(), targets[0])
        measured = [
            each.decode(given.gradients, target) for given, each, target in zip(both, kernels, targets, strict=True)
        ]
        both[1].assert_equal(both[0])
        assert measured[0][1].item() == measured[1][1].item()
    # Three launches a window; addresses and runs of two of them, and addresses of shards, go up once.
    assert (kernels[1].launches, kernels[1].uploads) == (6, 5)


@on_ranks(1, pool="gpu_ranks")
def test_parts_of_a_bucket_have_tables_of_their_own(rank: int, device: str) -> None:
    here = torch.device(device, 0)
    load_block8_kernels([(here, torch.float32)], "e4m3", 128, False)
    gradients = [(torch.randn(600).to(here), block) for block in (0, 5, 10)]
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
