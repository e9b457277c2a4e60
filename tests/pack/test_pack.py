"""Pack and unpack: the Triton kernels, run by Triton's interpreter, and their C++ twin, against plain torch."""

import doctest
import itertools
import math
import mmap
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fastddp.kernels import pack_reference as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastddp import _C
from interpreting import BITS, alignment_hints, interpreter  # noqa: F401  a fixture of this module
from pack_interpreted import Interpreted, Twin, kernels, tables

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FP64 = torch.float64
PAIRS = [(gradient, wire) for gradient in DTYPES for wire in DTYPES] + [(FP64, FP64)]
GUARD = 16

Mover = Interpreted | Twin
MOVERS: dict[str, Callable[[int], Mover]] = {"Triton": Interpreted, "C++": Twin}
"""By what moves: with so many elements for a program, where there are programs."""
by_each = pytest.mark.parametrize("mover", MOVERS)


def named(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


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

    def __init__(self, specs: list[Spec], gradient: torch.dtype, wire: torch.dtype, wire_shift: int = 0) -> None:
        self.specs = specs
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

    def defined(self) -> list[tuple[Tensor, Tensor]]:
        return [(one, view) for one, view in zip(self.gradients, self.views, strict=True) if one is not None]


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(BITS[tensor.element_size()])


def check(mover: Mover, make: Callable[[], Bucket], scale: float) -> None:
    """Pack and unpack buckets by what moves, their twins by the reference; every byte of both must agree."""
    packed, bucket, measured_bucket = make(), make(), make()
    reference.pack(packed.gradients, packed.views, scale)
    of_elements = [one for one, view in zip(make().gradients, packed.views, strict=True) if view.numel() > 0]
    mover.pack(bucket.gradients, bucket.views, scale)
    assert torch.equal(bits(bucket.wire_buffer), bits(packed.wire_buffer)), "pack"
    found = mover.pack_measuring(measured_bucket.gradients, measured_bucket.views, scale)
    assert torch.equal(bits(measured_bucket.wire_buffer), bits(packed.wire_buffer)), "pack_measuring"
    check_measured(mover, found, of_elements)
    found = mover.measure_gradients(*zip(*make().defined(), strict=True)) if bucket.defined() else []
    check_measured(mover, found, [one for one in of_elements if one is not None])

    if any(spec.expanded for spec in bucket.specs):
        return
    bucket, expected = make(), make()
    measured = mover.unpack(bucket.gradients, bucket.views)
    reference.unpack(expected.gradients, expected.views)
    moved = [one if mover.unpack_measures == "what it writes" else view for one, view in expected.defined()]
    if measured is not None:
        check_measured(mover, [measured], [torch.cat([torch.empty(0), *(one.flatten() for one in moved)])])
    for index, (got, want) in enumerate(zip(bucket.buffers, expected.buffers, strict=True)):
        assert torch.equal(bits(got), bits(want)), f"unpack, gradient {index}"


def check_measured(mover: Mover, found: list[tuple[float, float]], tensors: list[Tensor | None]) -> None:
    """The sum of squares of each that has elements, or none because it is undefined, and how many are not finite."""
    assert len(found) == len(tensors)
    for (squares, odd), tensor in zip(found, tensors, strict=True):
        values = torch.empty(0) if tensor is None else tensor.flatten()
        assert odd == int(values.isfinite().logical_not().sum())
        expected = float(values.double().square().sum())
        if expected < torch.finfo(torch.promote_types(values.dtype, mover.squares_in)).max:
            assert squares == pytest.approx(expected, rel=1e-5)
        else:
            assert not math.isfinite(squares)


MIXED = [
    *map(Spec, [(8, 8), (), (0, 3), (7,), (150,), (1, 1, 3)]),
    Spec((40,), defined=False),
    Spec((5, 9), order=(1, 0)),
    Spec((2, 3, 4, 5), parameter=(0, 2, 3, 1)),
    Spec((2, 3, 4, 5), order=(0, 2, 3, 1)),
    Spec((6, 11), gap=1),
    Spec((33,), shift=1),
    Spec((2,) * 9, order=(8, 1, 6, 3, 4, 5, 2, 7, 0), gap=1),  # no two dims of which merge
]


@by_each
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_in_the_wire_are_scaled_in_place_and_measured_before(mover: str, dtype: torch.dtype) -> None:
    wire = torch.arange(9000.0).remainder(64).to(dtype)
    before = wire.clone()
    views = wire[8:].split([4001, 0, 4991])
    found = MOVERS[mover](kernels.CHUNK_ELEMENTS).pack_measuring(views, views, 0.5)
    check_measured(MOVERS[mover](64), found, [before[8:4009], before[4009:]])
    assert torch.equal(wire, torch.cat([before[:8], before[8:] / 2]))


def test_documented_examples() -> None:
    failed, attempted = doctest.testmod(reference)
    assert attempted > 0
    assert failed == 0


@pytest.mark.tier("slow", but_one_in=3)
@by_each
@pytest.mark.parametrize(("gradient", "wire"), PAIRS, ids=named)
def test_dtypes(mover: str, gradient: torch.dtype, wire: torch.dtype) -> None:
    check(MOVERS[mover](64), lambda: Bucket(MIXED, gradient, wire), 1 / 3)


# By 4096 the kernels cut; from 32,768 on threads share the work, and stores of 600,000 go past the caches.
SIZES = {"Triton": [0, 1, 3, 4, 7, 8, 4095, 4096, 4097, 9001], "C++": [1, 7, 8, 15, 16, 33, 1000, 100_003, 600_000]}


@pytest.mark.tier("slow", but_one_in=4)
@pytest.mark.parametrize(
    ("mover", "numel", "gradient", "wire"),
    [
        (mover, numel, *pair)
        for mover in SIZES
        for numel in SIZES[mover]
        for pair in (PAIRS if numel == 600_000 else PAIRS[:5:2])
    ],
    ids=str,
)
def test_sizes(mover: str, numel: int, gradient: torch.dtype, wire: torch.dtype) -> None:
    assert kernels.CHUNK_ELEMENTS == 4096
    moves = MOVERS[mover](kernels.CHUNK_ELEMENTS)
    specs = [Spec((3,)), Spec((numel,), shift=1), Spec((2, 3), order=(1, 0))]  # neither end at a multiple of 32 bytes
    check(moves, lambda: Bucket(specs, gradient, wire), 0.5)


@by_each
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_scale_one_copies_every_bit_pattern(mover: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(2**15), 2**15, (1500 * dtype.itemsize,), generator=generator, dtype=torch.int16)
    gradient = patterns.view(dtype)
    gradient[:2] = torch.tensor([math.nan, -math.nan], dtype=dtype)
    moves = MOVERS[mover](kernels.CHUNK_ELEMENTS)
    wire, back = torch.zeros_like(gradient), torch.zeros_like(gradient)
    moves.pack([gradient], [wire])
    assert torch.equal(bits(wire), bits(gradient))
    moves.unpack([back], [wire])
    assert torch.equal(bits(back), bits(gradient))


FLAT = [
    Spec((4, 5)),
    Spec((2, 3, 4, 5), parameter=(0, 2, 3, 1)),  # channels_last as its parameter
    Spec((1, 5, 1), order=(2, 0, 1)),  # sizes of one have any stride
    Spec((2, 3, 1, 4), parameter=(0, 3, 2, 1), order=(2, 0, 3, 1)),
    Spec((1,), gap=6),  # one element of a slice
    Spec((4, 5), defined=False),
]


def test_flat_path_is_taken() -> None:
    bucket = Bucket(FLAT, torch.float32, torch.float32)
    given = tables(bucket.gradients, bucket.views, 64)
    assert given is not None
    assert given.addresses[1::2].tolist() == [0] * len(FLAT)  # no shapes


@st.composite
def random_specs(draw: st.DrawFn) -> Spec:
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


@pytest.mark.tier("slow")
@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.sampled_from(list(MOVERS)),
    st.lists(random_specs(), max_size=6),
    st.sampled_from(PAIRS),
    st.sampled_from([1.0, 0.5, 1 / 3]),
    st.sampled_from([16, 128]),
    st.integers(0, 3),
)
def test_random_buckets(mover: str, bucket: list[Spec], dtypes: Any, scale: float, chunk: int, wire_shift: int) -> None:
    gradient, wire = dtypes
    check(MOVERS[mover](chunk), lambda: Bucket(bucket, gradient, wire, wire_shift), scale)


