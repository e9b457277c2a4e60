"""pack and unpack: the Triton kernels, run by Triton's interpreter, against their reference in plain torch."""

import doctest
import math
import mmap
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from fastddp.kernels import layout, pack_kernels
from fastddp.kernels import pack as compiled
from hypothesis import given, settings
from hypothesis import strategies as st

from interpreting import BITS, interpreted_copies, interpreter  # noqa: F401  a fixture of this module

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PAIRS = [(gradient, wire) for gradient in DTYPES for wire in DTYPES] + [(torch.float64, torch.float64)]
GUARD = 16


kernels, device, reference, layout_module, address_table = interpreted_copies(
    "pack", "pack_kernels", "pack_reference", "layout", "address_table"
)
BucketLayout, AddressTable = layout_module.BucketLayout, address_table.AddressTable


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


def random_values(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Normal numbers with zeros, infinities, subnormals and values that overflow fp16 among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, 1e-40, -3e-7, 7e4, 1e38], dtype=torch.float64)
    chosen = torch.rand(numel, generator=generator) < 0.1
    values[chosen] = special[torch.randint(len(special), (int(chosen.sum()),), generator=generator)]
    return values.to(dtype)


class Bucket:
    """Gradients with guarded memory around them, the layout of their parameters, and a guarded wire.

    Two buckets made with the same arguments hold the same bits, so kernel and reference get one each; comparing whole
    buffers afterwards shows every stray write.
    """

    def __init__(
        self, specs: list[Spec], gradient: torch.dtype, wire: torch.dtype, chunk: int = 64, wire_shift: int = 0
    ) -> None:
        self.specs = specs
        self.buffers: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor | None] = []
        parameters = []
        for index, spec in enumerate(specs):
            parameter_strides = strides_in_order(spec.shape, spec.parameter)
            parameters.append(torch.empty_strided(spec.shape, parameter_strides, device="meta"))
            strides = strides_in_order(spec.shape, spec.order or spec.parameter, spec.gap)
            if spec.expanded:
                strides = (0, *strides[1:])
            extent = 1 + sum((size - 1) * stride for size, stride in zip(spec.shape, strides, strict=True) if size > 0)
            buffer = random_values(extent + 2 * GUARD + spec.shift, gradient, seed=index)
            self.buffers.append(buffer)
            self.gradients.append(buffer.as_strided(spec.shape, strides, GUARD + spec.shift) if spec.defined else None)
        self.layout = BucketLayout.of(parameters, chunk_elements=chunk)
        self.wire_buffer = random_values(self.layout.numel + 2 * GUARD + wire_shift, wire, seed=-1)
        self.wire = self.wire_buffer[GUARD + wire_shift :][: self.layout.numel]
        self.table = AddressTable(self.layout, "cpu")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(BITS[tensor.element_size()])


def check(make: Callable[[], Bucket], scale: float) -> None:
    """Pack and unpack one bucket by the kernels, its twin by the reference; every byte of both must agree."""
    kernel, expected = make(), make()
    kernels.pack(kernel.gradients, kernel.wire, kernel.table, scale)
    reference.pack(expected.gradients, expected.wire, expected.layout, scale)
    assert torch.equal(bits(kernel.wire_buffer), bits(expected.wire_buffer)), "pack"

    kernel, expected = make(), make()
    if any(spec.expanded for spec in kernel.specs):
        return
    partials = kernels.unpack(kernel.wire, kernel.gradients, kernel.table, scale)
    reference.unpack(expected.wire, expected.gradients, expected.layout, scale)
    written = [gradient.flatten() for gradient in expected.gradients if gradient is not None]
    check_measure(partials, torch.cat(written) if written else torch.empty(0))
    for index, (got, want) in enumerate(zip(kernel.buffers, expected.buffers, strict=True)):
        assert torch.equal(bits(got), bits(want)), f"unpack, gradient {index}"


def check_measure(partials: torch.Tensor, values: torch.Tensor) -> None:
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
    layout = BucketLayout.of([torch.empty(2), torch.empty(1), torch.empty(2)])
    table = AddressTable(layout, "cpu")
    wire = torch.full((5,), 9.0)
    kernels.pack([torch.tensor([2.0, 4.0]), None, torch.tensor([6.0, 8.0])], wire, table, scale=0.5)
    assert wire.tolist() == [1, 2, 0, 3, 4]

    first, last = torch.zeros(2), torch.zeros(2)
    kernels.unpack(wire, [first, None, last], table)
    assert (first.tolist(), last.tolist()) == ([1, 2], [3, 4])


