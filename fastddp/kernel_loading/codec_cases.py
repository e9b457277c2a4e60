"""All paths through the kernels of PowerSGD and of 8 bits, as calls that lead through them: as :mod:`.kernel_cases`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastddp import _C
from fastddp.kernel_loading.kernel_cases import CHUNK, SMALL, normal, offsets, pair, random_numbers, short, whole
from fastddp.kernel_loading.trials import Case, Memory, Sums, Trial

# ------------------------------------------------------------------------------------------------------- PowerSGD

STEP = 128  # columns of a program of project; the other tiles have half as many
_ROWS = (16, 1, 15, 17, 33)
_COLUMNS = (*(tile + more for tile in (STEP, STEP // 2) for more in (-1, 0, 1, 8)), *range(1, 10), 31, 32, 33, 257)
"""Around a tile, a warp and an access."""
_SHAPES = (
    *zip(itertools.cycle(_ROWS), _COLUMNS, strict=False),
    *zip((255, 256, 257, 264), (8, 9, 8, 64), strict=True),  # around the rows of a program of reconstruct
    *zip((63, 64, 65, 130), (8, 9, 8, 16), strict=True),  # around the rows of a program of project
    *((2113, 8), (2050, 3)),  # more programs share a column of project than are added up at once
)
_SMALL_SHAPES = ((17, STEP + 8), (5, 9))
_SPECIAL = (torch.inf, torch.nan, -torch.inf, 300.0)

_SHARE = 1e-5  # how far elements of vectors of length 1 may be from those of another algorithm

Matrix = tuple[Tensor | None, Tensor | None, Tensor, Tensor]


class _Matrices:
    """Gradients with memory and factors, whole numbers all, so small that products and sums are exact."""

    def __init__(self, memory: Memory, dtype: torch.dtype, rank: int) -> None:
        self.memory, self.dtype = memory, dtype
        self.dtypes = dtype, dtype, torch.float32, torch.float32, dtype  # gradient, memory, P, Q, memory before
        self.ranks = itertools.cycle(dict.fromkeys((rank, rank // 2 + 1, 1)))  # all of which take one kernel
        self.random = random_numbers()
        self.all: list[Matrix] = []
        self.before: list[Tensor | None] = []  # by matrix

    def add(self, rows: int, columns: int, shifts: Sequence[int] = (0, 0, 0, 0, 0)) -> None:
        rank, most = next(self.ranks), 127 if self.dtype == torch.bfloat16 else 1023
        shapes = ((rows, columns), (rows, columns), (rows, rank), (rank, columns), (rows, columns))
        numbers = [
            self.memory.put(whole(shape, dtype, self.random, largest), shift)
            for shape, dtype, largest, shift in zip(shapes, self.dtypes, (most, most, 2, 3, most), shifts, strict=True)
        ]
        self.all.append((numbers[0], numbers[1], numbers[2], numbers[3]))
        self.before.append(numbers[4])

    def of_every_size(self, shapes: Iterable[tuple[int, int]] = _SHAPES) -> None:
        for rows, columns in shapes:
            self.add(rows, columns)

    def anywhere(self) -> None:
        self.add(5, 24)
        for part, dtype in enumerate(self.dtypes):
            for (shift,) in itertools.islice(offsets(dtype), 1, None):
                at = [0, 0, 0, 0, 0]
                at[part] = shift
                self.add(5, 24, at)

    def without_gradient(self) -> None:
        self.of_every_size(_SMALL_SHAPES)
        self.all = [(None, *others) for _, *others in self.all]  # type: ignore[misc]

    def without_memory(self) -> None:
        self.of_every_size(_SMALL_SHAPES)
        self.all = [(gradient, None, p, q) for gradient, _, p, q in self.all]
        self.before = [None] * len(self.all)

    def in_place(self) -> None:
        self.of_every_size(_SMALL_SHAPES)
        self.before = [memory for _, memory, _, _ in self.all]

    def infinite(self) -> None:
        self.of_every_size(_SMALL_SHAPES)
        self.all[0][2][1, 0] = torch.inf  # so is the sum of squares

    def special(self) -> None:
        self.of_every_size(_SMALL_SHAPES)
        for _, memory, p, q in self.all:
            assert memory is not None
            for row, value in enumerate(_SPECIAL):
                p[row] = value
                q[:, 2 * row] = 300.0  # their product is infinite in fp16
                memory[4, row] = value


def _powersgd(what: str, dtype: torch.dtype, rank: int, fills: Sequence[Callable[..., None]], call: Any) -> Trial:
    def make(fill: Callable[..., None], memory: Memory) -> tuple[Any, ...]:
        matrices = _Matrices(memory, dtype, rank)
        fill(matrices)
        return matrices.all, matrices.before

    cases = tuple(Case(_words(fill), partial(make, fill), call) for fill in fills)
    return _of_powersgd(f"{what} of {short(dtype)}, rank {rank}", cases)


def _words(fill: Callable[..., None]) -> str:
    return fill.__name__.replace("_", " ")


def _of_powersgd(what: str, cases: Sequence[Case], instead: Callable[[], Any] | None = None) -> Trial:
    operators = _C.LowRankKernels.of_operators
    return Trial(what, lambda device, trial: _C.LowRankKernels(device, trial), operators, cases, instead)


_FILLS = (_Matrices.of_every_size, _Matrices.anywhere, _Matrices.without_gradient, _Matrices.without_memory)


def compress(dtype: torch.dtype, rank: int) -> Trial:
    """Of PowerSGD's first step."""
    fills = (*_FILLS, _Matrices.in_place)
    return _powersgd("compress", dtype, rank, fills, lambda kernels, all, before: kernels.compress(all, 0.5, before))


