"""Block8's kernels on the device, launched by C++, against those of the CPU: every bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastddp import _C
from fastddp.exchange.launching import load_block8_kernels
from ranks import RankPool

SIZES = (1, 128, 5000, 0, 4096, 300, 12_345)
KEY = 0xFEDCBA9876543210
BITS = {2: torch.int16, 4: torch.int32}


class Given:
    """The same each time it is made; gradients may lie ``shift`` elements off, and one block is not finite."""

    def __init__(self, number: str, block: int, dtype: torch.dtype, errors: bool, shift: int, device: str) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(count: int) -> Tensor:
            exponents = torch.randint(-12, 3, (count,), generator=generator).float()
            return torch.randn(count, generator=generator) * torch.exp2(exponents)

        self.device = device
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

    def window(self, key: int | None) -> dict[str, Tensor]:
        """What everything is after each step."""
        states = {}
        for name, step in (
            ("encode", lambda: self.kernels.encode(self.gradients, self.error, self.wire, 1 / 3, key, self.kept)),
            ("add", lambda: self.kernels.add([self.wire] * 5, self.target, self.error, key, 512)),
            ("decode", lambda: self.kernels.decode(self.gradients, self.target)),
        ):
            result = step()
            for what, tensor in self._all().items():
                states[f"{what} after {name}"] = tensor.cpu().clone()
            if name == "decode":
                states["measured"] = result.cpu()
        return states

    def _all(self) -> dict[str, Tensor]:
        found = {"wire": self.wire, "target": self.target}
        found |= {f"gradient {index}": gradient for index, (gradient, _) in enumerate(self.gradients)}
        return found | {
            name: tensor for name, tensor in (("error", self.error), ("kept", self.kept)) if tensor is not None
        }


def same(left: Tensor, right: Tensor) -> bool:
    """To the last bit; all NaN are alike."""
    if left.dtype == torch.uint8:
        return torch.equal(left, right)
    numbers = left.view(BITS[left.element_size()]), right.view(BITS[right.element_size()])
    return torch.equal(left.isnan(), right.isnan()) and bool(((numbers[0] == numbers[1]) | left.isnan()).all())


def windows(rank: int, device: str, number: str, block: int, dtype: torch.dtype, key: int | None) -> list[Any]:
    """What differed, launches and uploads: with errors, and without them and with gradients that are not aligned."""
    here = f"{device}:0"
    load_block8_kernels([(torch.device(here), dtype)], number, block, key is not None)
    results = []
    for errors, shift in ((True, 0), (False, 1)):
        ours, theirs = (Given(number, block, dtype, errors, shift, where) for where in (here, "cpu"))
        wrong = []
        for _ in range(2):
            mine, other = ours.window(key), theirs.window(key)
            measured, expected = mine.pop("measured"), other.pop("measured")
            wrong += [what for what, tensor in other.items() if not same(mine[what], tensor)]
            if measured[1] != expected[1]:
                wrong.append(f"{measured[1]} elements are not finite, and not {expected[1]}")
        results.append((wrong, ours.kernels.launches, ours.kernels.uploads))
    return results


@pytest.mark.parametrize(
    ("dtype", "key"), [(torch.float32, None), (torch.float16, None), (torch.bfloat16, KEY)], ids=str
)
@pytest.mark.parametrize("number", ["int8", "e4m3", "e5m2"])
@pytest.mark.parametrize("block", [128, 256])
def test_windows(
    gpu_ranks: RankPool, device: str, dtype: torch.dtype, key: int | None, number: str, block: int
) -> None:
    (results,) = gpu_ranks.run(windows, 1, device, number, block, dtype, key)
    # Three launches a window; addresses and runs of two of them, and addresses of shards, go up once.
    assert results == [([], 6, 5)] * 2


def parts(rank: int, device: str) -> tuple[bool, int, int]:
    """Whether the wire is that of one call; launches and uploads of three windows with gradients in two parts."""
    here = torch.device(device, 0)
    load_block8_kernels([(here, torch.float32)], "e4m3", 128, False)
    generator = torch.Generator().manual_seed(0)
    gradients = [(torch.randn(600, generator=generator).to(here), block) for block in (0, 5, 10)]
    wires = [torch.zeros(4 * 528, dtype=torch.uint8, device=here) for _ in range(2)]
    once, in_parts = (_C.Block8Kernels("e4m3", 128, here) for _ in range(2))
    once.encode(gradients, None, wires[0])
    for _ in range(3):
        in_parts.encode(gradients[1:], None, wires[1])
        in_parts.encode(gradients[:1], None, wires[1])
    return torch.equal(wires[0].cpu(), wires[1].cpu()), in_parts.launches, in_parts.uploads


def test_parts_of_a_bucket_have_tables_of_their_own(gpu_ranks: RankPool, device: str) -> None:
    assert gpu_ranks.run(parts, 1, device) == [(True, 6, 4)]


def by_operators(rank: int, device: str) -> tuple[bool, int]:
    """Whether gradients of two dtypes come back, and launches."""
    here = torch.device(device, 0)
    load_block8_kernels([(here, torch.float32), (here, torch.float16)], "int8", 128, False)
    kernels = _C.Block8Kernels("int8", 128, here)
    wire = torch.zeros(528, dtype=torch.uint8, device=here)
    given = [(torch.tensor([127.0, -3.0], device=here), 0), (torch.tensor([127.0], device=here).half(), 1)]
    kernels.encode(given, None, wire)
    back = [(torch.zeros_like(gradient), block) for gradient, block in given]
    kernels.decode(back, wire)
    equal = all(torch.equal(mine.cpu(), theirs.cpu()) for (mine, _), (theirs, _) in zip(back, given, strict=True))
    return equal, kernels.launches


def test_what_no_kernel_takes_goes_to_operators(gpu_ranks: RankPool, device: str) -> None:
    assert gpu_ranks.run(by_operators, 1, device) == [(True, 0)]
