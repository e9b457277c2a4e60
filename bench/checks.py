"""What gradients have to be, and how far they are off."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Check:
    """What is demanded of the gradients that a contestant leaves; called on every rank, with torch's to compare with.

    Some checks talk to the other ranks, so each rank has to go through with them whatever it has found by then.
    """

    about: str
    passed: str  # what the row says of gradients that hold
    holds: Callable[[Sequence[Tensor], Sequence[Tensor]], bool]


def difference(got: Tensor, expected: Tensor) -> float:
    """The largest |got - expected| of all elements; infinite where a gradient is misshapen or not numbers."""
    if torch.equal(got, expected):
        return 0.0
    if got.shape != expected.shape:
        return math.inf
    largest = float((got - expected).abs().max())
    return math.inf if math.isnan(largest) else largest


def largest_difference(
    got: Sequence[Tensor], expected: Sequence[Tensor], of: Callable[[Tensor, Tensor], float] = difference
) -> float:
    """Over all parameters; infinite where gradients are missing."""
    if len(got) != len(expected):
        return math.inf
    return max(of(*pair) for pair in zip(got, expected, strict=True))


def _within(tolerance: Callable[[Tensor], float]) -> Callable[[Sequence[Tensor], Sequence[Tensor]], bool]:
    """A check of each parameter's gradient: no element may be farther off than the tolerance for all of them."""

    def holds(got: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
        return len(got) == len(expected) and all(
            difference(one, other) <= tolerance(other) for one, other in zip(got, expected, strict=True)
        )

    return holds


def _exact_tolerance(expected: Tensor) -> float:
    """A sum of two does not depend on their order, so two ranks must agree with torch's DDP in every bit.

    With more ranks the order depends on where in its bucket a gradient lies.
    """
    if dist.get_world_size() <= 2:
        return 0.0
    return 4 * torch.finfo(expected.dtype).eps * float(expected.abs().max())


EXACT = Check(
    "bitwise equal to torch's without a hook (more than 2 ranks: within 4 roundings of a parameter's largest)",
    "equal",
    _within(_exact_tolerance),
)


# Graphs that are cut elsewhere are other programs: they add up a tied parameter's gradient in another order.
COMPILED = Check(
    "within 64 roundings of a parameter's largest gradient from torch's without a hook",
    "within rounding",
    _within(lambda expected: 64 * torch.finfo(expected.dtype).eps * float(expected.abs().max())),
)


def rounded_to(dtype: torch.dtype) -> Check:
    """For wires of reduced precision: each rank's share is rounded, and so is the sum after each addition."""
    numbers = torch.finfo(dtype)
    name = str(dtype).removeprefix("torch.")

    def tolerance(expected: Tensor) -> float:
        # Below the normal numbers the spacing no longer shrinks.
        largest = float(expected.abs().max()) + numbers.smallest_normal
        return (dist.get_world_size() + 2) * numbers.eps * largest

    about = f"within world_size + 2 roundings to {name} of a parameter's largest gradient from torch's without a hook"
    return Check(about, "within rounding", _within(tolerance))


def eight_bits(half_distance: float) -> Check:
    """For 8 bits: each share is rounded, and so is the sum; error feedback adds what the step before has lost."""

    def tolerance(expected: Tensor) -> float:
        return 2 * half_distance * (2 + half_distance) * dist.get_world_size() * float(expected.abs().max())

    about = "within what docs/compression.md allows two windows, of world_size times a parameter's largest gradient"
    return Check(about, "within rounding", _within(tolerance))


def _same_on_all_ranks(got: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether gradients are there, finite and not all zero on this rank, and the same bits as on every other."""
    digests = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest(got))
    return (
        [gradient.shape for gradient in got] == [gradient.shape for gradient in expected]
        and all(bool(gradient.isfinite().all()) for gradient in got)
        and any(bool(gradient.any()) for gradient in got)
        and len(set(digests)) == 1
    )


def digest(tensors: Iterable[Tensor]) -> str:
    """Of all bits."""
    bits = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        # Flat first: a tensor without dimensions cannot be viewed as bytes.
        bits.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().data)
    return bits.hexdigest()


RANKS_AGREE = Check("finite, not all zero, and bitwise equal on all ranks", "ranks agree", _same_on_all_ranks)
