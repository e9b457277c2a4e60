"""pack and unpack: the Triton kernels, run by Triton's interpreter, against their reference in plain torch."""

import doctest
import math
import mmap
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from fastddp.kernels import ahead_of_time, pack_kernels
from fastddp.kernels import pack_reference as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastddp import _C
from interpreting import BITS, interpreter  # noqa: F401  a fixture of this module
from pack_interpreted import Interpreted, kernels, tables

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PAIRS = [(gradient, wire) for gradient in DTYPES for wire in DTYPES] + [(torch.float64, torch.float64)]
GUARD = 16


# --- Buckets to pack ---


@dataclass(frozen=True)
class Spec:
    """One gradient. ``parameter`` and ``order`` list the dims from the outermost to the innermost in memory."""

    shape: tuple[int, ...]
    parameter: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    gap: int = 0
    shift: int = 0
    expanded: bool = False
    defined: bool = True


def strides_in_order(shape: tuple[int, ...], order: tuple[int, ...], gap: int = 0) -> tuple[int, ...]:
    strides = [0] * len(shape)
    extent = 1
    for dim in reversed(order or tuple(range(len(shape)))):
        strides[dim] = extent * (1 + gap)
        extent = strides[dim] * max(shape[dim], 1)
    return tuple(strides)


def random_values(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Normal numbers with zeros, infinities, subnormals and values that overflow fp16 among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, 1e-40, -3e-7, 7e4, 1e38], dtype=torch.float64)
    chosen = torch.rand(numel, generator=generator) < 0.1
    values[chosen] = special[torch.randint(len(special), (int(chosen.sum()),), generator=generator)]
    return values.to(dtype)


class Bucket:
    """Gradients with guarded memory around them, and a guarded wire in which each has the strides of its parameter.

    Two buckets made with the same arguments hold the same bits, so kernel and reference get one each; comparing whole
    buffers afterwards shows every stray write.
    """

    def __init__(
        self, specs: list[Spec], gradient: torch.dtype, wire: torch.dtype, chunk: int = 64, wire_shift: int = 0
    ) -> None:
        self.specs = specs
        self.kernels = Interpreted(chunk)
        self.buffers: list[Tensor] = []
        self.gradients: list[Tensor | None] = []
        for index, spec in enumerate(specs):
            strides = strides_in_order(spec.shape, spec.order or spec.parameter, spec.gap)
            if spec.expanded:
                strides = (0, *strides[1:])
            extent = 1 + sum((size - 1) * stride for size, stride in zip(spec.shape, strides, strict=True) if size > 0)
            buffer = random_values(extent + 2 * GUARD + spec.shift, gradient, seed=index)
            self.buffers.append(buffer)
            self.gradients.append(buffer.as_strided(spec.shape, strides, GUARD + spec.shift) if spec.defined else None)
        numel = sum(math.prod(spec.shape) for spec in specs)
        self.wire_buffer = random_values(numel + 2 * GUARD + wire_shift, wire, seed=-1)
        self.wire = self.wire_buffer[GUARD + wire_shift :][:numel]
        self.views = [
            part.as_strided(spec.shape, strides_in_order(spec.shape, spec.parameter))
            for part, spec in zip(self.wire.split([math.prod(spec.shape) for spec in specs]), specs, strict=True)
        ]


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(BITS[tensor.element_size()])