def test_alignment_hints_are_given_when_true_and_only_then() -> None:
    for gradient_shift, wire_shift in itertools.product(range(5), range(9)):
        specs = [Spec((64,), shift=gradient_shift)]
        bucket = Bucket(specs, torch.float32, torch.bfloat16, wire_shift=wire_shift)
        assert (bucket.buffers[0].data_ptr() | bucket.wire_buffer.data_ptr()) % 64 == 0
        with alignment_hints() as hints:
            Interpreted(64).pack(bucket.gradients, bucket.views)
        aligned = gradient_shift % 4 == 0 and wire_shift % 8 == 0
        assert hints == ([True, True] if aligned else [])


@by_each
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_measure(mover: str, dtype: torch.dtype) -> None:
    moves = MOVERS[mover](kernels.CHUNK_ELEMENTS)
    for numel, shift in itertools.product((0, 1, 16, 4095, 8200, 100_003), (0, 1)):
        values = torch.randn(numel + shift, generator=torch.Generator().manual_seed(numel)).to(dtype)[shift:]
        check_measured(moves, [moves.measure(values)], [values])
    values[3], values[5], values[7] = math.nan, math.inf, -math.inf
    check_measured(moves, [moves.measure(values)], [values])


# --- What the C++ twin alone moves ---

