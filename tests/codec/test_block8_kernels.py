"""Block8's Triton kernels, run by Triton's interpreter, against their reference in plain torch: every bit."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import block8_interpreted as interpreted
from block8_interpreted import Format, reference
from fastddp import _C
from interpreting import BITS, interpreter  # noqa: F401  a fixture of this module

GUARD = 32
NUMBERS = ["int8", "e4m3", "e5m2"]
KEYS = [None, 0x0123456789ABCDEF, 0xFEDCBA9876543210]
ELEMENTS = interpreted.kernels.ELEMENTS

formats = pytest.mark.parametrize(
    "form", [Format(number, block) for number in NUMBERS for block in (128, 256)], ids=lambda f: f"{f.number}-{f.block}"
)
numbers = pytest.mark.parametrize("number", NUMBERS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
keys = pytest.mark.parametrize("key", KEYS[:2], ids=["nearest", "drawn"])


# --- What kernel and reference both work on ---


class Given:
    """Gradients, a wire and errors with memory around them that nobody may touch; equal bits each time it is made.

    Gradients lie ``shift`` elements behind a multiple of 64 bytes, errors ``error_shift``; the first gradient has the
    block ``first``, and between two of them there is a block of none.
    """

    def __init__(
        self,
        form: Any,
        gradients: list[Tensor],
        shift: int = 0,
        error_shift: int = 0,
        first: int = 1,
        error: Tensor | None = None,
    ) -> None:
        self.form = form
        self.buffers: list[Tensor] = []
        self.gradients: list[tuple[Tensor, int]] = []
        block = first
        for gradient in gradients:
            inside = self._guarded(gradient, shift)
            self.gradients.append((inside, block))
            block += form.blocks_of(gradient.numel()) + 1
        groups = -(-block // 4)
        generator = torch.Generator().manual_seed(1)
        self.elements = groups * 4 * form.block
        given = torch.randn(self.elements, generator=generator) * 1e-2 if error is None else error
        self.error = self._guarded(given, error_shift)
        self.kept = self._guarded(torch.full_like(given, 5), error_shift)
        self.wire = self._guarded(torch.zeros(groups * form.group_bytes, dtype=torch.uint8), 0)
        assert self.wire.data_ptr() % 16 == 0

    def _guarded(self, values: Tensor, shift: int) -> Tensor:
        begin = GUARD + shift
        buffer = torch.full((values.numel() + begin + GUARD,), 7, dtype=values.dtype)
        assert buffer.data_ptr() % 64 == 0
        inside = buffer[begin : begin + values.numel()]
        inside.copy_(values)
        self.buffers.append(buffer)
        return inside

    def assert_equal(self, other: Given) -> None:
        """Every byte, also of what lies around; all NaN are alike."""
        for mine, theirs in zip(self.buffers, other.buffers, strict=True):
            assert torch.equal(bits(mine), bits(theirs)), mine.dtype


def bits(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.uint8:
        return tensor
    canonical = torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor)
    return canonical.view(BITS[tensor.element_size()])


def random(count: int, seed: int = 0) -> Tensor:
    """Of magnitudes that differ from block to block, and within one."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-8, 2, (count,), generator=generator).float()
    of_blocks = torch.linspace(-30, 30, -(-count // 128)).round().repeat_interleave(128)[:count]
    return torch.randn(count, generator=generator) * torch.exp2(exponents + of_blocks)


def check(form: Any, gradients: list[Tensor], scale: float = 1.0, key: int | None = None, **places: Any) -> None:
    """A window on one rank: encode, decode."""
    kernel, expected = (Given(form, gradients, **places) for _ in range(2))
    interpreted.encode(form, kernel.gradients, kernel.error, kernel.wire, scale, key, kernel.kept)
    reference.encode(form, expected.gradients, expected.error, expected.wire, scale, key, expected.kept)
    kernel.assert_equal(expected)

    partials = interpreted.decode(form, kernel.gradients, kernel.wire)
    reference.decode(form, expected.gradients, expected.wire)
    kernel.assert_equal(expected)
    check_measured(partials, torch.cat([gradient for gradient, _ in expected.gradients]))


def check_measured(partials: Tensor, written: Tensor) -> None:
    squares, odd = partials.sum(0).tolist()
    assert odd == int(written.isfinite().logical_not().sum())
    expected = float(written.double().square().sum())
    if expected < torch.finfo(torch.float32).max:
        assert squares == pytest.approx(expected, rel=1e-5)
    else:
        assert not math.isfinite(squares)


def check_sum(form: Any, shards: list[Tensor], error: Tensor, key: int | None, first_element: int, into: int) -> None:
    """The target is one of the shards, or, with ``into`` -1, none of them."""
    results = []
    for add in (interpreted.add, reference.add):
        copies, own = [shard.clone() for shard in shards], error.clone()
        target = copies[into] if into >= 0 else torch.zeros_like(shards[0])
        add(form, copies, target, own, key, first_element)
        results.append([*copies, target, own])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(bits(mine), bits(theirs))


def shards_of(form: Any, values: list[Tensor]) -> list[Tensor]:
    """Wires with these values, a multiple of a group each."""
    wires = []
    for each in values:
        wires.append(torch.zeros(each.numel() // (4 * form.block) * form.group_bytes, dtype=torch.uint8))
        reference.encode(form, [(each, 0)], None, wires[-1])
    return wires


# --- Worked examples ---


def blocks_that_begin(form: Any, beginnings: list[list[int]], scales: list[float]) -> Tensor:
    wire = torch.zeros(form.group_bytes, dtype=torch.uint8)
    for block, (beginning, scale) in enumerate(zip(beginnings, scales, strict=True)):
        at = 16 + block * form.block
        wire[at : at + len(beginning)] = torch.tensor(beginning, dtype=torch.int8).view(torch.uint8)
        wire[4 * block : 4 * block + 4] = torch.tensor([scale]).view(torch.uint8)
    return wire


@pytest.mark.parametrize("these", [interpreted, reference], ids=["kernels", "reference"])
def test_worked_examples(these: Any) -> None:
    form = Format("int8", 128)
    wire = torch.zeros(form.group_bytes, dtype=torch.uint8)
    gradients = [(torch.tensor([2.0, -4.0]), 0), (torch.tensor([127.0, 0.75]), 1)]
    these.encode(form, gradients, None, wire, 0.5)
    assert torch.equal(wire, blocks_that_begin(form, [[64, -127], [127, 1]], [2 / 127, 0.5]))

    partials = these.decode(form, gradients[1:], wire)
    assert gradients[1][0].tolist() == [63.5, 0.5]
    assert partials is None or partials.tolist() == [[4032.5, 0]]

    shards = [blocks_that_begin(form, *rows) for rows in (([[127, 2]], [1.0]), ([[127, -1]], [0.5]))]
    these.add(form, shards, wire, None)
    assert torch.equal(wire, blocks_that_begin(form, [[127, 1]], [1.5]))

    error = torch.zeros(512)
    gradients = [(torch.tensor([127.0, 0.75]), 0)]
    these.encode(form, gradients, error, wire)
    assert error[:2].tolist() == [0, -0.25]
    kept = torch.ones(512)
    these.encode(form, gradients, error, wire, kept=kept)
    assert kept[:4].tolist() == [0, -0.25, 0, 0]
    assert kept[128:].tolist() == [1] * 384, "other gradients' blocks"


def test_tables_of_the_docstring() -> None:
    gradients = [(torch.zeros(5000), 0), (torch.zeros(3), 40)]
    form = Format("int8", 128)
    addresses, runs = interpreted.tables(form, gradients)
    assert addresses.tolist() == [gradient.data_ptr() for gradient, _ in gradients]
    assert runs.flatten().tolist() == [0, 0, 0, 4096, 0, 4096, 32, 904, 1, 0, 40, 3]
    wire, error = torch.zeros(11 * form.group_bytes, dtype=torch.uint8), torch.zeros(11 * 512)
    interpreted.encode(form, [(torch.tensor([254.0, 1.2, 0.0]), 40)], error, wire)
    assert wire.nonzero().flatten().tolist() == [5280 + 3, 5296, 5297]
    assert error.nonzero().flatten().tolist() == [5121]


def test_draws_of_the_docstring() -> None:
    drawn = reference.draw(1, torch.arange(4))
    assert (drawn * 2**16).tolist() == [0x58F5, 0, 0x6785, 0x3656]


# --- The reference itself ---


@pytest.mark.parametrize("number", ["e4m3", "e5m2"])
def test_the_reference_rounds_to_nearest_as_torchs_cast_does(number: str) -> None:
    form = Format(number, 128)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200_000, generator=generator) * torch.exp2(torch.randint(-20, 16, (200_000,)).float())
    x = torch.cat([x, torch.arange(-8, 8.5, 0.5) * 2.0**-10]).clamp(-form.largest, form.largest)
    rounded = reference._rounded(form, x, None).to(form.dtype)
    assert torch.equal(rounded.view(torch.uint8), x.to(form.dtype).view(torch.uint8))


@numbers
def test_stochastic_rounding_is_right_on_average_and_never_further_than_a_neighbour(number: str) -> None:
    form = Format(number, 128)
    x = torch.linspace(-form.largest, form.largest, 4001)
    fractions = [reference.draw(key, torch.arange(len(x))) for key in range(64)]
    drawn = torch.stack([reference._rounded(form, x, fraction) for fraction in fractions])
    distance = torch.maximum(x.abs() * (0.25 if number == "e5m2" else 0.125), torch.tensor(2.0**-6))
    distance = torch.ones(()) if number == "int8" else distance
    assert bool(((drawn - x).abs() <= distance).all())
    assert float(((drawn.mean(0) - x) / distance).abs().mean()) < 0.06


# --- Values ---


@formats
@dtypes
@keys
@pytest.mark.tier("slow", but_one_in=5)
def test_formats(form: Any, dtype: torch.dtype, key: int | None) -> None:
    sizes = [form.block, 8, 5 * form.block, 1, 3 * form.block + 40]
    gradients = [random(size, seed).clamp(-6e4, 6e4).to(dtype) for seed, size in enumerate(sizes)]
    check(form, gradients, 1 / 3, key)


@numbers
@pytest.mark.parametrize("size", [1, 127, 128, 129, ELEMENTS - 1, ELEMENTS, ELEMENTS + 4, 2 * ELEMENTS + 130])
@pytest.mark.tier("slow", but_one_in=5)
def test_sizes_around_blocks_and_programs(number: str, size: int) -> None:
    check(Format(number, 128), [random(size), random(8)], key=KEYS[size % 3])


@pytest.mark.tier("slow", but_one_in=3)
@pytest.mark.parametrize("first", range(5))
@pytest.mark.parametrize("block", [128, 256])
def test_gradients_that_begin_anywhere_in_a_group(first: int, block: int) -> None:
    check(Format("e4m3", block), [random(6 * block), random(1), random(block)], first=first)


@pytest.mark.parametrize(("shift", "error_shift"), [(1, 0), (0, 1), (3, 2), (4, 0), (4, 4)])
@dtypes
@pytest.mark.tier("slow", but_one_in=4)
def test_every_misalignment(shift: int, error_shift: int, dtype: torch.dtype) -> None:
    form = Format("e5m2", 128)
    gradients = [random(size, size).to(dtype) for size in (ELEMENTS + 384, 130)]
    check(form, gradients, 0.5, shift=shift, error_shift=error_shift)


SPECIAL = {
    "zeros": [0.0, -0.0],
    "negative zeros beside numbers": [-0.0, 1.0, 0.0, -1.0, -1e-9],
    "below the least magnitude": [2.0**-100 * (1 - 2.0**-24), -(2.0**-120), 1e-45],
    "the least magnitude": [2.0**-100, -(2.0**-103)],
    "numbers that are subnormal in the format": [448.0, 2.0**-6, 3 * 2.0**-9, 2.0**-10, 1.5 * 2.0**-9, -(2.0**-11)],
    "ties": [127.0, 0.5, 1.5, 2.5, -0.5, -126.5],
    "the largest floats": [3.4028234e38, -3.4028234e38, 1e38, 3.3e38],
    "the largest that counts as finite": [2.0**127, -(2.0**127), 1e38, -3.0],
    "above that": [2.0**127 * (1 + 2.0**-23), 1.0, -1.6e38],
    "infinite": [1.0, math.inf],
    "minus infinite": [-math.inf, 0.0],
    "not a number": [math.nan, 3.0],
    "a NaN with its sign set": [0.0, -math.nan],
}


@formats
@keys
@pytest.mark.parametrize("values", SPECIAL.values(), ids=list(SPECIAL))
@pytest.mark.tier("slow", but_one_in=11)
def test_special_values(form: Any, key: int | None, values: list[float]) -> None:
    gradient = random(5 * form.block)
    gradient[2 * form.block : 3 * form.block] = torch.tensor(values).repeat(form.block)[: form.block]
    for error in (None, torch.zeros(8 * form.block)):
        check(form, [gradient], 1.0, key, error=error)
    without = [Given(form, [gradient]) for _ in range(2)]
    interpreted.encode(form, without[0].gradients, None, without[0].wire, -1.0, key)
    reference.encode(form, without[1].gradients, None, without[1].wire, -1.0, key)
    without[0].assert_equal(without[1])
    shards = shards_of(
        form, [torch.cat([random(8 * form.block, 9)]), torch.cat([gradient, torch.zeros(3 * form.block)])]
    )
    check_sum(form, shards, random(8 * form.block, 3), key, 0, into=-1)


def test_every_number_of_a_format_comes_back() -> None:
    for number in NUMBERS:
        form = Format(number, 256)
        codes = torch.arange(256, dtype=torch.uint8).view(form.dtype)
        values = codes.float()
        values = torch.where(values.isfinite() & (values.abs() <= form.largest), values, 0.0)
        for key in KEYS[:2]:
            check(form, [values], 1.0, key, error=torch.zeros(1024))
        wire, back = torch.zeros(form.group_bytes, dtype=torch.uint8), torch.zeros(256)
        interpreted.encode(form, [(values, 0)], None, wire)
        interpreted.decode(form, [(back, 0)], wire)
        assert torch.equal(bits(back), bits(values))


def test_a_cast_that_overflows_is_counted() -> None:
    form = Format("e4m3", 128)
    wire = torch.zeros(form.group_bytes, dtype=torch.uint8)
    reference.encode(form, [(torch.tensor([1e6, 1.0]), 0)], None, wire)
    back = torch.zeros(2, dtype=torch.float16)
    partials = interpreted.decode(form, [(back, 0)], wire)
    assert back[0] == math.inf
    assert partials[:, 1].tolist() == [1]


def test_gradients_of_no_elements() -> None:
    form = Format("int8", 128)
    check(form, [torch.zeros(0), random(40), torch.zeros(0)])
    assert interpreted.decode(form, [(torch.zeros(0), 0)], torch.zeros(528, dtype=torch.uint8)).tolist() == []


# --- Sums ---


@formats
@keys
@pytest.mark.parametrize("count", [1, 2, 4, 5, 9])
@pytest.mark.tier("slow", but_one_in=7)
def test_sums_of_shards(form: Any, key: int | None, count: int) -> None:
    groups = 2 * ELEMENTS // (4 * form.block) + 1
    values = [random(groups * 4 * form.block, seed) for seed in range(count)]
    check_sum(form, shards_of(form, values), random(len(values[0]), 77), key, 3 * 4 * form.block, into=count - 2)


def test_sums_into_memory_of_their_own_and_without_errors() -> None:
    form = Format("e4m3", 128)
    shards = shards_of(form, [random(1024, seed) for seed in range(3)])
    check_sum(form, shards, random(1024, 5), None, 0, into=-1)
    targets = [torch.zeros_like(shards[0]) for _ in range(2)]
    interpreted.add(form, shards, targets[0], None)
    reference.add(form, shards, targets[1], None)
    assert torch.equal(*targets)


@pytest.mark.parametrize("shift", [1, 2, 3])
def test_errors_of_sums_that_are_not_aligned(shift: int) -> None:
    form = Format("e5m2", 256)
    shards = shards_of(form, [random(5 * 1024, seed) for seed in range(3)])
    errors = random(5 * 1024 + shift, 5)
    own = [errors.clone()[shift:] for _ in range(2)]
    targets = [torch.zeros_like(shards[0]) for _ in range(2)]
    for add, error, target in zip((interpreted.add, reference.add), own, targets, strict=True):
        assert error.data_ptr() % 16 == 4 * shift
        add(form, shards, target, error, KEYS[1], 2**33)
    assert torch.equal(*targets)
    assert torch.equal(bits(own[0]), bits(own[1]))


def test_draws_depend_on_the_place_in_the_wire_and_on_the_key() -> None:
    form = Format("int8", 128)
    values = [random(1024, seed) for seed in range(2)]
    wires = []
    for key, first_element in ((KEYS[1], 0), (KEYS[1], 1024), (KEYS[2], 0), (KEYS[1], 2**32)):
        wires.append(torch.zeros(2 * form.group_bytes, dtype=torch.uint8))
        interpreted.add(form, shards_of(form, values), wires[-1], None, key, first_element)
    assert not torch.equal(wires[0], wires[1])
    assert not torch.equal(wires[0], wires[2])
    assert torch.equal(wires[0], wires[3])  # elements are counted modulo 2^32


# --- Alignment ---


def test_alignment_hints_are_given_when_true_and_only_then() -> None:
    hints: list[bool] = []

    def record(handle: Any, name: str, values: list[int]) -> None:
        assert (name, values) == ("tt.divisibility", [16])
        hints.append(bool((handle.data % 16 == 0).all()))

    form = Format("int8", 128)
    with mock.patch("triton.runtime.interpreter.TensorHandle.set_attr", record):
        for shift, error_shift, size in ((0, 0, 640), (1, 0, 640), (0, 1, 640), (4, 4, 640), (0, 0, 642)):
            hints.clear()
            given = Given(form, [random(size)], shift=shift, error_shift=error_shift, first=3)
            interpreted.encode(form, given.gradients, given.error, given.wire, kept=given.kept)
            interpreted.decode(form, given.gradients, given.wire)
            # The wire and gradients in both, and in one errors, twice; element by element, the wire in four tiles.
            decodes = shift % 4 == 0 and size % 4 == 0
            assert hints == [True] * (4 + (2 if decodes else 4))


# --- The tables ---


def test_runs_cover_every_block_of_every_gradient_once() -> None:
    sizes = [1, 3000, 0, 5000, 128, 20_000]
    for block in (128, 256):
        form = Format("int8", block)
        given = Given(form, [torch.zeros(size) for size in sizes])
        _, runs = interpreted.tables(form, given.gradients)
        assert bool((runs[:, 3] >= 1).all())
        assert bool((runs[:, 3] <= ELEMENTS).all())
        for index, (gradient, first) in enumerate(given.gradients):
            own = runs[runs[:, 0] == index]
            assert int(own[:, 3].sum()) == gradient.numel()
            assert own[:, 1].tolist() == list(range(0, gradient.numel(), ELEMENTS))
            assert own[:, 2].tolist() == [first + begin // block for begin in own[:, 1].tolist()]


def test_shards_are_known_by_their_addresses() -> None:
    shards = [torch.zeros(528, dtype=torch.uint8) for _ in range(3)]
    words = _C.block8_tables([], shards, 128, ELEMENTS)
    assert words == {"gradients": [], "runs": [], "shards": [shard.data_ptr() for shard in shards]}