def check(make: Callable[[], Bucket], scale: float) -> None:
    """Pack and unpack one bucket by the kernels, its twin by the reference; every byte of both must agree."""
    kernel, expected = make(), make()
    kernel.kernels.pack(kernel.gradients, kernel.views, scale)
    reference.pack(expected.gradients, expected.views, scale)
    assert torch.equal(bits(kernel.wire_buffer), bits(expected.wire_buffer)), "pack"

    measuring = make()
    partials, of_gradients = measuring.kernels.pack_measuring(measuring.gradients, measuring.views, scale)
    assert torch.equal(bits(measuring.wire_buffer), bits(expected.wire_buffer)), "pack_measuring"
    check_by_gradient(partials, of_gradients, with_elements(make()))
    unpacked = make()
    there = [index for index, gradient in enumerate(unpacked.gradients) if gradient is not None]
    gradients = [unpacked.gradients[index] for index in there]
    partials, of_gradients = unpacked.kernels.measure_gradients(gradients, [unpacked.views[index] for index in there])
    check_by_gradient(partials, of_gradients, [one for one in with_elements(make()) if one is not None])

    kernel, expected = make(), make()
    if any(spec.expanded for spec in kernel.specs):
        return
    partials = kernel.kernels.unpack(kernel.gradients, kernel.views, scale)
    reference.unpack(expected.gradients, expected.views, scale)
    written = [gradient.flatten() for gradient in expected.gradients if gradient is not None]
    check_measure(partials, torch.cat(written) if written else torch.empty(0))
    for index, (got, want) in enumerate(zip(kernel.buffers, expected.buffers, strict=True)):
        assert torch.equal(bits(got), bits(want)), f"unpack, gradient {index}"


def with_elements(bucket: Bucket) -> list[Tensor | None]:
    """The gradients that have a place in the wire."""
    return [one for one, view in zip(bucket.gradients, bucket.views, strict=True) if view.numel() > 0]


def check_by_gradient(partials: Tensor, of_gradients: list[int], gradients: list[Tensor | None]) -> None:
    """Each gradient that has elements, or none because it is undefined, has rows of its own."""
    assert set(of_gradients) == set(range(len(gradients)))
    for number, gradient in enumerate(gradients):
        rows = partials[torch.tensor(of_gradients) == number]
        check_measure(rows, torch.empty(0) if gradient is None else gradient.flatten())


def check_measure(partials: Tensor, values: Tensor) -> None:
    squares, odd = partials.sum(0).tolist()
    assert odd == int(values.isfinite().logical_not().sum())
    expected = float(values.double().square().sum())
    if expected < torch.finfo(torch.promote_types(values.dtype, torch.float32)).max:
        assert squares == pytest.approx(expected, rel=1e-5)
    else:
        assert not math.isfinite(squares)


MIXED = [
    Spec((8, 8)),
    Spec(()),
    Spec((0, 3)),
    Spec((7,)),
    Spec((40,), defined=False),
    Spec((150,)),
    Spec((5, 9), order=(1, 0)),
    Spec((2, 3, 4, 5), parameter=(0, 2, 3, 1)),
    Spec((2, 3, 4, 5), order=(0, 2, 3, 1)),
    Spec((6, 11), gap=1),
    Spec((33,), shift=1),
    Spec((1, 1, 3)),
]


# --- Values ---


def test_worked_example() -> None:
    wire = torch.full((5,), 9.0)
    views = wire.split([2, 1, 2])
    Interpreted().pack([torch.tensor([2.0, 4.0]), None, torch.tensor([6.0, 8.0])], views, scale=0.5)
    assert wire.tolist() == [1, 2, 0, 3, 4]

    first, last = torch.zeros(2), torch.zeros(2)
    partials = Interpreted().unpack([first, None, last], views)
    assert (first.tolist(), last.tolist()) == ([1, 2], [3, 4])
    assert partials.tolist() == [[5, 0], [0, 0], [25, 0]]


def test_worked_examples_of_kernels_that_measure_gradients() -> None:
    wire = torch.full((5,), 9.0)
    views = wire.split([2, 1, 2])
    first, last = torch.tensor([2.0, 4.0]), torch.tensor([6.0, math.inf])
    partials, of_gradients = Interpreted().pack_measuring([first, None, last], views, scale=0.5)
    assert wire.tolist() == [1, 2, 0, 3, math.inf]
    assert partials.tolist() == [[20, 0], [0, 0], [math.inf, 1]]
    assert of_gradients == [0, 1, 2]
    partials, _ = Interpreted().measure_gradients([first, last], [views[0], views[2]])
    assert partials.tolist() == [[20, 0], [math.inf, 1]]


