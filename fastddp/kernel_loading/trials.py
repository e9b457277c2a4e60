"""Trials of kernels: the same call by kernels and by torch's operators, on memory of which every byte is compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_ALIGNED = 64  # bytes: tensors begin at a multiple of this, unless they are asked to begin after it

_POISON = 0xA5
"""What memory is made of before somebody writes: small numbers in every dtype of floats, which no case computes."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Sums = Sequence[tuple[float, float]]  # what a call has measured: sums of squares, and how many elements are not finite

Makes = Callable[["Memory"], tuple[Any, ...]]  # returns a call's arguments, whose tensors lie in the memory


class Memory:
    """One piece of memory with all tensors of a call, and poison around and between them."""

    def __init__(self, capacity: int = 4 << 20) -> None:
        self._bytes = torch.empty(capacity, dtype=torch.uint8, device="cpu")
        self._bytes[:_ALIGNED] = _POISON
        self._used = 0

    def take(
        self, shape: Sequence[int], dtype: torch.dtype, shift: int = 0, strides: Sequence[int] | None = None
    ) -> Tensor:
        """A tensor of poison that begins ``shift`` elements after a multiple of 64 bytes; no strides: contiguous."""
        if strides is None:
            strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        elements = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        before = self._used + _ALIGNED
        begin = before + shift * dtype.itemsize
        end = begin + elements * dtype.itemsize
        self._used = -(-end // _ALIGNED) * _ALIGNED
        assert self._used + _ALIGNED <= len(self._bytes), "the case needs more memory"
        self._bytes[before : self._used + _ALIGNED] = _POISON
        return self._bytes[begin:end].view(dtype).as_strided(tuple(shape), tuple(strides))

    def put(self, values: Tensor, shift: int = 0, strides: Sequence[int] | None = None) -> Tensor:
        """A tensor with these values; the other arguments are those of :meth:`take`."""
        return self.take(values.shape, values.dtype, shift, strides).copy_(values)

    @property
    def used(self) -> Tensor:
        """All bytes that were taken, and those around them."""
        return self._bytes[: self._used + _ALIGNED]


def _in_other_memory(argument: Any, memory: Tensor, other: Tensor) -> Any:
    """The argument, with its tensors at the same places of the other memory."""
    if isinstance(argument, Tensor):
        begin = argument.data_ptr() - memory.data_ptr()
        first = other[begin : begin + argument.dtype.itemsize].view(argument.dtype)
        return first.as_strided(argument.shape, argument.stride())
    if isinstance(argument, (list, tuple)):
        return type(argument)(_in_other_memory(each, memory, other) for each in argument)
    return argument


def _tensors(argument: Any) -> Iterator[Tensor]:
    if isinstance(argument, Tensor):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for each in argument:
            yield from _tensors(each)


@dataclass(frozen=True)
class Case:
    """One call, and what it goes through."""

    path: str  # in words
    make: Makes
    call: Callable[..., Sums | None]  # gets what has the kernels, then the arguments; None: it has measured nothing
    rounded: float = 0.0  # how far apart two elements may be that are not expected to be equal bit by bit
    sums_rounded: float = 1e-12
    """The same for sums of squares, relative to them. Where sums of squares are whole numbers, they are exact."""


@dataclass(frozen=True)
class Trial:
    """Cases that lead through all paths of one kernel, or of those that work together."""

    what: str  # what the kernels do, and with which dtypes, in words
    kernels: Callable[[torch.device, bool], Any]  # those of a device, as training has them, or for a trial
    operators: Callable[[], Any]  # the same, made of torch's operators
    cases: Sequence[Case] = field(repr=False)
    instead: Callable[[], Any] | None = None
    """On a device, what runs on the CPU instead of operators, of which there would be too many."""

    def run(
        self, device: torch.device, trial: bool = False, reference: torch.device | None = None
    ) -> Iterator[Outcome]:
        """Make the calls, one after another; the host waits. ``reference``: where operators run; None: on ``device``.

        ``trial``: the kernels are those that nobody has tried, and none of their calls may be left to operators.
        """
        return self.compare(self.expected(device, reference), device, trial)

    def expected(self, device: torch.device, reference: torch.device | None = None) -> Iterator[Expected]:
        """What torch's operators do; arguments as of :meth:`run`."""
        operators = self.operators()
        if self.instead is not None and device.type != "cpu":
            operators, reference = self.instead(), torch.device("cpu")
        for case in self.cases:
            host = Memory()
            arguments = case.make(host)
            memory = host.used.to(reference or device, copy=True)
            sums = case.call(operators, *_in_other_memory(arguments, host.used, memory)) or ()
            yield Expected(case, arguments, host.used, memory.to(device), sums)

    def compare(self, expected: Iterable[Expected], device: torch.device, trial: bool) -> Iterator[Outcome]:
        """What kernels do differently; arguments as of :meth:`run`."""
        kernels = self.kernels(device, trial)
        for each in expected:
            before = kernels.launches
            differing = _what_differs(each, kernels, device)
            launches = kernels.launches - before
            if differing is None and kernels.wrote_around():
                differing = "memory beside partial sums was written"
            if differing is None and trial and launches == 0:
                differing = "no kernel was launched"
            yield Outcome(each.case.path, launches, differing)


@dataclass(frozen=True)
class Expected:
    """What torch's operators have done in one case."""

    case: Case
    arguments: Any
    before: Tensor  # the memory in which tensors of the arguments lie, on the host
    after: Tensor  # the same, on the device
    sums: Sums


@dataclass(frozen=True)
class Outcome:
    """Of one case."""

    path: str
    launches: int
    differing: str | None  # what the kernels did that operators did not; None: both did the same


def _what_differs(expected: Expected, kernels: Any, device: torch.device) -> str | None:
    case, before, after = expected.case, expected.before, expected.after
    memory = before.to(device, copy=True)
    ours = _in_other_memory(expected.arguments, before, memory)
    sums = case.call(kernels, *ours) or ()
    if not torch.equal(memory, after):
        for tensor in _tensors(ours):
            wrong = _what_is_wrong(tensor, _in_other_memory(tensor, memory, after), case.rounded)
            if wrong is not None:
                return wrong
        for tensor in _tensors(ours):  # what may differ is made equal: the rest is memory around tensors
            if 0 not in tensor.stride():
                tensor.copy_(_in_other_memory(tensor, memory, after))
        if not torch.equal(memory, after):
            return "memory was written beside what the kernel is to write"
    for our_sum, their_sum in zip(sums, expected.sums, strict=True):
        if not _same_sum(our_sum, their_sum, case.sums_rounded):
            return f"the sum of squares, and how many elements are not finite, are {our_sum} in place of {their_sum}"
    return None


def _what_is_wrong(ours: Tensor, theirs: Tensor, rounded: float) -> str | None:
    """All NaN are alike."""
    if ours.numel() == 0:
        return None
    integer = _INTEGERS[ours.dtype.itemsize]
    wrong = ours.view(integer) != theirs.view(integer)
    if ours.dtype.is_floating_point:
        wrong &= ~(ours.isnan() & theirs.isnan())
        if rounded > 0.0:
            wrong &= ~((ours.double() - theirs.double()).abs() <= rounded)
    places = wrong.nonzero()
    if len(places) == 0:
        return None
    first = tuple(places[0].tolist())
    return (
        f"{len(places)} of {wrong.numel()} numbers are not those of torch's operators, the first is "
        f"{ours[first].item():.8g} in place of {theirs[first].item():.8g}"
    )


def _same_sum(ours: tuple[float, float], theirs: tuple[float, float], rounded: float) -> bool:
    (squares, odd), (expected, expected_odd) = ours, theirs
    both_overflow = not math.isfinite(squares) and not math.isfinite(expected)
    return odd == expected_odd and (both_overflow or abs(squares - expected) <= rounded * expected)
