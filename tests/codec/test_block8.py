"""Numbers of 8 bits with a scale a block, on the CPU: the format, and that both implementations write the same bits."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from fastddp import _C

CPU = torch.device("cpu")
LARGEST = {"int8": 127.0, "e4m3": 448.0, "e5m2": 57344.0}
TORCHS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
# Half the distance of two neighbours below the largest number, as a part of that: what rounding to nearest takes.
HALF = {"int8": 1 / 254, "e4m3": 16 / 448, "e5m2": 4096 / 57344}
KEY = 0x0123456789ABCDEF
NUMBERS = pytest.mark.parametrize("number", LARGEST)
BLOCKS = pytest.mark.parametrize("block", [128, 256])

Blocked = list[tuple[Tensor, int]]


def laid_out(gradients: list[Tensor], block: int) -> tuple[Blocked, int]:
    """Each gradient with the number of its first block, and how many groups there are."""
    blocked, first = [], 0
    for gradient in gradients:
        blocked.append((gradient, first))
        first += math.ceil(gradient.numel() / block)
    return blocked, math.ceil(first / 4)


def empty_wire(groups: int, block: int) -> Tensor:
    return torch.zeros(groups * (16 + 4 * block), dtype=torch.uint8)


def encoded(
    values: Tensor, number: str, block: int = 128, key: int | None = None, error: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The scale of each block, and the bytes, [blocks, block]."""
    blocked, groups = laid_out([values], block)
    wire = empty_wire(groups, block)
    _C.Block8Kernels(number, block, CPU).encode(blocked, error, wire, 1.0, key)
    rows = wire.view(groups, -1)
    return rows[:, :16].contiguous().view(torch.float32).view(-1), rows[:, 16:].reshape(-1, block)


def decoded(values: Tensor, number: str, block: int = 128, key: int | None = None) -> Tensor:
    """What `values` are when they have travelled."""
    blocked, groups = laid_out([values], block)
    wire, result = empty_wire(groups, block), torch.full_like(values, 7.0)
    kernels = _C.Block8Kernels(number, block, CPU)
    kernels.encode(blocked, None, wire, 1.0, key)
    kernels.decode([(result, 0)], wire)
    return result


# ---------------------------------------------------------------------------------------------------------- the format


def all_values(number: str) -> Tensor:
    """Every number that the format has."""
    if number == "int8":
        return torch.arange(-127, 128).float()
    values = torch.arange(256, dtype=torch.uint8).view(TORCHS[number]).float()
    return values[values.abs() <= LARGEST[number]]


@NUMBERS
def test_numbers_of_the_format_travel_as_they_are(number: str) -> None:
    numbers = all_values(number)
    # The largest one makes the scale 1, in each of the blocks.
    blocks = [torch.cat([part, torch.tensor([LARGEST[number]])]) for part in numbers.split(127)]
    for block in blocks:
        scales, _ = encoded(block, number)
        assert scales[0] == 1.0
        assert torch.equal(decoded(block, number), block)


@pytest.mark.parametrize("number", TORCHS)
def test_bytes_are_those_of_torchs_cast(number: str) -> None:
    generator = torch.Generator().manual_seed(0)
    exponents = torch.rand(127 * 50, generator=generator) * 30 - 22
    values = torch.exp2(exponents).clamp(max=LARGEST[number]) * torch.randn(len(exponents), generator=generator).sign()
    for part in values.split(127):
        block = torch.cat([part, torch.tensor([LARGEST[number]])])
        _, found = encoded(block, number)
        assert torch.equal(found[0], block.to(TORCHS[number]).view(torch.uint8))


def test_halves_go_to_even_integers() -> None:
    values = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.0])
    assert decoded(values, "int8").tolist() == [0.0, 2.0, 2.0, 0.0, -2.0, 126.0, 127.0]


@NUMBERS
@BLOCKS
def test_a_value_is_off_by_half_a_distance_at_most(number: str, block: int) -> None:
    values = torch.randn(50 * block, generator=torch.Generator().manual_seed(1)) * 1e-3
    off = (decoded(values, number, block).double() - values.double()).abs().view(-1, block)
    largest = values.double().abs().view(-1, block).amax(1, keepdim=True)
    assert (off <= HALF[number] * largest * (1 + 1e-5)).all()
    assert off.max() > 0.5 * HALF[number] * largest.min()  # or nothing was rounded


