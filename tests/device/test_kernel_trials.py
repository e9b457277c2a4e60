"""Trials notice kernels that are wrong in one of their paths only.

The simulated device breaks programs of a kernel for which something holds (``fake_cuda.break_kernels``): a bit of
the last element that they write, an element too much, a program that does nothing. A trial of the kernel, as it is made
when a kernel is loaded, has to notice each.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import fake_cuda
from fastddp.kernel_loading import codec_cases, kernel_cases, launching
from fastddp.kernel_loading.trials import Trial
from on_device import DEVICE
from on_ranks import on_ranks

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
Facts = dict[str, int]


@dataclass(frozen=True)
class Break:
    """What is wrong, in two words: a fault, and an output of programs for which these facts hold."""

    kind: str
    facts: Facts

    def hits(self, facts: Facts) -> bool:
        return self.facts.items() <= facts.items()


def each(**values: Iterable[int]) -> list[Facts]:
    return [{name: value} for name, of_fact in values.items() for value in of_fact]


def breaks(kinds: Iterable[str], paths: Iterable[Facts]) -> list[Break]:
    return [Break(kind, path) for kind, path in itertools.product(kinds, paths)]


def beside(output: str = "result") -> list[Break]:
    return [Break(f"after {output}", {"is_last": 1}), Break(f"before {output}", {"number": 0})]


COUNTS = (*range(1, 10), 15, 16, 17, 511, 513, 2047, 2049, 4095, 4096)
SIZES = [*each(count=COUNTS, number=(1, 2)), {"count": 4096, "is_last": 0}, {"number": 1, "is_last": 1}]
"""Of kernels whose programs have chunks of 4096 elements."""


def places(gradient: int, wire: int) -> list[Facts]:
    """Of pack and unpack: where gradients and their places in the wire are."""
    return [
        *(
            {"gradient_offset": of_gradient, "wire_offset": of_wire, "dims": 0}
            for of_gradient, of_wire in itertools.product(range(0, 16, gradient), range(0, 16, wire))
        ),
        *each(dims=range(1, 6)),
        *({"dims": 1, "number": 1}, {"dims": 2, "number": 1, "is_last": 1}, {"dims": 3, "number": 1}),
        *({"dims": 4, "number": 0, "is_last": 1}, {"dims": 1, "count": 513}, {"dims": 1, "is_aligned": 0}),
        *({"is_aligned": 1, "dims": 0, "count": 17}, {"is_aligned": 1, "dims": 0, "count": 3}),
        *({"is_aligned": 0, "dims": 0, "count": count} for count in (3, 2049)),
        {"is_aligned": 0, "dims": 0, "number": 1},
    ]


def of_pack(gradient: torch.dtype, wire: torch.dtype, sums: bool) -> list[Break]:
    paths = [*SIZES, *places(gradient.itemsize, wire.itemsize), *each(is_defined=(0,), is_unscaled=(0, 1))]
    paths += [{"is_defined": 0, "wire_offset": wire.itemsize}, {"is_defined": 0, "number": 1}]
    noticed = ["bit result", *(("one sums", "skip sums") if sums else ("skip result",))]
    found = [*beside(), *breaks(("after sums", "before sums"), [{}] if sums else [])]
    if gradient == wire:
        paths += [{"is_in_place": 1} | also for also in each(is_unscaled=(0,), is_aligned=(0,), number=(1,))]
        # There, nothing is to be done but measuring.
        found += breaks((kind for kind in noticed if kind != "skip result"), [{"is_in_place": 1, "is_unscaled": 1}])
    return breaks(noticed, paths) + found


def of_unpack(gradient: torch.dtype, wire: torch.dtype) -> list[Break]:
    paths = [*SIZES, *places(gradient.itemsize, wire.itemsize)]
    return [
        *breaks(("bit result", "skip result", "one sums", "skip sums"), paths),
        *breaks(["bit result"], each(measures=(0, 1))),
        *breaks(["one sums"], each(is_defined=(0,))),
        *breaks(["after sums"], [{}]),
        *beside(),
    ]


def of_measured(kinds: Iterable[str], *paths: Facts) -> list[Break]:
    return [*breaks(("one sums", "skip sums"), SIZES), *breaks(kinds, paths), *beside("sums")]


def of_sum_shards() -> list[Break]:
    aligned = {"shards_offset": 0, "target_offset": 0}
    paths = [
        *SIZES,
        *each(ranks=(1, 2, 3, 4, 5, 9), shards_offset=range(2, 16, 2), target_offset=range(2, 16, 2)),
        *(aligned | also for also in each(rows_are_aligned=(0, 1))),
        *({"shards_offset": 0, "target_offset": 2}, {"is_in_place": 1}),
        {"is_in_place": 1, "rows_are_aligned": 1, "shards_offset": 0},
    ]
    return breaks(("bit result", "skip result"), paths) + beside()


def of_matrices(output: str, itemsize: int, rank: int, *others: Facts, block: int = 16) -> list[Break]:
    """Of a kernel of PowerSGD, whose programs have blocks of rows."""
    paths = [
        *each(rows=(1, block - 1, block), row=(block,), height=(1,), rank={1, rank // 2 + 1, rank}),
        *each(width=(1, 2, 3, 5, 7, 8, 9, 31, 32, 33, 127, 128, 129, 257, 1025), rows_are_aligned=(0, 1)),
        *each(gradient_offset=range(itemsize, 16, itemsize), memory_offset=range(itemsize, 16, itemsize)),
        *({"row": block, "rows": 1}, {"p_offset": 4}, {"q_offset": 4, "p_offset": 0}),
        *others,
    ]
    if output == "partials":  # a bit of which may be less than the rounding of the whole sum
        return breaks(("top partials", "skip partials"), paths)
    past = Break(f"after {output}", {"height": 5, "width": 24})
    return [
        *breaks((f"bit {output}", f"skip {output}"), paths),
        past,
        Break(f"before {output}", {"row": 0, "column": 0}),
    ]


NO_GRADIENT, NO_MEMORY = {"has_gradient": 0}, {"has_memory": 0}


def of_compress(itemsize: int, rank: int) -> list[Break]:
    before = each(is_in_place=(1,), before_offset=range(itemsize, 16, itemsize))
    return [
        *of_matrices("p", itemsize, rank, NO_GRADIENT, NO_MEMORY),
        *of_matrices("memory", itemsize, rank, NO_GRADIENT, *({"has_memory": 1} | path for path in before)),
    ]


def of_project(itemsize: int, rank: int) -> list[Break]:
    further = each(column=(128,), row=(2048,))
    return of_matrices("partials", itemsize, rank, NO_GRADIENT, NO_MEMORY, *further, block=64)


def of_adder(rank: int) -> list[Break]:
    paths = each(spans=(1, 2, 34), begin=(128,), columns=(3,), count=(128,), rank=(1, rank))
    past = Break("after q", {"spans": 1, "columns": 3})
    return [*breaks(("bit q", "skip q"), paths), past, Break("before q", {"begin": 0})]


def of_reconstruct(itemsize: int, rank: int) -> list[Break]:
    return [
        *of_matrices("gradient", itemsize, rank, NO_MEMORY, {"column": 1024}),
        *of_matrices("memory", itemsize, rank),
        *breaks(["one sums"], [{}, {"rows": 1}, NO_MEMORY]),
        *breaks(["after sums"], [{}]),
    ]


def of_basis(output: str, rank: int, again: bool) -> list[Break]:
    """Signs: a bit of such an element says nothing. ``again``: of the last kernel."""
    block = max(4096 // rank**2, 64)
    paths = [*each(row=(block,), blocks=(3,), rank=(rank,)), {"length": rank, "rank": rank}]
    if output == "gram":  # whose last element is 0 where ranks are padded
        full = [path | {"rank": rank} for path in paths]
        return [*breaks(["top gram"], full), *breaks(["skip gram"] if rank > 1 else [], paths)]
    paths += each(rows=(3,), refills=(0, 1), basis=(1, 13), rank=(rank // 2 + 1,))
    paths += [] if again else [{"has_epsilon": 1}, {"has_epsilon": 0, "refills": 0}]
    if rank > 1:
        paths += [{"stride": 1, "rank": rank}, {"stride": rank, "rank": rank}]
    ones = each(rank=(1,))  # which are as long as they should be after the first pass
    return [
        *breaks(["top vectors"], paths + ones),
        *breaks(["skip vectors"] if rank > 1 else [], paths if again else paths + ones),
        *breaks(["after vectors"], each(blocks=(1,))),
        *breaks(["before vectors"], each(row=(0,))),
    ]


def of_runs(block: int, itemsize: int, kinds: Iterable[str]) -> list[Break]:
    """Of encode and decode."""
    paths = [
        *each(number=(1, 2), count=(*range(1, 18), block), tail=(0, 1, block - 1), block=(4,)),
        *each(place=range(4), last_place=range(4), gradient_offset=range(itemsize, 16, itemsize)),
        {"number": 1, "count": 8},
    ]
    return breaks(("bit result", "skip result", *kinds), paths)


def of_encode(block: int, itemsize: int) -> list[Break]:
    errors = [
        *each(has_error=(0, 1), error_offset=(4,), before_offset=(4,)),
        *({"has_error": 1} | also for also in each(is_in_place=(0, 1))),
        {"gradient_offset": itemsize, "error_offset": 0},
    ]
    past = [Break("after error", {"block": 1}), Break("after result", {"last_place": 3})]
    return of_runs(block, itemsize, ("bit scale", "bit error")) + breaks(["bit result"], errors) + past


def of_decode(block: int, itemsize: int) -> list[Break]:
    return [
        *of_runs(block, itemsize, ()),
        *breaks(["one sums"], [{}, {"number": 1}]),
        *breaks(["after sums"], [{}]),
        *(Break("after result", {"number": 1, "count": 8}), Break("before result", {"number": 0})),
    ]


def of_add(block: int) -> list[Break]:
    paths = [
        *each(shards=(1, 2, 4, 5, 9), number=(1,), groups=(1,), error_offset=(4,), is_in_place=(0, 1)),
        *({"number": 1, "is_last": 1}, {"has_error": 1, "error_offset": 0}, {"first_element": 4 * block}),
    ]
    return [
        *breaks(("bit result", "bit scale", "skip result"), [*paths, {"has_error": 0}]),
        *breaks(["bit error"], ({"has_error": 1} | path for path in paths)),
        *(*beside(), Break("after error", {"is_last": 1})),
    ]


@functools.cache
def here() -> torch.device:
    """The device, which only ranks have."""
    return torch.device(DEVICE, 0)


Table = list[tuple[str, Trial, list[Break]]]


def of_moves(gradient: torch.dtype, wire: torch.dtype) -> Table:
    launching.load_kernels([(here(), gradient, wire)], measuring_gradients=True)
    offsets = range(gradient.itemsize, 16, gradient.itemsize)
    of_gradients = of_measured(["one sums"], *each(dims=range(1, 6), gradient_offset=offsets))
    unaligned = ({"is_aligned": 0}, {"is_aligned": 0, "number": 1}, {"is_aligned": 1, "count": 17})
    of_wire = [*of_measured(["one sums"], *unaligned), Break("bit sums", {})]
    return [
        ("fastddp_pack_", kernel_cases.pack(gradient, wire), of_pack(gradient, wire, sums=False)),
        ("fastddp_pack_measuring_", kernel_cases.pack_measuring(gradient, wire), of_pack(gradient, wire, sums=True)),
        ("fastddp_unpack_", kernel_cases.unpack(gradient, wire), of_unpack(gradient, wire)),
        ("fastddp_measure_gradients_", kernel_cases.measure_gradients(gradient), of_gradients),
        ("fastddp_measure_", kernel_cases.measure(wire), of_wire),
    ]


def of_power_sgd(dtype: torch.dtype, rank: int) -> Table:
    launching.load_low_rank_kernels([(here(), dtype)], rank)
    size, project, basis = dtype.itemsize, codec_cases.project(dtype, rank), codec_cases.orthogonalise(rank)
    return [
        ("fastddp_compress", codec_cases.compress(dtype, rank), of_compress(size, rank)),
        ("fastddp_project", project, of_project(size, rank)),
        ("fastddp_sum_partials", project, of_adder(rank)),
        ("fastddp_reconstruct", codec_cases.reconstruct(dtype, rank), of_reconstruct(size, rank)),
        ("fastddp_gram", basis, of_basis("gram", rank, again=False)),
        ("fastddp_orthonormalise", basis, of_basis("gram", rank, again=False)),
        ("fastddp_orthonormalise", basis, of_basis("vectors", rank, again=False)),
        ("fastddp_reorthonormalise", basis, of_basis("vectors", rank, again=True)),
    ]


def of_8_bits(dtype: torch.dtype, number: str, block: int, drawn: bool) -> Table:
    launching.load_block8_kernels([(here(), dtype)], number, block, drawn)
    return [
        ("_encode_", codec_cases.encode(dtype, number, block, drawn), of_encode(block, dtype.itemsize)),
        ("_decode_", codec_cases.decode(dtype, number, block), of_decode(block, dtype.itemsize)),
        ("_add_", codec_cases.add(number, block, drawn), of_add(block)),
    ]


def of_sums(dtype: torch.dtype) -> Table:
    launching.load_sum_kernels([here()], dtype)
    return [("fastddp_sum_shards", kernel_cases.sum_shards(dtype), of_sum_shards())]


TABLES: dict[str, Callable[[], Table]] = {
    "fp32 to bf16": lambda: of_moves(FP32, BF16),
    "bf16 to bf16": lambda: of_moves(BF16, BF16),
    "fp16 to fp32": lambda: of_moves(FP16, FP32),
    "fp64": lambda: of_moves(FP64, FP64),
    "PowerSGD, fp32, rank 4": lambda: of_power_sgd(FP32, 4),
    "PowerSGD, bf16, rank 1": lambda: of_power_sgd(BF16, 1),
    "PowerSGD, fp16, rank 32": lambda: of_power_sgd(FP16, 32),
    "int8, fp32": lambda: of_8_bits(FP32, "int8", 256, False),
    "e4m3, bf16, drawn": lambda: of_8_bits(BF16, "e4m3", 128, True),
    "sums, bf16": lambda: of_sums(BF16),
}


@pytest.mark.tier("slow")
@pytest.mark.tier("nightly", but_one_in=5)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", TABLES)
@on_ranks(1, pool="simulated_ranks", time_limit=1100)
def test_a_trial_notices_what_is_broken_in_one_path_only(rank: int, name: str) -> None:
    torch.set_num_threads(1)
    fake_cuda.schedule("in_order")
    missed = []
    for kernel, trial, of_kernel in TABLES[name]():
        expected = list(trial.expected(here()))

        def is_noticed(trial: Trial = trial, expected: list[Any] = expected) -> bool:
            return any(found.differing for found in trial.compare(expected, here(), trial=True))

        assert not is_noticed()
        for broken in of_kernel:
            fault, output = broken.kind.split()
            fake_cuda.break_kernels(kernel, fault, broken.hits, output)
            if not is_noticed():
                missed.append((kernel, broken, fake_cuda.broken_programs()))
            fake_cuda.break_kernels("", "none")
    assert missed == []
