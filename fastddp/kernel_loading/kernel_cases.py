"""All paths through fastddp's kernels, as calls that lead through them.

A kernel is tried with these calls before it is used, ``fastddp doctor`` makes them, and so do the tests, which demand
that each branch of a kernel is taken by one of them. A new path in a kernel needs a case here.

Sizes are those around each number at which a kernel changes its way: an access of 16 bytes, a step, a chunk. Tensors
begin at every element within 16 bytes. Numbers are mostly whole and small: sums of them are exact in any order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastddp import _C
from fastddp.kernel_loading.trials import Case, Makes, Memory, Sums, Trial

CHUNK = 4096  # elements of one program of pack, of 8 bits and of sums; of 16 bits pack takes twice as many
STEPS = (512, 1024, 2048, CHUNK, 2 * CHUNK)  # elements that a program takes at once
WORDS, WORDS_TOGETHER = 256, 32  # of a table that a kernel writes, and of a group in it
ACCESS = 16  # bytes

SMALL = tuple(range(1, 18))
LARGE = (*(size + more for size in STEPS for more in (-1, 0, 1)), CHUNK + 13, 4 * CHUNK + 3)

_NAN, _INF = math.nan, math.inf
_SPECIAL = (_INF, _NAN, -_INF, 0.0, -0.0, 1e-40, -3e-7, 7e4, 1e38, 3e38, 65504.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11)
"""What a cast rounds in its own way: also numbers halfway between two of 16 bits, and those that get subnormal."""


def random_numbers() -> torch.Generator:
    """The same numbers each time."""
    return torch.Generator("cpu").manual_seed(0)


def whole(shape: Sequence[int], dtype: torch.dtype, random: torch.Generator, most: int = 31) -> Tensor:
    """Whole numbers but 0, up to ``most``."""
    options: dict[str, Any] = {"generator": random, "device": "cpu"}
    sign = 1 - 2 * torch.randint(0, 2, tuple(shape), **options)
    return (sign * torch.randint(1, most + 1, tuple(shape), **options)).to(dtype)


def normal(shape: Sequence[int], dtype: torch.dtype, random: torch.Generator) -> Tensor:
    """Normal numbers."""
    return torch.randn(tuple(shape), generator=random, device="cpu", dtype=torch.float64).to(dtype)


def _special(size: int, dtype: torch.dtype, random: torch.Generator) -> Tensor:
    """Special numbers among ordinary ones."""
    values = normal((size,), torch.float64, random)
    values[: len(_SPECIAL)] = torch.tensor(_SPECIAL, dtype=torch.float64, device="cpu")[:size]
    return values.to(dtype)


def offsets(*dtypes: torch.dtype) -> Iterator[tuple[int, ...]]:
    """All places within 16 bytes, in elements, for tensors of these dtypes; the first is aligned."""
    return itertools.product(*(range(ACCESS // dtype.itemsize) for dtype in dtypes))


def short(dtype: torch.dtype) -> str:
    """The dtype's name without torch's."""
    return str(dtype).removeprefix("torch.")


# ------------------------------------------------------------------------------------------------- pack and unpack

_STRIDED = (
    *((size,) for size in (2, 3, 511, 512, 513, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3)),
    *((3, 5), (16, 33), (41, 100), (3, 5, 7), (17, 19, 13), (2, 3, 4, 5), (5, 7, 9, 13), (2, 3, 2, 3, 2)),
    (3, 4, 5, 7, 11),
)  # shapes of gradients that lie in the opposite order, with gaps, so that no two dims can be taken for one


class _Bucket:
    """Gradients and their places in a wire. ``packs``: gradients have numbers; otherwise, the wire has."""

    def __init__(self, memory: Memory, gradient: torch.dtype, wire: torch.dtype, packs: bool) -> None:
        self.memory, self.gradient, self.wire, self.packs = memory, gradient, wire, packs
        self.random = random_numbers()
        self.gradients: list[Tensor | None] = []
        self.views: list[Tensor] = []

    def add(self, values: Tensor, shifts: tuple[int, ...] = (0, 0), strides: Sequence[int] | None = None) -> None:
        """A gradient with its view, one of which gets the values. ``shifts``: of both. ``strides``: of the gradient."""
        of_gradient, of_view = shifts
        if self.packs:
            self.gradients.append(self.memory.put(values.to(self.gradient), of_gradient, strides))
            self.views.append(self.memory.take(values.shape, self.wire, of_view))
        else:
            self.gradients.append(self.memory.take(values.shape, self.gradient, of_gradient, strides))
            self.views.append(self.memory.put(values.to(self.wire), of_view))

    def numbers(self, *shape: int) -> Tensor:
        return whole(shape, torch.float64, self.random)

    def flat(self) -> None:
        for size in (*SMALL, *LARGE):
            self.add(self.numbers(size))

    def flat_anywhere(self) -> None:
        unaligned = [shifts for shifts in offsets(self.gradient, self.wire) if any(shifts)]
        sizes = itertools.chain(LARGE, itertools.cycle(SMALL))
        for shifts in itertools.islice(itertools.cycle(unaligned), max(len(unaligned), len(LARGE)) + len(SMALL)):
            self.add(self.numbers(next(sizes)), shifts)

    def strided(self) -> None:
        shifts = itertools.cycle(offsets(self.gradient, self.wire))
        for shape in _STRIDED:
            self.add(self.numbers(*shape), next(shifts), _opposite_strides(shape))

    def undefined(self) -> None:
        for size, (_, shift) in itertools.product((1, 5, 17, CHUNK + 5), ((0, 0), (0, 1))):
            self.add(self.numbers(size), (0, shift))
            self.gradients[-1] = None
        self.add(self.numbers(9))  # whose dtype says which kernel it is

    def expanded(self) -> None:
        for shape in ((40,), (2, CHUNK)):
            self.add(self.numbers(1))
            one = self.gradients[-1]
            assert one is not None
            self.gradients[-1] = one.expand(shape)
            self.views[-1] = self.memory.take(shape, self.wire)

    def in_the_wire(self) -> None:
        sizes = (*SMALL, *LARGE)
        for size, (shift,) in zip(sizes, itertools.cycle(offsets(self.wire)), strict=False):
            self.add(self.numbers(size), (0, shift))
        for size in (*SMALL, *LARGE[-4:]):
            self.add(self.numbers(size))
        for view in self.views:
            view.copy_(whole(view.shape, self.wire, self.random))
        self.gradients = list(self.views)

    def special(self, most: float = _INF) -> None:
        values = _special(45, torch.float64, self.random)
        values[values.isfinite() & (values.abs() > most)] = most
        self.add(values[:44])
        self.add(values, (1, 1))
        self.add(values.view(5, 9), (0, 0), _opposite_strides((5, 9)))


def _opposite_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = itertools.accumulate(shape[:-1], int.__mul__, initial=2)
    return tuple(strides)


def _buckets(
    gradient: torch.dtype, wire: torch.dtype, packs: bool, defined: bool = False
) -> Iterator[tuple[str, Makes]]:
    """Names of paths, and what makes the arguments: gradients and views."""

    def make(fill: Callable[[_Bucket], None], memory: Memory) -> tuple[Any, ...]:
        bucket = _Bucket(memory, gradient, wire, packs)
        fill(bucket)
        return bucket.gradients, bucket.views

    yield "flat and aligned, of every size", partial(make, _Bucket.flat)
    yield "flat, at all places within 16 bytes", partial(make, _Bucket.flat_anywhere)
    yield "strided", partial(make, _Bucket.strided)
    yield "special numbers", partial(make, _Bucket.special)
    yield "special numbers within the range of fp16", partial(make, partial(_Bucket.special, most=30_000))
    if not defined:
        yield "undefined", partial(make, _Bucket.undefined)
    if packs:
        yield "expanded", partial(make, _Bucket.expanded)
    if packs and not defined and gradient == wire:
        yield "in the wire", partial(make, _Bucket.in_the_wire)


def _unpacked_measuring(kernels: Any, gradients: Any, views: Any) -> Sums:
    measured = kernels.unpack(gradients, views, measuring=True)
    if measured is None:  # operators do not measure what they move
        measured = sum(kernels.measure(one.contiguous()).cpu() for one in gradients if one is not None)
    return [pair(measured)]


def pair(measured: Tensor) -> tuple[float, float]:
    """A sum of squares, and how many elements are not finite, of what programs or calls have measured."""
    squares, odd = measured.view(-1, 2).sum(0).tolist()
    return squares, odd


def _scaled(gradient: torch.dtype, wire: torch.dtype, call: Any) -> Iterator[Case]:
    for path, make in _buckets(gradient, wire, packs=True):
        for words, scale in (("1/3", 1 / 3), ("1", 1.0)):
            yield Case(f"{path}, scale {words}", make, partial(call, scale=scale))


def pack(gradient: torch.dtype, wire: torch.dtype) -> Trial:
    """Of the kernel that packs."""
    cases = _scaled(gradient, wire, lambda kernels, *buckets, scale: kernels.pack(*buckets, scale))
    return _of_pack(f"pack of {short(gradient)} into {short(wire)}", cases)


def pack_measuring(gradient: torch.dtype, wire: torch.dtype) -> Trial:
    """Of the kernel that measures gradients while it packs them."""
    cases = _scaled(gradient, wire, lambda kernels, *buckets, scale: kernels.pack_measuring(*buckets, scale))
    return _of_pack(f"measuring pack of {short(gradient)} into {short(wire)}", cases)


def unpack(gradient: torch.dtype, wire: torch.dtype) -> Trial:
    """Of the kernel that unpacks."""
    buckets = list(_buckets(gradient, wire, packs=False))
    cases = [Case(path, make, lambda kernels, *buckets: kernels.unpack(*buckets)) for path, make in buckets]
    # Where a cast makes infinities, the CPU's kernel counts what it reads, and others what they write.
    measuring = [(f"{path}, measuring", make) for path, make in buckets if path != "special numbers"]
    cases += [Case(path, make, _unpacked_measuring) for path, make in measuring]
    return _of_pack(f"unpack of {short(wire)} into {short(gradient)}", cases)


def measure_gradients(gradient: torch.dtype) -> Trial:
    """Of the kernel that measures gradients which are not packed."""
    buckets = _buckets(gradient, gradient, packs=True, defined=True)
    cases = [Case(path, make, lambda kernels, *buckets: kernels.measure_gradients(*buckets)) for path, make in buckets]
    return _of_pack(f"measuring gradients of {short(gradient)}", cases)


def measure(wire: torch.dtype) -> Trial:
    """Of the kernel that measures a wire."""

    def make(special: bool, aligned: bool, memory: Memory) -> tuple[list[Tensor]]:
        random, shifts = random_numbers(), itertools.cycle(range(1, ACCESS // wire.itemsize))
        wires = []
        for size in (44, 45) if special else (*SMALL, *LARGE):
            values = _special(size, wire, random) if special else whole((size,), wire, random)
            wires.append(memory.put(values, 0 if aligned else next(shifts)))
        return (wires,)

    def call(kernels: Any, wires: Sequence[Tensor]) -> Sums:
        return [pair(kernels.measure(each)) for each in wires]

    cases = [
        Case(where + numbers, partial(make, special, aligned), call)
        for special, numbers in ((False, ""), (True, ", special numbers"))
        for aligned, where in ((False, "at all places within 16 bytes"), (True, "aligned"))
    ]
    return _of_pack(f"measuring wires of {short(wire)}", cases)


# ------------------------------------------------------------------------------------------------- sums of shards


def sum_shards(dtype: torch.dtype) -> Trial:
    """Of the kernel that adds up shards."""
    counts = itertools.cycle((2, 1, 4, 5, 9, 3))

    def make(memory: Memory, sizes: Sequence[int], shifts: Sequence[tuple[int, ...]], in_place: bool = False) -> Any:
        random, calls = random_numbers(), []
        for size, (of_shards, of_target) in zip(sizes, itertools.cycle(shifts), strict=False):
            values = normal((next(counts), size), torch.float64, random)
            values *= 10.0 ** torch.randint(-3, 3, (len(values), 1), generator=random, device="cpu")
            values[:, 0] = -0.0
            shards = memory.put(values.to(dtype), of_shards)
            calls.append((shards, shards[-1] if in_place else memory.take((size,), dtype, of_target)))
        return (calls,)

    def make_special(memory: Memory) -> Any:
        values = torch.stack([_special(size, dtype, random_numbers()) for size in (44, 44)])
        return ([(memory.put(values, shift), memory.take((44,), dtype, shift)) for shift in (0, 1)],)

    def call(kernels: Any, calls: Sequence[tuple[Tensor, Tensor]]) -> None:
        for shards, target in calls:
            kernels(shards, target)

    rows = (8, 16, 1016, 1024, 1032, CHUNK - 8, CHUNK, CHUNK + 8, 2 * CHUNK + 16)  # which begin aligned
    anywhere = [shifts for shifts in offsets(dtype, dtype) if any(shifts)]
    sizes = (*SMALL, *LARGE)
    cases = (
        Case("aligned rows", lambda memory: make(memory, rows, [(0, 0)]), call),
        Case("rows of every size", lambda memory: make(memory, sizes, [(0, 0)]), call),
        Case("aligned rows, at all places within 16 bytes", lambda memory: make(memory, (24,) * 63, anywhere), call),
        Case("into a row", lambda memory: make(memory, (*rows[:5], *SMALL), [(0, 0)], in_place=True), call),
        Case("special numbers", make_special, call),
    )
    name = f"fastddp_sum_shards_{'bf16' if dtype == torch.bfloat16 else 'fp16'}"
    kernels = partial(_Function, name, _C.sum_shards)
    return Trial(f"sums of {short(dtype)}", kernels, lambda: _C.sum_shards_with_operators, cases)


# ------------------------------------------------------------------------------------------------- tables


def write_words() -> Trial:
    """Of the kernel that writes tables."""

    def make(memory: Memory) -> tuple[Any, ...]:
        words = torch.randint(-(2**63), 2**63 - 1, (WORDS,), generator=random_numbers(), device="cpu").tolist()
        counts = (1, WORDS_TOGETHER, WORDS_TOGETHER + 1, WORDS - 1, WORDS)
        rooms = [-(-count // WORDS_TOGETHER) * WORDS_TOGETHER for count in counts]
        return [memory.take((room,), torch.int64) for room in rooms], [tuple(words[-count:]) for count in counts]

    def call(kernels: Any, targets: Sequence[Tensor], tables: Sequence[tuple[int, ...]]) -> None:
        for target, words in zip(targets, tables, strict=True):
            kernels(words, target)

    def with_operators(words: Sequence[int], target: Tensor) -> None:
        target.zero_()[: len(words)] = torch.tensor(words, device="cpu")

    case = Case("tables of every number of groups", make, call)
    kernels = partial(_Function, "fastddp_write_words", _C.write_words)
    return Trial("tables", kernels, lambda: with_operators, [case])


class _Function:
    """A kernel that a function launches, as an object like other kernels."""

    def __init__(self, name: str, function: Callable[..., None], device: torch.device, trial: bool) -> None:
        self._name, self._function, self._device, self._trial = name, function, device, trial
        self.launches = 0

    def wrote_around(self) -> bool:
        return False

    def __call__(self, *arguments: Any) -> None:
        self._function(*arguments, self._trial)
        if self._device.type != "cpu":
            used = (_C.Trust.proven, _C.Trust.untried) if self._trial else (_C.Trust.proven,)
            self.launches += _C.trust_in_kernel(self._device, self._name) in used


def _of_pack(what: str, cases: Iterable[Case]) -> Trial:
    return Trial(what, lambda device, trial: _C.Kernels(device, trial), _C.Kernels.of_operators, tuple(cases))