@NUMBERS
def test_each_block_has_its_own_scale(number: str) -> None:
    values = torch.cat([torch.full((128,), 1e-12), torch.full((128,), 1e9), torch.full((100,), -3.0)])
    scales, _ = encoded(values, number)
    expected = torch.tensor([1e-12, 1e9, 3.0]) / LARGEST[number]
    assert torch.equal(scales[:3], expected)
    assert torch.allclose(decoded(values, number), values, rtol=1e-6, atol=0)


@NUMBERS
@pytest.mark.parametrize("magnitude", [0.0, 1e-38, 2.0**-101])
def test_a_block_of_next_to_nothing_is_zero_and_all_of_it_is_left(number: str, magnitude: float) -> None:
    values, error = torch.full((128,), magnitude), torch.zeros(512)
    scales, found = encoded(values, number, error=error)
    assert scales[0] == 0.0
    assert not found.any()
    assert torch.equal(error[:128], values)
    assert not decoded(values, number).any()


@NUMBERS
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_block_that_is_not_finite_is_nan_and_leaves_no_error(number: str, odd: float) -> None:
    values, error = torch.ones(300), torch.full((512,), 0.25)
    values[130] = odd
    scales, _ = encoded(values, number, error=error)
    assert scales.isnan().tolist() == [False, True, False, False]
    assert not error[128:256].any()
    assert decoded(values, number).isnan().tolist() == [False] * 128 + [True] * 128 + [False] * 44


@NUMBERS
def test_large_numbers_travel_and_larger_ones_count_as_infinite(number: str) -> None:
    assert torch.allclose(decoded(torch.tensor([2.0**127, -(2.0**127)]), number), torch.tensor([2.0**127, -(2.0**127)]))
    assert decoded(torch.tensor([1.01 * 2.0**127, 1.0]), number).isnan().all()


@NUMBERS
def test_stochastic_rounding_is_right_on_the_average(number: str) -> None:
    values = torch.randn(127, generator=torch.Generator().manual_seed(2))
    block = torch.cat([values, torch.tensor([5.0])])
    rounds = torch.stack([decoded(block, number, key=KEY + 977 * draw) for draw in range(2000)]).double()
    # A rounding is off by a distance at most, so its deviation is half of one at most; a mean of 2000: a 45th of that.
    deviation = HALF[number] * 5.0 / math.sqrt(2000)
    assert ((rounds.mean(0) - block.double()).abs() <= 5 * deviation + 2.0**-16 * 5.0).all()
    nearest = decoded(block, number).double()
    assert (nearest - block.double()).abs().max() > 5 * deviation  # which is what it is for


@NUMBERS
def test_one_key_draws_the_same_numbers_and_another_one_others(number: str) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(3))
    first, again, other = (decoded(values, number, key=key) for key in (KEY, KEY, KEY + 1))
    assert torch.equal(first, again)
    assert (first != other).float().mean() > 0.2


# ------------------------------------------------------------------------------------------------ two implementations

COUNTS = [5, 1000, 256, 769, 0, 77, 300]