@pytest.mark.parametrize("module", [reference, layout_module], ids=["pack_reference", "layout"])
def test_documented_examples(module: ModuleType) -> None:
    failed, attempted = doctest.testmod(module)
    assert attempted > 0
    assert failed == 0


@pytest.mark.parametrize(("gradient", "wire"), PAIRS, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
def test_dtypes(gradient: torch.dtype, wire: torch.dtype, scale: float) -> None:
    check(lambda: Bucket(MIXED, gradient, wire), scale)


@pytest.mark.parametrize("numel", [0, 1, 3, 4, 7, 8, 4095, 4096, 4097, 9001])
@pytest.mark.parametrize(("gradient", "wire"), [PAIRS[0], PAIRS[2]], ids=["fp32", "bf16"])
def test_sizes_around_the_default_chunk(numel: int, gradient: torch.dtype, wire: torch.dtype) -> None:
    chunk = device.CHUNK_ELEMENTS
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
    table = AddressTable(BucketLayout.of([gradient]), "cpu")
    kernels.pack([gradient], wire, table)
    assert torch.equal(bits(wire), bits(gradient))
    back = torch.zeros_like(gradient)
    kernels.unpack(wire, [back], table)
    assert torch.equal(bits(back), bits(gradient))


def test_scale_is_applied_in_fp32_before_the_cast() -> None:
    # As fp16 the gradient would overflow; scaled first it fits.
    wire = torch.empty(1, dtype=torch.float16)
    table = AddressTable(BucketLayout.of([torch.empty(1)]), "cpu")
    kernels.pack([torch.tensor([2.0**20])], wire, table, scale=1 / 64)
    assert wire.item() == 2**14
    # A bf16 has 8 bits: 1 + 2^-8 would become 1 before it is tripled; 3 + 3 * 2^-8 becomes 3 + 2^-6.
    wire = torch.empty(1, dtype=torch.bfloat16)
    kernels.pack([torch.tensor([1 + 2**-8])], wire, table, scale=3.0)
    assert wire.item() == 3 + 2**-6


def test_pack_scales_in_place_where_the_gradients_are_views_of_the_wire() -> None:
    wire = torch.arange(9000.0)
    parameters = [torch.empty(4001), torch.empty(0), torch.empty(4999)]
    layout = BucketLayout.of(parameters)
    table = AddressTable(layout, "cpu")
    kernels.pack(layout.views(wire), wire, table, scale=0.5)
    assert torch.equal(wire, torch.arange(9000.0) / 2)


def test_bucket_of_undefined_gradients() -> None:
    table = AddressTable(BucketLayout.of([torch.empty(3), torch.empty(2)]), "cpu")
    wire = torch.full((5,), math.nan, dtype=torch.bfloat16)
    kernels.pack([None, None], wire, table, scale=0.5)
    assert wire.tolist() == [0.0] * 5
    kernels.unpack(wire, [None, None], table)


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
    "one element of a slice": Spec((1,), gap=6),
    "undefined": Spec((4, 5), defined=False),
}


@pytest.mark.parametrize("spec", FLAT.values(), ids=list(FLAT))
def test_flat_path_is_taken(spec: Spec) -> None:
    assert shape_word(Bucket([spec], torch.float32, torch.float32)) == 0


def shape_word(bucket: Bucket) -> int:
    return int(bucket.table.refresh(bucket.gradients, bucket.wire)[1])


def test_expanded_gradient_of_one_value() -> None:
    # What loss.sum().backward() hands out.
    wire = torch.zeros(20)
    table = AddressTable(BucketLayout.of([torch.empty(4, 5)]), "cpu")
    kernels.pack([torch.tensor(3.0).expand(4, 5)], wire, table)
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
                kernels.pack(bucket.gradients, bucket.wire, bucket.table)
                aligned = gradient_shift % 4 == 0 and wire_shift % 8 == 0
                assert hints == ([True, True] if aligned else [])