TWIN = Twin(0)
TWIN_KERNELS = _C.Kernels(torch.device("cpu"))


@pytest.mark.parametrize(
    ("source", "destination"), [pair for dtype in DTYPES for pair in ((dtype, FP64), (FP64, dtype))], ids=named
)
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
def test_casts_from_and_to_64_bits_are_scaled_in_fp32(
    source: torch.dtype, destination: torch.dtype, scale: float
) -> None:
    gradients = [random_values(size, source, seed=size) for size in (0, 1, 7, 1000, 100_003)]
    views = [torch.full_like(gradient, 7, dtype=destination) for gradient in gradients]
    check_measured(TWIN, TWIN.pack_measuring(gradients, views, scale), gradients[1:])
    for gradient, view in zip(gradients, views, strict=True):
        assert torch.equal(view, (gradient.float() * torch.tensor(scale)).to(destination))
    back = [torch.full_like(gradient, 7) for gradient in gradients]
    TWIN.unpack(back, views)
    for gradient, view in zip(back, views, strict=True):
        assert torch.equal(gradient, view.float().to(source))


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_finite_values_whose_squares_overflow_are_finite(scale: float) -> None:
    gradients = [torch.full((20_000,), 3e38), torch.tensor([1e30, 2.0]), torch.full((9,), 3e38).bfloat16()]
    views = [torch.zeros(gradient.shape) for gradient in gradients]
    check_measured(TWIN, TWIN.pack_measuring(gradients, views, scale), gradients)
    check_measured(TWIN, TWIN.measure_gradients(gradients, views), gradients)


def test_strided_complex_and_missing_gradients_are_measured() -> None:
    numbers = torch.randn(30, 40)
    numbers[3, 4] = torch.inf
    pairs = torch.complex(numbers, numbers)
    gradients = [numbers.t(), pairs, pairs.t().conj(), None]
    views = [torch.zeros(40, 30), torch.zeros_like(pairs), torch.zeros_like(pairs).t(), torch.ones(5)]
    assert TWIN.pack_measuring(gradients, views) == [(math.inf, 1), (math.inf, 2), (math.inf, 2), (0, 0)]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_complex_gradients_are_scaled_as_pairs_also_transposed_and_conjugated_or_negated_lazily(
    size: int, dtype: torch.dtype
) -> None:
    original = torch.randn(size, 3, dtype=dtype)
    for gradient in (original, original.t(), original.conj(), original.conj().imag):
        view = torch.zeros(gradient.shape, dtype=gradient.dtype)
        TWIN.pack([gradient], [view], 1 / 3)
        torch.testing.assert_close(view, gradient.resolve_conj().resolve_neg() / 3)
        expected = torch.randn(gradient.shape, dtype=gradient.dtype)
        TWIN.unpack([gradient], [expected])
        assert torch.equal(gradient, expected)