def gradients_of(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    gradients = [
        (torch.randn(count, generator=generator) * 10.0 ** (place - 2)).to(dtype) for place, count in enumerate(COUNTS)
    ]
    gradients[1][3] = 0
    gradients[3][256:512] = 0
    gradients[5][4] = math.nan
    # Its smaller numbers, in 8 bits, are below the least normal one of fp32 and bf16.
    gradients[6].copy_(1e-29 * torch.logspace(0, -10, COUNTS[6]))
    return gradients


def everything(kernels: _C.Block8Kernels, dtype: torch.dtype, block: int, key: int | None) -> dict[str, Tensor]:
    """What each function writes."""
    gradients = gradients_of(dtype)
    blocked, groups = laid_out(gradients, block)
    error = torch.zeros(groups * 4 * block)
    for gradient, first in blocked:
        error[first * block : first * block + gradient.numel()] = torch.linspace(-1, 1, gradient.numel())
    wires = [empty_wire(groups, block) for _ in range(3)]
    kept = torch.ones_like(error)
    kernels.encode(blocked, error, wires[0], 0.5, key, kept)
    kernels.encode([(3 * gradient, first) for gradient, first in blocked], None, wires[1], 0.25, key)
    of_sum, of_owner = empty_wire(groups, block), torch.ones_like(error)
    kernels.add([wires[0], wires[1], wires[0]], of_sum, of_owner, key, 4096)
    kernels.add([wires[1], wires[0]], wires[1], None, key, 0)  # in the place of a shard
    results = [torch.empty_like(gradient) for gradient in gradients]
    measured = kernels.decode([(result, first) for result, (_, first) in zip(results, blocked, strict=True)], of_sum)
    named = {f"gradient {place}": result for place, result in enumerate(results)}
    written = {"wire": wires[0], "in place": wires[1], "sum": of_sum, "error": error, "owner's error": of_owner}
    return written | named | {"kept": kept, "measured": measured}


@pytest.mark.parametrize(
    ("number", "block", "dtype", "key"),
    list(itertools.product(LARGEST, [128, 256], [torch.float32, torch.float16, torch.bfloat16], [None, KEY])),
)
def test_vectors_and_operators_write_the_same_bits(
    number: str, block: int, dtype: torch.dtype, key: int | None
) -> None:
    ours = everything(_C.Block8Kernels(number, block, CPU), dtype, block, key)
    operators = everything(_C.Block8Kernels.of_operators(number, block), dtype, block, key)
    measured, expected = ours.pop("measured"), operators.pop("measured")
    assert torch.allclose(measured, expected, rtol=1e-6, atol=0, equal_nan=True)
    for name, written in ours.items():
        assert torch.allclose(written, operators[name], rtol=0, atol=0, equal_nan=True), name


@NUMBERS
@BLOCKS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("most_bits", [0, 256])
def test_processors_with_shorter_vectors_write_the_same_bits(
    number: str, block: int, dtype: torch.dtype, most_bits: int
) -> None:
    widest = everything(_C.Block8Kernels(number, block, CPU), dtype, block, KEY)
    shorter = everything(_C.Block8Kernels.of_vectors(number, block, most_bits), dtype, block, KEY)
    measured, expected = shorter.pop("measured"), widest.pop("measured")
    assert torch.allclose(measured, expected, rtol=1e-6, atol=0, equal_nan=True)
    for name, written in shorter.items():
        assert torch.allclose(written, widest[name], rtol=0, atol=0, equal_nan=True), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("offset", [0, 1])
@NUMBERS
def test_long_gradients_are_decoded_past_the_caches(number: str, dtype: torch.dtype, offset: int) -> None:
    length = (1 << 20) + 77
    gradient = torch.randn(length, generator=torch.Generator().manual_seed(9)).to(dtype)
    wire = empty_wire(-(-length // 512), 128)
    _C.Block8Kernels(number, 128, CPU).encode([(gradient, 0)], None, wire)
    results = []
    for kernels in (_C.Block8Kernels(number, 128, CPU), _C.Block8Kernels.of_operators(number, 128)):
        room = torch.full([length + offset + 1], 7.0, dtype=dtype)
        kernels.decode([(room[offset:-1], 0)], wire)
        results.append(room)
    assert torch.equal(*results)


@NUMBERS
@BLOCKS
def test_an_error_is_kept_as_it_was(number: str, block: int) -> None:
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(5))
    blocked, groups = laid_out([gradient], block)
    error, wire = torch.zeros(groups * 4 * block), empty_wire(groups, block)
    error[:1000] = torch.linspace(-0.01, 0.01, 1000)
    before, kept = error.clone(), torch.full_like(error, 7)
    _C.Block8Kernels(number, block, CPU).encode(blocked, error, wire, 0.5, kept=kept)
    assert (error - before).abs().max() > 1e-4
    own = -(-1000 // block) * block
    assert torch.equal(kept[:own], before[:own])
    assert bool((kept[own:] == 7).all()), "blocks of no gradient"


def test_other_formats_and_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="int8, e4m3 and e5m2, and no int4"):
        _C.Block8Kernels("int4", 128, CPU)
    with pytest.raises(ValueError, match="128 or 256 elements, not 64"):
        _C.Block8Kernels("int8", 64, CPU)
    with pytest.raises(TypeError, match="not of Double"):
        _C.Block8Kernels("int8", 128, CPU).encode([(torch.zeros(3).double(), 0)], None, empty_wire(1, 128))