def test_what_the_cast_makes_infinite_was_finite() -> None:
    wire = torch.zeros(2, dtype=torch.float16)
    partials, _ = Interpreted().pack_measuring([torch.tensor([1e6, 1.0])], [wire])
    assert wire.tolist() == [math.inf, 1]
    assert partials[:, 1].tolist() == [0]


def test_gradients_in_the_wire_are_measured_before_they_are_scaled() -> None:
    wire = torch.tensor([2.0, 4.0])
    partials, _ = Interpreted().pack_measuring([wire], [wire], scale=0.5)
    assert wire.tolist() == [1, 2]
    assert partials.tolist() == [[20, 0]]


def test_documented_examples() -> None:
    failed, attempted = doctest.testmod(reference)
    assert attempted > 0
    assert failed == 0


@pytest.mark.parametrize(("gradient", "wire"), PAIRS, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
def test_dtypes(gradient: torch.dtype, wire: torch.dtype, scale: float) -> None:
    check(lambda: Bucket(MIXED, gradient, wire), scale)


@pytest.mark.parametrize("numel", [0, 1, 3, 4, 7, 8, 4095, 4096, 4097, 9001])
@pytest.mark.parametrize(("gradient", "wire"), [PAIRS[0], PAIRS[2]], ids=["fp32", "bf16"])
def test_sizes_around_the_default_chunk(numel: int, gradient: torch.dtype, wire: torch.dtype) -> None:
    chunk = kernels.CHUNK_ELEMENTS
    assert chunk == 4096
    check(lambda: Bucket([Spec((numel,)), Spec((2, 3), order=(1, 0))], gradient, wire, chunk), 0.5)


@pytest.mark.parametrize("wire_shift", range(4))
@pytest.mark.parametrize("gradient_shift", range(4))
def test_every_misalignment(wire_shift: int, gradient_shift: int) -> None:
    specs = [Spec((70,), shift=gradient_shift), Spec((3, 30), shift=gradient_shift)]
    check(lambda: Bucket(specs, torch.float32, torch.bfloat16, wire_shift=wire_shift), 0.25)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_scale_one_copies_every_bit_pattern(dtype: torch.dtype) -> None:
    size = dtype.itemsize
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(2**15), 2**15, (3000 * size // 2,), generator=generator, dtype=torch.int16)
    gradient = patterns.view(dtype)
    gradient[:2] = torch.tensor([math.nan, -math.nan], dtype=dtype)
    assert gradient.isnan().sum() > 2 or size > 4
    wire = torch.zeros_like(gradient)
    Interpreted().pack([gradient], [wire])
    assert torch.equal(bits(wire), bits(gradient))
    back = torch.zeros_like(gradient)
    Interpreted().unpack([back], [wire])
    assert torch.equal(bits(back), bits(gradient))


def test_scale_is_applied_in_fp32_before_the_cast() -> None:
    # As fp16 the gradient would overflow; scaled first it fits.
    wire = torch.empty(1, dtype=torch.float16)
    Interpreted().pack([torch.tensor([2.0**20])], [wire], scale=1 / 64)
    assert wire.item() == 2**14
    # A bf16 has 8 bits: 1 + 2^-8 would become 1 before it is tripled; 3 + 3 * 2^-8 becomes 3 + 2^-6.
    wire = torch.empty(1, dtype=torch.bfloat16)
    Interpreted().pack([torch.tensor([1 + 2**-8])], [wire], scale=3.0)
    assert wire.item() == 3 + 2**-6


def test_pack_scales_in_place_where_the_gradients_are_views_of_the_wire() -> None:
    wire = torch.arange(9000.0)
    views = wire.split([4001, 0, 4999])
    Interpreted().pack(views, views, scale=0.5)
    assert torch.equal(wire, torch.arange(9000.0) / 2)


def test_bucket_of_undefined_gradients() -> None:
    wire = torch.full((5,), math.nan, dtype=torch.bfloat16)
    Interpreted().pack([None, None], wire.split([3, 2]), scale=0.5)
    assert wire.tolist() == [0.0] * 5
    assert Interpreted().unpack([None, None], wire.split([3, 2])).tolist() == [[0, 0], [0, 0]]


def test_empty_bucket() -> None:
    check(lambda: Bucket([], torch.float32, torch.float32), 1.0)
    check(lambda: Bucket([Spec((0,)), Spec((3, 0))], torch.float32, torch.float16), 1.0)


# --- Strides ---

STRIDED = {
    "transposed": Spec((13, 17), order=(1, 0)),
    "channels_last": Spec((3, 5, 4, 6), order=(0, 2, 3, 1)),
    "contiguous for a channels_last parameter": Spec((3, 5, 4, 6), parameter=(0, 2, 3, 1), order=(0, 1, 2, 3)),
    "every second column": Spec((9, 15), gap=1),
    "permuted with gaps": Spec((4, 3, 5, 2), order=(2, 0, 3, 1), gap=2),
    "expanded": Spec((6, 7), expanded=True),
    "nine dims, no two of which merge": Spec((2,) * 9, order=(8, 1, 6, 3, 4, 5, 2, 7, 0), gap=1),
}


@pytest.mark.parametrize("spec", STRIDED.values(), ids=list(STRIDED))
def test_strided(spec: Spec) -> None:
    check(lambda: Bucket([Spec((5,)), spec, Spec((5,))], torch.float32, torch.float32), 0.5)
    assert shape_word(Bucket([spec], torch.float32, torch.float32)) != 0


FLAT = {
    "contiguous": Spec((4, 5)),
    "channels_last as its parameter": Spec((2, 3, 4, 5), parameter=(0, 2, 3, 1)),
    "sizes of one, any stride": Spec((1, 5, 1), order=(2, 0, 1)),
    "a size of one, any stride, among others": Spec((2, 3, 1, 4), parameter=(0, 3, 2, 1), order=(2, 0, 3, 1)),
    "one element of a slice": Spec((1,), gap=6),
    "undefined": Spec((4, 5), defined=False),
}


@pytest.mark.parametrize("spec", FLAT.values(), ids=list(FLAT))
def test_flat_path_is_taken(spec: Spec) -> None:
    assert shape_word(Bucket([spec], torch.float32, torch.float32)) == 0


def shape_word(bucket: Bucket) -> int:
    given = tables(bucket.gradients, bucket.views, 64)
    assert given is not None
    return int(given.addresses[1])


def test_expanded_gradient_of_one_value() -> None:
    # What loss.sum().backward() hands out.
    wire = torch.zeros(20)
    Interpreted().pack([torch.tensor(3.0).expand(4, 5)], [wire.view(4, 5)])
    assert wire.tolist() == [3.0] * 20


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    dims = st.permutations(range(len(shape))).map(tuple)
    return Spec(
        shape,
        parameter=draw(dims),
        order=draw(dims),
        gap=draw(st.integers(0, 2)),
        shift=draw(st.integers(0, 3)),
        expanded=bool(shape) and draw(st.integers(0, 9)) == 0,
        defined=draw(st.integers(0, 5)) > 0,
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(specs(), max_size=6),
    st.sampled_from(PAIRS),
    st.sampled_from([1.0, 0.5, 1 / 3]),
    st.sampled_from([16, 128]),
    st.integers(0, 3),
)
def test_random_buckets(
    bucket: list[Spec], dtypes: tuple[torch.dtype, torch.dtype], scale: float, chunk: int, wire_shift: int
) -> None:
    check(lambda: Bucket(bucket, *dtypes, chunk=chunk, wire_shift=wire_shift), scale)


# --- Alignment ---


def test_alignment_hints_are_given_when_true_and_only_then() -> None:
    hints: list[bool] = []

    def record(handle: Any, name: str, values: list[int]) -> None:
        assert (name, values) == ("tt.divisibility", [16])
        hints.append(bool((handle.data % 16 == 0).all()))

    with mock.patch("triton.runtime.interpreter.TensorHandle.set_attr", record):
        for gradient_shift in range(5):
            for wire_shift in range(9):
                bucket = Bucket(
                    [Spec((64,), shift=gradient_shift)], torch.float32, torch.bfloat16, wire_shift=wire_shift
                )
                assert (bucket.buffers[0].data_ptr() | bucket.wire_buffer.data_ptr()) % 64 == 0
                hints.clear()
                bucket.kernels.pack(bucket.gradients, bucket.views)
                aligned = gradient_shift % 4 == 0 and wire_shift % 8 == 0
                assert hints == ([True, True] if aligned else [])


# --- What a wire holds ---


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("numel", [0, 1, 4095, 4096, 8200])
@pytest.mark.parametrize("shift", [0, 1])
def test_measure(dtype: torch.dtype, numel: int, shift: int) -> None:
    values = torch.randn(numel + shift).to(dtype)[shift:]
    check_measure(Interpreted().measure(values), values)
    if numel > 7:
        values[3], values[5], values[7] = math.nan, math.inf, -math.inf
        partials = Interpreted().measure(values)
        assert partials[:, 1].sum() == 3
        assert not partials[0, 0].isfinite()


# --- Offsets beyond 2^31 ---


def sparse_memory(elements: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Zeros of which only the pages that are touched take memory: all of them, and element 0 as a tensor of its own.

    There are 2^31 more in front, so that an offset that wrapped around misses its target instead of ending the process.
    """
    no_reserve = 0x4000
    in_front = 2**31 * dtype.itemsize
    size = in_front + elements * dtype.itemsize
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    everything = torch.frombuffer(mapping, dtype=dtype, offset=in_front)
    return everything, torch.frombuffer(mapping, dtype=dtype, offset=in_front, count=1)


FAR = 2**31 + 5


@pytest.mark.skipif(sys.platform != "linux", reason="needs memory that is reserved but not taken")
def test_flat_offsets_beyond_int32() -> None:
    # The last programs of a launch over a gradient of 2^31 + 5 elements and a second one behind it.
    gradient, _ = sparse_memory(FAR, torch.float16)
    second = torch.randn(1000).half()
    # The interpreter copies the whole storage of its tensor arguments, so it sees the wire's first element only.
    wire, wire_start = sparse_memory(FAR + 1000, torch.float16)
    given = tables([gradient, second], wire.split([FAR, 1000]), 4096)
    assert given is not None
    assert given.addresses.tolist() == [gradient.data_ptr(), 0, second.data_ptr(), 0]
    chunks = given.chunks[-3:]
    assert chunks.tolist() == [[0, 2**31 - 4096, 2**31 - 4096, 4096], [0, 2**31, 2**31, 5], [1, 0, FAR, 1000]]
    gradient[-4101:] = torch.randn(4101).half()

    kernels.pack_kernel[(3,)](wire_start, given.addresses, chunks, 1.0, **given.constants)
    expected = torch.cat([gradient[-4101:], second])
    assert torch.equal(wire[-5101:], expected)
    assert not wire[:6000].any()

    gradient[-4101:] = 0
    second.zero_()
    partials = torch.empty(3, 2, dtype=torch.float64)
    kernels.unpack_kernel[(3,)](wire_start, given.addresses, chunks, 1.0, partials, **given.constants)
    assert torch.equal(torch.cat([gradient[-4101:], second]), expected)
    assert not gradient[:6000].any()


@pytest.mark.skipif(sys.platform != "linux", reason="needs memory that is reserved but not taken")
def test_strided_offsets_beyond_int32() -> None:
    memory, _ = sparse_memory(2**32 + 2**10, torch.float16)
    gradient = memory.as_strided((3, 700), (2**31 + 3, 1))
    values = torch.randn(3, 700).half()
    gradient.copy_(values)
    wire = torch.zeros(3, 700, dtype=torch.float16)
    Interpreted().pack([gradient], [wire])
    assert torch.equal(wire, values)

    gradient.zero_()
    Interpreted().unpack([gradient], [wire])
    assert torch.equal(gradient, values)


# --- The tables ---


def words(
    gradients: list[Tensor | None], views: list[Tensor], chunk: int = 4, writable: bool = False
) -> dict[str, list[int]]:
    return _C.pack_tables(gradients, views, chunk, writable)[0]


def test_documented_chunks() -> None:
    wire = torch.zeros(8)
    found = words([torch.zeros(3), torch.zeros(5)], list(wire.split([3, 5])))
    assert found["chunks"] == [*(0, 0, 0, 3), *(1, 0, 3, 4), *(1, 4, 7, 1)]
    assert found["wire"] == [wire.data_ptr()]


def test_documented_rows() -> None:
    first, second = torch.zeros(2, 3), torch.zeros(3, 2).t()
    found = words([first, second], list(torch.zeros(2, 2, 3)))
    assert found["addresses"] == [first.data_ptr(), 0, second.data_ptr(), 4, 2, 3, 2, 2, 1]


def test_neighbouring_dims_are_merged_where_one_stride_carries_on_the_other() -> None:
    gradient = torch.zeros(2, 6, 4)[:, :3]
    address = gradient.data_ptr()
    assert words([gradient], [torch.zeros(2, 3, 4)])["addresses"] == [address, 2, 2, 12, 1, 2, 24]
    assert words([gradient[0]], [torch.zeros(3, 4)])["addresses"] == [address, 0]


def test_places_in_a_wire_may_have_gaps_between_them_and_come_in_any_order() -> None:
    wire = torch.zeros(40, dtype=torch.float16)
    found = words([None, torch.zeros(0), torch.zeros(6)], [wire[20:25], wire[:0], wire[10:16]])
    assert found["chunks"] == [*(0, 0, 10, 4), *(0, 4, 14, 1), *(1, 0, 0, 4), *(1, 4, 4, 2)]
    assert found["wire"] == [wire[10:].data_ptr()]
    assert found["addresses"][:2] == [0, 0]


def test_complex_gradients_are_pairs() -> None:
    gradient = torch.zeros(5, dtype=torch.complex64)
    found, *dtypes = _C.pack_tables([gradient], [torch.zeros(5, dtype=torch.complex64)], 4, True)
    assert found["chunks"] == [*(0, 0, 0, 4), *(0, 4, 4, 4), *(0, 8, 8, 2)]
    assert dtypes == [torch.float32, torch.float32]


def test_undefined_gradients_have_the_dtype_of_the_wire() -> None:
    wire = torch.zeros(2, dtype=torch.bfloat16)
    assert _C.pack_tables([None, torch.zeros(1)], list(wire.split(1)), 4, True)[1:] == (torch.float32, torch.bfloat16)
    assert _C.pack_tables([None, None], list(wire.split(1)), 4, True)[1:] == (torch.bfloat16, torch.bfloat16)


# --- What the kernels do not move ---

LEFT: dict[str, tuple[Callable[[Tensor, Tensor], tuple[Tensor | None, Tensor]], bool]] = {
    "a view with gaps": (lambda g, v: (g, torch.zeros(8)[::2]), True),
    "an undefined gradient's view with gaps": (lambda g, v: (None, torch.zeros(8)[::2]), True),
    "a wire of another dtype": (lambda g, v: (g, v.half()), True),
    "a gradient of another dtype": (lambda g, v: (g.half(), v), True),
    "another device": (lambda g, v: (g.to("meta"), v), True),
    "sparse": (lambda g, v: (g.to_sparse(), v), True),
    "lazily negated": (lambda g, v: (torch._neg_view(g), v), True),
    "lazily conjugated": (lambda g, v: (g.to(torch.complex64).conj(), v.to(torch.complex64)), True),
    "complex, transposed": (
        lambda g, v: (g.to(torch.complex64).view(2, 2).t(), v.to(torch.complex64).view(2, 2)),
        True,
    ),
    "complex, for a real wire": (lambda g, v: (g.to(torch.complex64), v), True),
    "expanded, to be written": (lambda g, v: (g[:1].expand(4), v), False),
    "interleaved, to be written": (lambda g, v: (torch.zeros(9).as_strided((2, 2), (2, 2)), v.view(2, 2)), False),
}


@pytest.mark.parametrize(("spoil", "in_both_directions"), LEFT.values(), ids=list(LEFT))
def test_what_the_kernels_cannot_move_is_left_to_operators(
    spoil: Callable[..., tuple[Tensor, Tensor]], in_both_directions: bool
) -> None:
    wire = torch.zeros(12)
    first, middle, last = wire.split(4)
    gradient, view = spoil(torch.zeros(4), middle)
    gradients, views = [torch.zeros(4), gradient, torch.zeros(4)], [first, view, last]
    found = words(gradients, views, writable=True)
    assert found["left"] == [1]
    assert words(gradients, views, writable=False)["left"] == ([1] if in_both_directions else [])
    # The tables are those of the others.
    assert found["chunks"] == [*(0, 0, 0, 4), *(1, 0, 8, 4)]
    assert found["addresses"] == [gradients[0].data_ptr(), 0, gradients[2].data_ptr(), 0]


def test_expanded_gradients_are_packed_but_not_unpacked() -> None:
    gradient, view = torch.zeros(3).expand(2, 3), torch.zeros(2, 3)
    assert words([gradient], [view], writable=False)["left"] == []
    assert words([gradient], [view], writable=True) == {"left": [0]}


# --- Bad input ---


def test_gradients_and_views_that_do_not_fit() -> None:
    first, second = torch.zeros(2, 3), torch.zeros(4)
    wire = torch.zeros(10)
    views = [wire[:6].view(2, 3), wire[6:]]
    on_cpu = _C.Kernels(torch.device("cpu"))
    takers: list[Callable[..., Any]] = [words, on_cpu.pack, on_cpu.unpack]
    for take in takers:
        with pytest.raises(ValueError, match="1 gradients for 2 views"):
            take([first], views)
        with pytest.raises(ValueError, match=r"gradient 1 has the shape \[5\], but its view of the wire \[4\]"):
            take([first, torch.zeros(5)], views)
        with pytest.raises(ValueError, match=r"gradient 1 has the shape \[4\], but its view of the wire \[3\]"):
            take([first, second], [views[0], wire[6:9]])
        take([first, second], views)


BAD = {
    "integers": (torch.int32, torch.float32, 64, "gradients have dtype torch.int32; supported are"),
    "complex": (torch.complex64, torch.float32, 64, "view_as_real"),
    "integer wire": (torch.float32, torch.int32, 64, "the wire has dtype torch.int32"),
    "fp64 gradients, fp32 wire": (torch.float64, torch.float32, 64, "fp64 travels only as fp64"),
    "fp32 gradients, fp64 wire": (torch.float32, torch.float64, 64, "fp64 travels only as fp64"),
    "a chunk that is no power of two": (torch.float32, torch.float32, 48, "chunk_elements is 48, but .* power of two"),
    "an empty chunk": (torch.float32, torch.float32, 0, "power of two"),
}


@pytest.mark.parametrize(("gradient", "wire", "chunk", "message"), BAD.values(), ids=list(BAD))
def test_what_is_not_compiled(gradient: torch.dtype, wire: torch.dtype, chunk: int, message: str) -> None:
    for form in ("pack", "unpack"):
        with pytest.raises(ValueError, match=message):
            ahead_of_time.compile_pack(form, gradient, wire, 90, chunk)
    if chunk == 64:
        assert not pack_kernels.moves(gradient, wire)


def test_what_others_import_is_compiled() -> None:
    assert isinstance(pack_kernels.pack_kernel, triton.JITFunction)
    assert not isinstance(kernels.pack_kernel, triton.JITFunction)