@pytest.mark.tier("slow")
@given(
    sizes=st.lists(st.integers(0, 70_000), max_size=12),
    absent=st.sets(st.integers(0, 11)),
    threads=st.sampled_from([1, 2, 3]),
)
def test_how_elements_are_split_over_threads_does_not_show(sizes: list[int], absent: set[int], threads: int) -> None:
    specs = [Spec((size,), defined=index not in absent) for index, size in enumerate(sizes)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(TWIN, lambda: Bucket(specs, torch.float32, torch.bfloat16), 0.25)
    finally:
        torch.set_num_threads(before)


def test_kernels_use_the_threads_of_torch() -> None:
    """A thread that computes in parallel for the first time gets helpers of its own."""
    elements = 1 << 18
    gradient, wire, bytes_ = (
        torch.ones(elements),
        torch.empty(elements),
        torch.empty(elements * 33 // 32, dtype=torch.uint8),
    )
    square, thin = gradient.view(512, 512), torch.ones(512, 1)
    cpu = torch.device("cpu")
    calls: dict[str, Callable[[], object]] = {
        "pack": lambda: _C.Kernels(cpu).pack([gradient], [wire], 0.5),
        "low_rank": lambda: _C.LowRankKernels(cpu).compress([(square, None, thin, thin.view(1, 512))]),
        "block8": lambda: _C.Block8Kernels("int8", 128, cpu).encode([(gradient, 0)], None, bytes_),
    }
    helpers: dict[str, int] = {}

    def count(name: str) -> None:
        torch.set_num_threads(3)
        before = {*Path("/proc/self/task").iterdir()}
        calls[name]()
        helpers[name] = len({*Path("/proc/self/task").iterdir()} - before)

    for name in calls:
        thread = threading.Thread(target=count, args=[name])
        thread.start()
        thread.join()
    assert helpers == dict.fromkeys(calls, 2)
    maps = Path("/proc/self/maps").read_text()
    assert len({line.split()[-1] for line in maps.splitlines() if re.search(r"lib[gi]?omp\S*\.so", line)}) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=named)
def test_sums_are_the_same_however_many_threads_there_are(dtype: torch.dtype) -> None:
    """But for the last bit of fp64."""
    sizes, before, found = [70_001, 8191, 600_000], torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            gradients = [random_values(size, dtype, size) for size in sizes]
            wire = torch.zeros(sum(sizes))
            sums = TWIN.pack_measuring(gradients, wire.split(sizes), 0.3)
            found.append([*sums, TWIN.measure(wire), TWIN.unpack(gradients, wire.split(sizes))])
    finally:
        torch.set_num_threads(before)
    assert all(sums == [pytest.approx(one, rel=1e-14) for one in found[0]] for sums in found[1:])


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
NEEDS_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs memory that is reserved but not taken")


@NEEDS_LINUX
def test_flat_offsets_beyond_int32() -> None:
    # The last programs of a launch. The interpreter copies the whole storage of its tensor arguments, so it sees the
    # wire's first element only.
    gradient, _ = sparse_memory(FAR, torch.float16)
    wire, wire_start = sparse_memory(FAR, torch.float16)
    given = tables([gradient], [wire], 4096)
    assert given is not None
    chunks = given.chunks[-2:]
    assert chunks.tolist() == [[0, 2**31 - 4096, 2**31 - 4096, 4096], [0, 2**31, 2**31, 5]]
    values = torch.randn(4101).half()
    gradient[-4101:] = values
    kernels.pack_kernel[(2,)](wire_start, given.addresses, chunks, 1.0, **given.constants)
    assert torch.equal(wire[-4101:], values)
    assert not wire[:6000].any()

    gradient[-4101:] = 0
    partials = torch.empty(2, 2, dtype=torch.float64)
    kernels.unpack_kernel[(2,)](wire_start, given.addresses, chunks, 1.0, partials, **given.constants)
    assert torch.equal(gradient[-4101:], values)
    assert not gradient[:6000].any()


@NEEDS_LINUX
def test_strided_offsets_beyond_int32() -> None:
    memory, _ = sparse_memory(2**32 + 2**10, torch.float16)
    gradient = memory.as_strided((3, 700), (2**31 + 3, 1))
    values = torch.randn(3, 700).half()
    gradient.copy_(values)
    wire = torch.zeros(3, 700, dtype=torch.float16)
    Interpreted(4096).pack([gradient], [wire])
    assert torch.equal(wire, values)
    gradient.zero_()
    Interpreted(4096).unpack([gradient], [wire])
    assert torch.equal(gradient, values)


# --- The tables ---


def words(
    gradients: list[Tensor | None], views: list[Tensor], chunk: int = 4, writable: bool = False
) -> dict[str, list[int]]:
    return _C.pack_tables(gradients, views, chunk, writable)[0]


def test_neighbouring_dims_are_merged_where_one_stride_carries_on_the_other() -> None:
    gradient = torch.zeros(2, 6, 4)[:, :3]
    address = gradient.data_ptr()
    assert words([gradient], [torch.zeros(2, 3, 4)])["addresses"] == [address, 2, 2, 12, 1, 2, 24]
    assert words([gradient[0]], [torch.zeros(3, 4)])["addresses"] == [address, 0]


def test_places_in_a_wire_may_have_gaps_between_them_and_come_in_any_order_and_complex_gradients_are_pairs() -> None:
    wire = torch.zeros(40, dtype=torch.float16)
    found = words([None, torch.zeros(0), torch.zeros(6)], [wire[20:25], wire[:0], wire[10:16]])
    assert found["chunks"] == [*(0, 0, 10, 4), *(0, 4, 14, 1), *(1, 0, 0, 4), *(1, 4, 4, 2)]
    assert found["wire"] == [wire[10:].data_ptr()]
    assert found["addresses"][:2] == [0, 0]
    gradient, view = torch.zeros(2, 5, dtype=torch.complex64)
    found, *dtypes = _C.pack_tables([gradient], [view], 4, True)
    assert found["chunks"] == [*(0, 0, 0, 4), *(0, 4, 4, 4), *(0, 8, 8, 2)]
    assert dtypes == [torch.float32, torch.float32]


LEFT: dict[str, Callable[[Tensor, Tensor], tuple[Tensor | None, Tensor]]] = {
    "a view with gaps": lambda g, v: (g, torch.zeros(8)[::2]),
    "a wire of another dtype": lambda g, v: (g, v.half()),
    "another device": lambda g, v: (g.to("meta"), v),
    "sparse": lambda g, v: (g.to_sparse(), v),
    "lazily negated": lambda g, v: (torch._neg_view(g), v),
    "lazily conjugated": lambda g, v: (g.to(torch.complex64).conj(), v.to(torch.complex64)),
    "complex, transposed": lambda g, v: (g.to(torch.complex64).view(2, 2).t(), v.to(torch.complex64).view(2, 2)),
    "expanded, to be written": lambda g, v: (g[:1].expand(4), v),
    "interleaved, to be written": lambda g, v: (torch.zeros(9).as_strided((2, 2), (2, 2)), v.view(2, 2)),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_the_kernels_cannot_move_is_left_to_operators(name: str) -> None:
    wire = torch.zeros(12)
    first, middle, last = wire.split(4)
    gradient, view = LEFT[name](torch.zeros(4), middle)
    gradients, views = [torch.zeros(4), gradient, torch.zeros(4)], [first, view, last]
    found = words(gradients, views, writable=True)
    assert found["left"] == [1]
    assert words(gradients, views, writable=False)["left"] == ([] if "to be written" in name else [1])
    # The tables are those of the others.
    assert found["chunks"] == [*(0, 0, 0, 4), *(1, 0, 8, 4)]
    assert found["addresses"] == [gradients[0].data_ptr(), 0, gradients[2].data_ptr(), 0]


@pytest.mark.parametrize("take", [words, TWIN_KERNELS.pack, TWIN_KERNELS.unpack], ids=["tables", "pack", "unpack"])
def test_gradients_and_views_that_do_not_fit(take: Callable[..., Any]) -> None:
    first, second = torch.zeros(2, 3), torch.zeros(4)
    views = [torch.zeros(2, 3), torch.zeros(4)]
    with pytest.raises(ValueError, match="1 gradients for 2 views"):
        take([first], views)
    with pytest.raises(ValueError, match=r"gradient 1 has the shape \[4\], but its view of the wire \[3\]"):
        take([first, second], [views[0], torch.zeros(3)])
