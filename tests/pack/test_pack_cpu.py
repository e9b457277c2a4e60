"""Pack and unpack on the CPU: the C++ twin against the definition."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastddp import _C

KERNELS = _C.Kernels(torch.device("cpu"))

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
PAIRS = pytest.mark.parametrize(("source", "destination"), list(itertools.product(FLOATS, FLOATS)))
SIZES = [0, 1, 7, 8, 33, 1000, 100_003]  # less than a vector, more than a thread's share


def values(size: int, dtype: torch.dtype) -> Tensor:
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-7, 65504.0, 1e30])
    return torch.cat([torch.randn(size, dtype=torch.float64) * 100, special])[:size].to(dtype)


def scaled(gradient: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """The definition: fp64 is scaled in fp64 if it stays fp64, everything else in fp32."""
    compute = torch.float64 if gradient.dtype == dtype == torch.float64 else torch.float32
    return (gradient.to(compute) * torch.tensor(scale, dtype=compute)).to(dtype)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@PAIRS
@pytest.mark.parametrize("scale", [1.0, 0.5, 1 / 3])
def test_pack_scales_in_fp32_and_rounds_once(source: torch.dtype, destination: torch.dtype, scale: float) -> None:
    torch.manual_seed(0)
    gradients = [values(size, source) for size in SIZES]
    views = [torch.full((size,), 7, dtype=destination) for size in SIZES]
    KERNELS.pack(gradients, views, scale)
    for gradient, view in zip(gradients, views, strict=True):
        assert_same(view, scaled(gradient, scale, destination))


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("destination", [torch.float16, torch.bfloat16, torch.float32])
def test_a_strided_gradient_of_16_bits_is_rounded_once_too(source: torch.dtype, destination: torch.dtype) -> None:
    gradient = values(30_000, source).view(100, 300)
    view = torch.full((300, 100), 7, dtype=destination)
    KERNELS.pack([gradient.t()], [view], 1 / 3)
    assert_same(view, scaled(gradient.t(), 1 / 3, destination))


@PAIRS
def test_unpack_is_a_cast(source: torch.dtype, destination: torch.dtype) -> None:
    torch.manual_seed(0)
    views = [values(size, source) for size in SIZES]
    gradients = [torch.full((size,), 7, dtype=destination) for size in SIZES]
    KERNELS.unpack(gradients, views)
    for gradient, view in zip(gradients, views, strict=True):
        assert_same(gradient, scaled(view, 1.0, destination))


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_copy_keeps_every_bit(dtype: torch.dtype) -> None:
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    bits = torch.randint(torch.iinfo(integer).min, torch.iinfo(integer).max, (4099,), dtype=integer)
    wire = torch.zeros(4099, dtype=dtype)
    KERNELS.pack([bits.view(dtype)], [wire])
    assert torch.equal(wire.view(integer), bits)


def assert_measured(found: list[tuple[float, int]], gradients: list[Tensor]) -> None:
    for (squares, count), gradient in zip(found, gradients, strict=True):
        assert count == int(gradient.isfinite().logical_not().sum())
        expected = gradient.double().square().sum().item()
        assert squares == pytest.approx(expected, rel=1e-5, nan_ok=True)


@PAIRS
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
@pytest.mark.parametrize("finite", [True, False])
def test_pack_that_measures_writes_the_same_bits(
    source: torch.dtype, destination: torch.dtype, scale: float, finite: bool
) -> None:
    torch.manual_seed(0)
    sizes = [*SIZES, 600_000]  # whose stores go past the caches
    gradients = [torch.randn(size).to(source) if finite else values(size, source) for size in sizes]
    plain = [torch.full((size + 1,), 7, dtype=destination)[1:] for size in sizes]
    measured = [torch.full((size + 1,), 7, dtype=destination)[1:] for size in sizes]
    KERNELS.pack(gradients, plain, scale)
    found = KERNELS.pack_measuring(gradients, measured, scale)
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[destination.itemsize]
    for ours, theirs in zip(measured, plain, strict=True):
        assert torch.equal(ours.view(integer), theirs.view(integer))
    assert_measured(found, gradients)
    assert_measured(KERNELS.measure_gradients(gradients), gradients)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_finite_values_whose_squares_overflow_are_finite(scale: float) -> None:
    gradients = [torch.full((20_000,), 3e38), torch.tensor([1e30, 2.0]), torch.full((9,), 3e38).bfloat16()]
    views = [torch.zeros(gradient.shape) for gradient in gradients]
    assert_measured(KERNELS.pack_measuring(gradients, views, scale), gradients)
    assert_measured(KERNELS.measure_gradients(gradients), gradients)


def test_what_the_cast_makes_infinite_was_finite() -> None:
    view = torch.zeros(40, dtype=torch.float16)
    assert_measured(KERNELS.pack_measuring([torch.full((40,), 1e6)], [view]), [torch.full((40,), 1e6)])
    assert view.isinf().all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_gradients_in_the_wire_are_measured_before_they_are_scaled(dtype: torch.dtype) -> None:
    wire = torch.full((10_000,), 2.0, dtype=dtype)
    wire[77] = torch.nan
    expected = wire.clone()
    assert_measured(KERNELS.pack_measuring([wire], [wire], 0.5), [expected])
    assert_same(wire, expected * 0.5)


def test_strided_complex_and_missing_gradients_are_measured() -> None:
    numbers = torch.randn(30, 40)
    numbers[3, 4] = torch.inf
    gradients: list[Tensor | None] = [
        numbers.t(),
        torch.complex(numbers, numbers),
        torch.complex(numbers, numbers).t().conj(),
        None,
        torch.zeros(0),
    ]
    places = [torch.zeros(30, 40, dtype=torch.complex64), torch.zeros(40, 30, dtype=torch.complex64)]
    views = [torch.zeros(40, 30), *places, torch.ones(5), torch.zeros(0)]
    found = KERNELS.pack_measuring(gradients, views)
    assert [count for _, count in found] == [1, 2, 2, 0, 0]
    assert found[3:] == [(0.0, 0), (0.0, 0)]


def test_the_worked_example() -> None:
    # Two gradients of 2 and 1 elements, one without a gradient, averaged over 2 ranks into a wire of 4 elements.
    wire = torch.full((4,), 9.0)
    KERNELS.pack([torch.tensor([2.0, 4.0]), None, torch.tensor([6.0])], [wire[0:2], wire[2:3], wire[3:4]], 0.5)
    assert wire.tolist() == [1.0, 2.0, 0.0, 3.0]


def strided(kind: str) -> Tensor:
    base = torch.randn(4, 6, 8, 10)
    return {
        "contiguous": base,
        "channels last": base.to(memory_format=torch.channels_last),
        "transposed": base.transpose(1, 3),
        "sliced": torch.randn(8, 6, 8, 20)[::2, :, :, 1:11],
        "expanded": torch.randn(4, 1, 8, 1).expand(4, 6, 8, 10),
        "scalar": torch.tensor(2.0),
    }[kind]


STRIDED = ["contiguous", "channels last", "transposed", "sliced", "expanded", "scalar"]


@pytest.mark.parametrize(("gradient", "view"), list(itertools.product(STRIDED[:-1], ["contiguous", "channels last"])))
def test_any_strides_pack_in_logical_order(gradient: str, view: str) -> None:
    source = strided(gradient)
    destination = (
        torch.empty_like(strided(view)).reshape(source.shape)
        if view == "contiguous"
        else (torch.empty(source.shape).to(memory_format=torch.channels_last))
    )
    KERNELS.pack([source], [destination], 0.5)
    assert_same(destination, source * 0.5)


@pytest.mark.parametrize("kind", [kind for kind in STRIDED if kind != "expanded"])
def test_any_strides_unpack_in_logical_order(kind: str) -> None:
    gradient = torch.empty_like(strided(kind), memory_format=torch.preserve_format)
    view = torch.randn(gradient.shape)
    KERNELS.unpack([gradient], [view])
    assert_same(gradient, view)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("transposed", [False, True])
def test_complex_gradients_are_scaled_as_pairs(dtype: torch.dtype, transposed: bool) -> None:
    gradient = torch.randn(40, 30, dtype=dtype)
    gradient = gradient.t() if transposed else gradient
    view = torch.empty(gradient.shape, dtype=dtype)
    KERNELS.pack([gradient], [view], 1 / 3)
    torch.testing.assert_close(view, gradient / 3)


def test_a_gradient_that_lives_in_the_wire_is_scaled_in_place() -> None:
    wire = torch.arange(1000.0)
    KERNELS.pack([wire[3:900]], [wire[3:900]], 0.5)
    expected = torch.arange(1000.0)
    expected[3:900] *= 0.5
    assert_same(wire, expected)


@given(
    sizes=st.lists(st.integers(0, 70_000), max_size=12),
    absent=st.sets(st.integers(0, 11)),
    threads=st.sampled_from([1, 2, 3]),
)
def test_how_elements_are_split_over_threads_does_not_show(sizes: list[int], absent: set[int], threads: int) -> None:
    wire = torch.full((sum(sizes),), 7.0)
    gradients = [None if i in absent else torch.randn(size) for i, size in enumerate(sizes)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        KERNELS.pack(gradients, list(wire.split(sizes)), 0.25)
    finally:
        torch.set_num_threads(before)
    expected = [torch.zeros(n) if g is None else g * 0.25 for n, g in zip(sizes, gradients, strict=True)]
    assert_same(wire, torch.cat([torch.empty(0), *expected]))


def test_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="1 gradients for 2 views"):
        KERNELS.pack([torch.ones(1)], [torch.ones(1), torch.ones(1)])


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_lazily_conjugated_and_negated_gradients(size: int) -> None:
    gradient = torch.randn(size, dtype=torch.complex64)
    conjugated = gradient.conj()
    negated = gradient.conj().imag
    assert conjugated.is_conj()
    assert negated.is_neg()
    wire, real_wire = torch.zeros(size, dtype=torch.complex64), torch.zeros(size)
    KERNELS.pack([conjugated], [wire], 0.5)
    KERNELS.pack([negated], [real_wire], 0.5)
    assert_same(wire, torch.complex(gradient.real * 0.5, gradient.imag * -0.5))
    assert_same(real_wire, gradient.imag * -0.5)
    KERNELS.unpack([conjugated], [wire])
    assert_same(gradient, torch.complex(wire.real, -wire.imag))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 15, 16, 8192, 100_003])
def test_measure_adds_up_squares_and_counts_what_is_not_finite(dtype: torch.dtype, count: int) -> None:
    wire = torch.randn(count).to(dtype)
    squares, bad = KERNELS.measure(wire).tolist()
    assert squares == pytest.approx(wire.double().square().sum().item(), rel=1e-6)
    assert bad == 0
    if count > 2:
        wire[[0, 1, -1]] = torch.tensor([torch.inf, torch.nan, -torch.inf]).to(dtype)
        assert KERNELS.measure(wire)[1] == 3


@pytest.mark.parametrize("wire_dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_unpack_measures_what_it_writes(wire_dtype: torch.dtype, threads: int) -> None:
    views = [torch.randn(size).to(wire_dtype) for size in (1, 300_000, 40, 0, 70_001)]
    gradients = [torch.full_like(view, torch.nan, dtype=torch.float32) for view in views]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        measured = KERNELS.unpack(gradients, views, measuring=True)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(gradient, view.float()) for gradient, view in zip(gradients, views, strict=True))
    assert measured is not None
    assert measured.tolist() == [pytest.approx(torch.cat(gradients).square().sum().item(), rel=1e-6), 0]
