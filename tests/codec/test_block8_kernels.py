"""Block8's kernels, Triton's in its interpreter and those of the CPU, against a reference in plain torch: every bit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import block8_interpreted as interpreted
from block8_given import Given, bits, random
from block8_interpreted import Format, reference
from fastddp import _C
from interpreting import alignment_hints, interpreter  # noqa: F401  a fixture of this module


class Native:
    """Kernels of the CPU behind the functions of the reference."""

    def __init__(self, make: Callable[..., _C.Block8Kernels], *arguments: Any) -> None:
        self._of = lambda form: make(form.number, form.block, *arguments)

    def __getattr__(self, function: str) -> Callable[..., Any]:
        return lambda form, *arguments: getattr(self._of(form), function)(*arguments)


ON_CPU = [
    Native(_C.Block8Kernels, torch.device("cpu")),  # the widest vectors
    Native(_C.Block8Kernels.of_vectors, 0),
    Native(_C.Block8Kernels.of_vectors, 256),
    Native(_C.Block8Kernels.of_operators),
]
NUMBERS = ["int8", "e4m3", "e5m2"]
FORMATS = [Format(number, block) for number in NUMBERS for block in (128, 256)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
KEYS = [None, 0x0123456789ABCDEF, 0xFEDCBA9876543210]
ELEMENTS = interpreted.kernels.ELEMENTS

kinds = pytest.mark.parametrize("kind", [[interpreted], ON_CPU], ids=["triton", "cpu"])
formats = pytest.mark.parametrize("form", FORMATS, ids=lambda form: f"{form.number}-{form.block}")
keys = pytest.mark.parametrize("key", KEYS[:2], ids=["nearest", "drawn"])


def check(
    kind: list[Any], form: Any, gradients: list[Tensor], scale: float = 1.0, key: int | None = None, **places: Any
) -> None:
    """A window on one rank: encode, with errors and without, and decode."""
    without, expected = (Given(form, gradients, **places) for _ in range(2))
    for kernels in (reference, *kind):
        alone, given = (without, expected) if kernels is reference else (Given(form, gradients, **places) for _ in "ab")
        kernels.encode(form, alone.gradients, None, alone.wire, scale, key)
        alone.assert_equal(without)
        kernels.encode(form, given.gradients, given.error, given.wire, scale, key, given.before)
        partials = kernels.decode(form, given.gradients, given.wire)
        given.assert_equal(expected)
        if kernels is not reference:
            check_measured(partials, torch.cat([gradient for gradient, _ in expected.gradients]))


def check_measured(partials: Tensor, written: Tensor) -> None:
    squares, odd = partials.view(-1, 2).sum(0).tolist()
    assert odd == int(written.isfinite().logical_not().sum())
    expected = float(written.double().square().sum())
    if expected < torch.finfo(torch.float32).max:
        assert squares == pytest.approx(expected, rel=1e-5)
    else:  # Triton's squares are fp32
        assert squares == math.inf or squares == pytest.approx(expected, rel=1e-5, nan_ok=True)


def check_sum(
    kind: list[Any], form: Any, values: list[Tensor], error: Tensor | None, key: int | None, first: int, into: int = -1
) -> None:
    """Shards of these values, a multiple of a group each. The target is one of them, or, with ``into`` -1, none."""
    shards = [torch.zeros(each.numel() // (4 * form.block) * form.group_bytes, dtype=torch.uint8) for each in values]
    for shard, each in zip(shards, values, strict=True):
        reference.encode(form, [(each, 0)], None, shard)
    results = []
    for kernels in (reference, *kind):
        copies = [shard.clone() for shard in shards]
        target = copies[into] if into >= 0 else torch.zeros_like(shards[0])
        shift = 0 if error is None else error.storage_offset()
        own = None if error is None else torch.cat([torch.zeros(shift), error])[shift:]
        kernels.add(form, copies, target, own, key, first)
        results.append([*copies, target, *([] if own is None else [own])])
    for result in results[1:]:
        assert all(torch.equal(bits(mine), bits(theirs)) for mine, theirs in zip(result, results[0], strict=True))


def windows() -> Iterator[tuple[Any, list[int], torch.dtype, int | None, dict[str, int]]]:
    for form, dtype, key in itertools.product(FORMATS, DTYPES, KEYS[:2]):
        yield form, [form.block, 8, 5 * form.block, 1, 0, 3 * form.block + 40], dtype, key, {}
    around = [1, 127, 128, 129, ELEMENTS - 1, ELEMENTS, ELEMENTS + 4, 2 * ELEMENTS + 130]  # blocks and programs
    for number, size in itertools.product(NUMBERS, around):
        yield Format(number, 128), [size, 8], torch.float32, KEYS[size % 3], {}
    for block, first in itertools.product((128, 256), range(5)):
        yield Format("e4m3", block), [6 * block, 1, block], torch.float32, None, {"first": first}
    for (shift, error_shift), dtype in itertools.product([(1, 0), (0, 1), (3, 2), (4, 0), (4, 4)], DTYPES):
        places = {"shift": shift, "error_shift": error_shift}
        yield Format("e5m2", 128), [ELEMENTS + 384, 130], dtype, None, places


@pytest.mark.tier("slow", but_one_in=7)
@pytest.mark.parametrize(("form", "sizes", "dtype", "key", "places"), list(windows()), ids=str)
@kinds
def test_a_window_is_that_of_the_reference(
    kind: list[Any], form: Any, sizes: list[int], dtype: torch.dtype, key: int | None, places: dict[str, int]
) -> None:
    gradients = [random(size, seed).clamp(-6e4, 6e4).to(dtype) for seed, size in enumerate(sizes)]
    check(kind, form, gradients, 1 / 3, key, **places)


@pytest.mark.tier("slow", but_one_in=9)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", NUMBERS)
def test_long_gradients_are_decoded_past_the_caches(number: str, dtype: torch.dtype) -> None:
    for shift in (0, 1):
        check(ON_CPU, Format(number, 128), [random((1 << 20) + 77).clamp(-6e4, 6e4).to(dtype)], shift=shift)


SPECIAL = {
    "zeros": [0.0, -0.0],
    "negative zeros beside numbers": [-0.0, 1.0, 0.0, -1.0, -1e-9],
    "below the least magnitude": [2.0**-100 * (1 - 2.0**-24), -(2.0**-120), 1e-45],
    "the least magnitude": [2.0**-100, -(2.0**-103)],
    "numbers that are subnormal in the format": [448.0, 2.0**-6, 3 * 2.0**-9, 2.0**-10, 1.5 * 2.0**-9, -(2.0**-11)],
    "numbers that are subnormal in fp32": [1e-29, 1e-32, 1e-36, -1e-38, 1e-39],
    "ties": [127.0, 0.5, 1.5, 2.5, -0.5, -126.5],
    "the largest that counts as finite": [2.0**127, -(2.0**127), 1e38, -3.0],
    "above that": [2.0**127 * (1 + 2.0**-23), 1.0, -1.6e38],
    "infinite": [1.0, math.inf],
    "minus infinite": [-math.inf, 0.0],
    "not a number": [math.nan, 3.0],
    "a NaN with its sign set": [0.0, -math.nan],
    "what overflows when it is cast": [3e4, 6.5e4, -7e4, 1.0],
    "every e4m3": torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(448.0).tolist(),
    "every e5m2": torch.arange(256, dtype=torch.uint8).view(torch.float8_e5m2).float().nan_to_num(1.0).tolist(),
}


@formats
@keys
@pytest.mark.parametrize("values", SPECIAL.values(), ids=list(SPECIAL))
@pytest.mark.tier("slow", but_one_in=17)
@kinds
def test_special_values(kind: list[Any], form: Any, key: int | None, values: list[float]) -> None:
    gradient = random(5 * form.block)
    gradient[2 * form.block : 3 * form.block] = torch.tensor(values).repeat(form.block)[: form.block]
    check(kind, form, [gradient], 1.0, key, error=0.0)
    check(kind, form, [gradient.bfloat16()], -1.0, key)
    check(kind, form, [gradient.half()], 2.0, key)
    shards = [random(8 * form.block, 9), torch.cat([gradient, torch.zeros(3 * form.block)])]
    check_sum(kind, form, shards, random(8 * form.block, 3), key, 0)


@formats
@keys
@pytest.mark.parametrize("count", [1, 2, 4, 5, 9])
@pytest.mark.tier("slow", but_one_in=7)
@kinds
def test_sums_of_shards(kind: list[Any], form: Any, key: int | None, count: int) -> None:
    elements = 2 * ELEMENTS + 4 * form.block
    values = [random(elements, seed) for seed in range(count)]
    check_sum(kind, form, values, random(elements, 77), key, 3 * 4 * form.block, into=count - 2)


@pytest.mark.parametrize("shift", [None, 0, 1, 2, 3])
@kinds
def test_sums_into_memory_of_their_own_with_errors_anywhere_or_none(kind: list[Any], shift: int | None) -> None:
    errors = None if shift is None else random(5 * 1024 + shift, 5)[shift:]
    check_sum(kind, Format("e5m2", 256), [random(5 * 1024, seed) for seed in range(3)], errors, KEYS[1], 2**33)


@pytest.mark.parametrize(
    ("shift", "error_shift", "size"), [(0, 0, 640), (1, 0, 640), (0, 1, 640), (4, 4, 640), (0, 0, 642)]
)
def test_alignment_hints_are_given_when_true_and_only_then(shift: int, error_shift: int, size: int) -> None:
    form = Format("int8", 128)
    given = Given(form, [random(size)], shift=shift, error_shift=error_shift, first=3)
    with alignment_hints() as hints:
        interpreted.encode(form, given.gradients, given.error, given.wire, before=given.before)
        interpreted.decode(form, given.gradients, given.wire)
    # The wire and gradients in both, and in one errors, twice; element by element, the wire in four tiles.
    decodes = shift % 4 == 0 and size % 4 == 0
    assert hints == [True] * (4 + (2 if decodes else 4))