def project(dtype: torch.dtype, rank: int) -> Trial:
    """Of the two kernels of PowerSGD's third step."""
    return _powersgd("project", dtype, rank, _FILLS, lambda kernels, all, _: kernels.project(all, 0.25))


def reconstruct(dtype: torch.dtype, rank: int) -> Trial:
    """Of PowerSGD's last step."""
    fills = (*_FILLS[:2], _Matrices.without_memory, _Matrices.infinite, _Matrices.special)
    return _powersgd("reconstruct", dtype, rank, fills, lambda kernels, all, _: [pair(kernels.reconstruct(all))])


def orthogonalise(rank: int) -> Trial:
    """Of the three kernels that make PowerSGD's bases orthonormal."""
    lines = CHUNK // rank**2  # that a program has in flight
    block = max(lines, 64)  # of a program, as long as there are few
    several = (2 * block + 3, 5 * block) if rank > 8 else (2 * block + 3,)
    lengths = (rank, lines - 1, lines + 1, block - 1, block, block + 1, *several)

    def bases(memory: Memory, dependent: bool = False, special: bool = False, near: bool = False) -> list[Tensor]:
        random, found = random_numbers(), []
        ranks = itertools.cycle(dict.fromkeys((rank, rank // 2 + 1, 1)))
        for length, transposed in itertools.product(lengths, (False, True)):
            vectors = normal((length, min(next(ranks), length)), torch.float32, random)
            if near:  # a first pass leaves an error that the second mends
                vectors[:, 1:2] = vectors[:, :1] + 3e-6 * vectors[:, 1:2]
            if dependent and length > 2:
                vectors[:, 1:2] = 2 * vectors[:, :1]
                vectors[:, 3:4] = 0.0
                if special:
                    vectors[-1:, 2:3] = torch.inf
                    vectors[:1, 4:5] = torch.nan
            found.append(memory.put(vectors, strides=(1, length) if transposed else None))
        if rank == 1 and dependent:
            found[0].zero_()
        return found

    def case(path: str, epsilon: float, refill: int | None, **of_bases: bool) -> Case:
        def make(memory: Memory) -> tuple[Any, ...]:
            return bases(memory, **of_bases), epsilon, refill

        return Case(path, make, lambda kernels, *arguments: kernels.orthogonalise(*arguments), rounded=_SHARE)

    cases = (
        case("independent vectors", 0.0, None),
        case("nearly dependent vectors", 0.0, None, near=True),
        case("dependent vectors", 0.0, None, dependent=True),
        case("vectors shorter than epsilon", 1.01 * lines**0.5, None),
        case("refilled vectors", 0.0, 12345, dependent=True),
        case("refilled vectors that are not finite", 1e-3, 2**63 + 5, dependent=True, special=True),
    )
    return _of_powersgd(f"orthogonalise, rank {rank}", cases, lambda: _C.LowRankKernels(torch.device("cpu")))


# --------------------------------------------------------------------------------------------------------- 8 bits

_KEY = 0xFEDCBA9876543210
_SHARDS = (2, 1, 4, 5, 9)


def _of_block8(what: str, number: str, block: int, cases: Iterable[Case]) -> Trial:
    return Trial(
        f"{what} {number} in blocks of {block}",
        lambda device, trial: _C.Block8Kernels(number, block, device, trial),
        lambda: _C.Block8Kernels.of_operators(number, block),
        tuple(cases),
    )


class _Blocked:
    """Gradients and the blocks that they have in a wire. Now and then there is a block of none between them."""

    def __init__(self, memory: Memory, dtype: torch.dtype, block: int) -> None:
        self.memory, self.dtype, self.block = memory, dtype, block
        self.random = random_numbers()
        self.gradients: list[tuple[Tensor, int]] = []
        self.blocks = 1

    def add(self, values: Tensor, shift: int = 0) -> None:
        self.gradients.append((self.memory.put(values.to(self.dtype), shift), self.blocks))
        self.blocks += -(-values.numel() // self.block) + len(self.gradients) % 2

    def of_every_size(self) -> None:
        for size in (*_sizes(self.block), CHUNK - 8, CHUNK + 8, 2 * CHUNK + 3):
            self.add(normal((size,), torch.float64, self.random))

    def anywhere(self) -> None:
        for (shift,), size in zip(offsets(self.dtype), itertools.cycle((8, 2 * self.block + 8, 5)), strict=False):
            self.add(normal((size,), torch.float64, self.random), shift)

    def special(self) -> None:
        values = normal((9, self.block), torch.float64, self.random)
        for row, value in enumerate((torch.inf, torch.nan, 3e38, 2.0**127, -1e-40)):
            values[row, 3 * row] = value
        values[5:8] *= torch.tensor([[0.0], [2.0**-101], [2.0**-99]], device="cpu")
        self.add(values.flatten())
        self.add(values.flatten(), 1)

    @property
    def groups(self) -> int:
        return -(-self.blocks // 4)

    def wire(self) -> Tensor:
        return self.memory.take((self.groups * 4 * (self.block + 4),), torch.uint8)

    def errors(self, shift: int, share: float = 1e-2) -> Tensor:
        return self.memory.put(share * normal((self.groups * 4 * self.block,), torch.float32, self.random), shift)


def _sizes(block: int) -> Iterator[int]:
    """Around an access, a block, a group and a program."""
    for whole_number in (block, 4 * block, CHUNK):
        yield from (whole_number - 1, whole_number, whole_number + 1)
    yield from (*SMALL, 1000)


_Fill = Callable[[_Blocked], None]
_FILLS_OF_BLOCKS: tuple[_Fill, ...] = (_Blocked.of_every_size, _Blocked.anywhere, _Blocked.special)


def encode(dtype: torch.dtype, number: str, block: int, drawn: bool) -> Trial:
    """Of the kernel that makes bytes of gradients."""
    key = _KEY if drawn else None

    def make(fill: _Fill, before: int | None, error: int | None, memory: Memory) -> tuple[Any, ...]:
        blocked = _Blocked(memory, dtype, block)
        fill(blocked)
        errors = None if before is None else blocked.errors(before)
        room = None if error is None else memory.take((blocked.groups * 4 * block,), torch.float32, error)
        return blocked.gradients, errors if room is None else room, blocked.wire(), 1 / 3, key, errors

    places = ((None, None), (0, None), (0, 0), (1, 0), (0, 1))
    cases = [
        Case(
            f"{_words(fill)}, {_described('errors', before)}, {_described('others', error)}",
            partial(make, fill, before, error),
            lambda kernels, *arguments: kernels.encode(*arguments),
        )
        for fill, (before, error) in itertools.product(_FILLS_OF_BLOCKS, places)
        if fill is _Blocked.anywhere or before == error
    ]
    return _of_block8(f"encode{' by draws' if drawn else ''} of {short(dtype)} by", number, block, cases)


def _described(what: str, shift: int | None) -> str:
    return f"no {what}" if shift is None else f"{what} {'unaligned' if shift else 'aligned'}"


def add(number: str, block: int, drawn: bool) -> Trial:
    """Of the kernel that adds up shards."""
    key = _KEY if drawn else None
    program = CHUNK // block // 4  # groups

    def make(error: int | None, in_place: bool, special: bool, memory: Memory) -> tuple[Any, ...]:
        random = random_numbers()
        calls: list[tuple[Any, ...]] = []
        for count, groups in zip(_SHARDS, (1, 3, program, program + 1, 2 * program + 1), strict=True):
            wires = [memory.put(_wire(number, block, groups, random)) for _ in range(count)]
            if special:
                _scales(wires[0], block)[0, 1] = torch.nan
            target = wires[count // 2] if in_place else memory.take(wires[0].shape, torch.uint8)
            numbers = groups * 4 * block
            errors = None if error is None else memory.put(normal((numbers,), torch.float32, random), error)
            calls.append((wires, target, errors, key, len(calls) * 4 * block))
        return (calls,)

    def call(kernels: Any, calls: Any) -> None:
        for arguments in calls:
            kernels.add(*arguments)

    cases = [
        Case(
            f"{'into a shard' if in_place else 'beside the shards'}, {_described('errors', error)}"
            f"{', special numbers' if special else ''}",
            partial(make, error, in_place, special),
            call,
        )
        for error, in_place, special in (
            *((error, in_place, False) for error in (None, 0, 1) for in_place in (False, True)),
            (0, False, True),
        )
    ]
    return _of_block8(f"add{' by draws' if drawn else ''} by", number, block, cases)


def decode(dtype: torch.dtype, number: str, block: int) -> Trial:
    """Of the kernel that makes gradients of bytes."""

    def make(fill: _Fill, whole_numbers: bool, memory: Memory) -> tuple[Any, ...]:
        blocked = _Blocked(memory, dtype, block)
        fill(blocked)
        wire = memory.put(_wire(number, block, blocked.groups, blocked.random, whole_numbers))
        if fill is _Blocked.special:
            _scales(wire, block)[0, 1] = torch.nan
            _scales(wire, block)[1, 2] = 0.0
        return blocked.gradients, wire

    def call(kernels: Any, gradients: Any, wire: Tensor) -> Sums:
        return [pair(kernels.decode(gradients, wire))]

    cases = [
        Case(f"{_words(fill)}, {words}", partial(make, fill, is_whole), call, sums_rounded=rounded)
        for fill in _FILLS_OF_BLOCKS
        for words, is_whole, rounded in (("whole numbers", True, 1e-12), ("all bytes", False, 1e-5))
    ]
    return _of_block8(f"decode of {short(dtype)} by", number, block, cases)


_DTYPES = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def _scales(wire: Tensor, block: int) -> Tensor:
    """A view of the wire's scales, [groups, 4]."""
    return wire.view(-1, 4 * (block + 4))[:, :16].view(torch.float32)


def _wire(number: str, block: int, groups: int, random: torch.Generator, whole_numbers: bool = False) -> Tensor:
    """A wire of bytes that are finite numbers; ``whole_numbers``: sums of their squares are exact."""
    wire = torch.empty(groups, 4 * (block + 4), dtype=torch.uint8, device="cpu")
    numbers = (groups, 4 * block)
    if whole_numbers:
        values = whole(numbers, torch.float32, random, most=7)
        wire[:, 16:] = values.to(_DTYPES[number]).view(torch.uint8)
        scales = 0.25 * 2.0 ** torch.randint(0, 3, (groups, 4), generator=random, device="cpu")
    else:
        most = {"int8": 127, "e4m3": 0x7E, "e5m2": 0x7B}[number]
        magnitudes = torch.randint(0, most + 1, numbers, generator=random, device="cpu")
        signs = torch.randint(0, 2, numbers, generator=random, device="cpu")
        values = magnitudes * (1 - 2 * signs) if number == "int8" else magnitudes | signs << 7
        wire[:, 16:] = values.to(torch.int8).view(torch.uint8) if number == "int8" else values.to(torch.uint8)
        scales = normal((groups, 4), torch.float32, random).abs() + 0.1
    flat = wire.flatten()
    _scales(flat, block).copy_(scales)
    return flat
