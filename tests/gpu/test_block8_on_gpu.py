"""Block8's kernels on the device, launched by C++, against those of the CPU: every bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastddp import _C
from fastddp.exchange.launching import load_block8_kernels
from on_ranks import on_ranks

SIZES = (1, 128, 5000, 0, 4096, 300, 12_345)
KEY = 0xFEDCBA9876543210
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Given:
    """The same each time it is made; gradients may lie ``shift`` elements off, and one block is not finite."""

    def __init__(self, number: str, block: int, dtype: torch.dtype, errors: bool, shift: int, device: str) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(count: int) -> Tensor:
            exponents = torch.randint(-12, 3, (count,), generator=generator).float()
            return torch.randn(count, generator=generator) * torch.exp2(exponents)

        self.gradients: list[tuple[Tensor, int]] = []
        blocks = 1
        for size in SIZES:
            values = random(size).to(dtype)
            if size == 4096:
                values[500] = torch.inf
            memory = torch.zeros(size + shift, dtype=dtype, device=device)
            memory[shift:] = values
            self.gradients.append((memory[shift:], blocks))
            blocks += -(-size // block)
        groups = -(-blocks // 4)
        self.error = (random(groups * 4 * block) * 1e-3).to(device) if errors else None
        self.kept = torch.zeros_like(self.error) if self.error is not None else None
        self.wire = torch.zeros(groups * 4 * (block + 4), dtype=torch.uint8, device=device)
        self.target = torch.zeros_like(self.wire)
        self.kernels = _C.Block8Kernels(number, block, torch.device(device))

    def states(self, key: int | None) -> list[Tensor]:
        """What everything is after each step of a window; and how many elements are not finite."""
        self.kernels.encode(self.gradients, self.error, self.wire, 1 / 3, key, self.kept)
        encoded = self._all()
        self.kernels.add([self.wire] * 5, self.target, self.error, key, 512)
        added = self._all()
        measured = self.kernels.decode(self.gradients, self.target)
        return [*encoded, *added, *self._all(), measured[1:].cpu()]

    def _all(self) -> list[Tensor]:
        errors = [tensor for tensor in (self.error, self.kept) if tensor is not None]
        gradients = [gradient for gradient, _ in self.gradients]
        return [tensor.cpu().clone() for tensor in (self.wire, self.target, *gradients, *errors)]


def same(left: Tensor, right: Tensor) -> bool:
    """To the last bit; all NaN are alike."""
    left, right = (torch.where(each.isnan(), torch.zeros_like(each), each) for each in (left, right))
    return torch.equal(left.view(BITS[left.itemsize]), right.view(BITS[right.itemsize]))


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
    ours, theirs = (Given(number, block, dtype, errors, shift, where) for where in (here, "cpu"))
    for _ in range(2):
        mine, other = ours.states(key), theirs.states(key)
        found = [(a.isnan() == b.isnan()).all() and same(a, b) for a, b in zip(mine[:-1], other[:-1], strict=True)]
        assert all(found)
        assert mine[-1].item() == other[-1].item()
    # Three launches a window; addresses and runs of two of them, and addresses of shards, go up once.
    assert (ours.kernels.launches, ours.kernels.uploads) == (6, 5)


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