# --- What a wire holds ---


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("numel", [0, 1, 4095, 4096, 8200])
@pytest.mark.parametrize("shift", [0, 1])
def test_measure(dtype: torch.dtype, numel: int, shift: int) -> None:
    values = torch.randn(numel + shift).to(dtype)[shift:]
    check_measure(kernels.measure(values), values)
    if numel > 7:
        values[3], values[5], values[7] = math.nan, math.inf, -math.inf
        partials = kernels.measure(values)
        assert partials[:, 1].sum() == 3
        assert not partials[0, 0].isfinite()


# --- Offsets beyond 2^31 ---


def sparse_memory(elements: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
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
    layout = BucketLayout.of([torch.empty(FAR, device="meta"), torch.empty(1000, device="meta")])
    chunks = layout.chunks()[-3:]
    assert chunks[:, 1].tolist() == [2**31 - 4096, 2**31, 0]
    gradient, _ = sparse_memory(FAR, torch.float16)
    second = torch.randn(1000).half()
    # The interpreter copies the whole storage of its tensor arguments, so it sees the wire's first element only.
    wire, wire_start = sparse_memory(layout.numel, torch.float16)
    gradient[-4101:] = torch.randn(4101).half()
    rows = torch.tensor([gradient.data_ptr(), 0, second.data_ptr(), 0])
    constants = kernels.kernel_constants(torch.float16, torch.float16, layout.chunk_elements)

    device.pack_kernel[(3,)](wire_start, rows, chunks, 1.0, **constants)
    expected = torch.cat([gradient[-4101:], second])
    assert torch.equal(wire[-5101:], expected)
    assert not wire[:6000].any()

    gradient[-4101:] = 0
    second.zero_()
    device.unpack_kernel[(3,)](wire_start, rows, chunks, 1.0, torch.empty(3, 2, dtype=torch.float64), **constants)
    assert torch.equal(torch.cat([gradient[-4101:], second]), expected)
    assert not gradient[:6000].any()


@pytest.mark.skipif(sys.platform != "linux", reason="needs memory that is reserved but not taken")
def test_strided_offsets_beyond_int32() -> None:
    memory, _ = sparse_memory(2**32 + 2**10, torch.float16)
    gradient = memory.as_strided((3, 700), (2**31 + 3, 1))
    values = torch.randn(3, 700).half()
    gradient.copy_(values)
    table = AddressTable(BucketLayout.of([torch.empty(3, 700)]), "cpu")
    wire = torch.zeros(2100, dtype=torch.float16)
    kernels.pack([gradient], wire, table)
    assert torch.equal(wire.view(3, 700), values)

    gradient.zero_()
    kernels.unpack(wire, [gradient], table)
    assert torch.equal(gradient, values)


# --- The tables ---


def test_documented_chunks() -> None:
    layout = BucketLayout.of([torch.empty(3), torch.empty(5)], chunk_elements=4)
    assert [place.offset for place in layout.placements] == [0, 3]
    assert layout.numel == 8
    assert layout.chunks().tolist() == [[0, 0, 0, 3], [1, 0, 3, 4], [1, 4, 7, 1]]


def test_documented_rows() -> None:
    table = AddressTable(BucketLayout.of([torch.empty(2, 3), torch.empty(2, 3)]), "cpu")
    first, second = torch.zeros(2, 3), torch.zeros(3, 2).t()
    rows = table.refresh([first, second], torch.zeros(12)).tolist()
    assert rows == [first.data_ptr(), 0, second.data_ptr(), 4, 2, 3, 2, 2, 1]


def test_table_is_uploaded_only_when_something_changed() -> None:
    memory = torch.arange(8.0)
    first, second = memory[:4].view(2, 2), memory[4:].view(2, 2)
    table = AddressTable(BucketLayout.of([first, second]), "cpu")
    wire = torch.empty(8)

    def pack(*gradients: torch.Tensor | None) -> tuple[int, list[float]]:
        kernels.pack(gradients, wire, table)
        return table.uploads, wire.tolist()

    assert pack(first, second) == (1, [0, 1, 2, 3, 4, 5, 6, 7])
    memory.mul_(2)
    assert pack(first, second) == (1, [0, 2, 4, 6, 8, 10, 12, 14])
    # New tensor objects at the old addresses.
    assert pack(memory[:4].view(2, 2), memory[4:].view(2, 2)) == (1, [0, 2, 4, 6, 8, 10, 12, 14])
    kernels.unpack(wire, [first, second], table)
    assert table.uploads == 1
    assert pack(second, first) == (2, [8, 10, 12, 14, 0, 2, 4, 6])
    # Old addresses with other strides.
    assert pack(second.t(), first) == (3, [8, 12, 10, 14, 0, 2, 4, 6])
    assert pack(second.t(), None) == (4, [8, 12, 10, 14, 0, 0, 0, 0])
    assert pack(second.t(), None) == (4, [8, 12, 10, 14, 0, 0, 0, 0])


# --- Bad input ---


def two() -> tuple[Any, list[torch.Tensor], torch.Tensor]:
    gradients = [torch.zeros(2, 3), torch.zeros(4)]
    return AddressTable(BucketLayout.of(gradients), "cpu"), gradients, torch.zeros(10)


BAD: dict[str, tuple[Callable[[list[torch.Tensor], torch.Tensor], tuple[list[Any], torch.Tensor]], str]] = {
    "wire too short": (lambda g, w: (g, w[:9]), "the wire has 9 elements, but the bucket's 2 parameters have 10"),
    "wire with gaps": (lambda g, w: (g, torch.zeros(20)[::2]), "must be contiguous"),
    "one gradient short": (lambda g, w: (g[:1], w), "got 1 gradients for a bucket of 2 parameters"),
    "wrong shape": (lambda g, w: ([g[0], torch.zeros(5)], w), r"gradient 1 has shape \(5,\), but .* has \(4,\)"),
    "other device": (lambda g, w: ([g[0], g[1].to("meta")], w), "gradient 1 is on meta, but the wire is on cpu"),
    "two dtypes": (lambda g, w: ([g[0], g[1].half()], w), "gradient 1 is torch.float16, but the bucket's first"),
    "sparse": (lambda g, w: ([g[0], g[1].to_sparse()], w), "gradient 1 is torch.sparse_coo"),
    "lazily negated": (lambda g, w: ([g[0], torch._neg_view(g[1])], w), "resolve_neg"),
    "integers": (lambda g, w: ([x.int() for x in g], w), "gradients have dtype torch.int32; supported are"),
    "complex": (lambda g, w: ([x.to(torch.complex64) for x in g], w), "view_as_real"),
    "integer wire": (lambda g, w: (g, w.int()), "the wire has dtype torch.int32"),
    "fp64 gradients, fp32 wire": (lambda g, w: ([x.double() for x in g], w), "fp64 travels only as fp64"),
}


@pytest.mark.parametrize(("spoil", "message"), BAD.values(), ids=list(BAD))
def test_bad_input(spoil: Callable[..., Any], message: str) -> None:
    table, good_gradients, good_wire = two()
    kernels.pack(good_gradients, good_wire, table)
    gradients, wire = spoil(good_gradients, good_wire)
    with pytest.raises(ValueError, match=message):
        kernels.pack(gradients, wire, table)
    with pytest.raises(ValueError, match=message):
        kernels.unpack(wire, gradients, table)
    kernels.pack(good_gradients, good_wire, table)


@pytest.mark.parametrize(
    "gradient",
    [torch.zeros(3).expand(2, 3), torch.zeros(9).as_strided((2, 3), (2, 1))],
    ids=["expanded", "interleaved"],
)
def test_unpack_refuses_a_gradient_that_overlaps_itself(gradient: torch.Tensor) -> None:
    table, gradients, wire = two()
    kernels.pack([gradient, gradients[1]], wire, table)
    with pytest.raises(ValueError, match=r"gradient 0 has shape \(2, 3\) and strides .* may share memory"):
        kernels.unpack(wire, [gradient, gradients[1]], table)


def test_wire_on_another_device_than_the_table() -> None:
    table, gradients, wire = two()
    with pytest.raises(ValueError, match="the wire is on meta, but its table on cpu"):
        kernels.pack(gradients, wire.to("meta"), table)


def test_chunk_must_be_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="power of two"):
        BucketLayout.of([torch.empty(3)], chunk_elements=48)


def test_what_others_import_is_compiled() -> None:
    assert isinstance(pack_kernels.pack_kernel, triton.JITFunction)
    assert not isinstance(device.pack_kernel, triton.JITFunction)
    table = compiled.AddressTable(layout.BucketLayout.of([torch.zeros(3)]), "cpu")
    with pytest.raises(ValueError, match="where Triton does not run"):
        compiled.pack([torch.zeros(3)], torch.zeros(3), table)
