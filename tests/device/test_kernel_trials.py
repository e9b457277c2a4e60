"""Trials notice kernels that are wrong in one of their paths only.

The simulated device breaks programs of a kernel for which something holds (``fake_cuda.break_kernels``): a bit of
the last element that they write, an element too much, a program that does nothing. A trial of the kernel, as it is made
when a kernel is loaded, has to notice each.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

import fake_cuda
from fastddp.kernel_loading import codec_cases, kernel_cases, launching
from fastddp.kernel_loading.trials import Trial
from on_device import DEVICE
from on_ranks import on_ranks

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
Facts = dict[str, int]
Where = Callable[[Facts], bool]


@dataclass(frozen=True)
class Break:
    """What is wrong, and with which programs."""

    words: str
    where: Where
    fault: str = "bit"
    output: str = "result"


def equal(**values: int) -> Where:
    return lambda facts: all(facts[name] == value for name, value in values.items())


def rest_of_8(rest: int) -> Where:
    return lambda facts: facts["count"] % 8 == rest


def both(one: Where, other: Where) -> Where:
    return lambda facts: one(facts) and other(facts)


def beside(output: str = "result") -> Iterator[Break]:
    yield Break(f"writes past {output}", equal(is_last=1), "after", output)
    yield Break(f"writes in front of {output}", equal(number=0), "before", output)


def of_sizes(fault: str = "bit", output: str = "result") -> Iterator[Break]:
    """Of kernels whose programs have chunks of 4096 elements."""
    where: dict[str, Where] = {
        "counts that 4 does not divide": lambda f: f["count"] % 4 != 0,
        "counts that 8 does not divide": lambda f: f["count"] % 8 != 0,
        "less than an access": lambda f: f["count"] < 4,
        "more than a step": lambda f: 2048 < f["count"] < 4095,
        "full chunks": equal(count=4096),
        "a full chunk that is not the last": lambda f: f["count"] == 4096 and not f["is_last"],
        "second chunks": equal(number=1),
        "third chunks": equal(number=2),
        "last chunks, after others": lambda f: bool(f["is_last"]) and f["number"] > 0,
        **{f"count % 8 == {rest}": rest_of_8(rest) for rest in range(8)},
        **{f"count == {count}": equal(count=count) for count in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17)},
        **{f"count == {count}": equal(count=count) for count in (511, 513, 2047, 2049, 4095)},
    }
    for words, holds in where.items():
        yield Break(words, holds, fault, output)


def of_places(itemsizes: tuple[int, int], fault: str = "bit", output: str = "result") -> Iterator[Break]:
    """Of pack and unpack: where gradients and their places in the wire are."""
    for name, itemsize in zip(("gradient_offset", "wire_offset"), itemsizes, strict=True):
        for offset in range(itemsize, 16, itemsize):
            yield Break(f"{name} == {offset}", equal(**{name: offset}), fault, output)
    for gradient, wire in itertools.product(range(0, 16, itemsizes[0]), range(0, 16, itemsizes[1])):
        holds = equal(gradient_offset=gradient, wire_offset=wire, dims=0)
        yield Break(f"flat, at {gradient} and {wire}", holds, fault, output)
    for dims in range(1, 6):
        yield Break(f"strided in {dims} dims", equal(dims=dims), fault, output)
    where: dict[str, Where] = {
        "strided in 3 dims or more": lambda f: f["dims"] >= 3,
        "strided, second chunks": lambda f: f["dims"] > 0 and f["number"] == 1,
        "strided, last chunks of 2": lambda f: f["dims"] == 2 and f["number"] == 1 and f["is_last"] == 1,
        "strided, steps that are not full": lambda f: f["dims"] > 0 and f["count"] % 512 != 0,
        "strided and unaligned": lambda f: f["dims"] > 0 and f["gradient_offset"] != 0,
        "strided in 3 dims, second chunks": equal(dims=3, number=1),
        "strided in 4 dims, second chunks": equal(dims=4, number=0, is_last=1),
        "aligned, with a rest": lambda f: bool(f["is_aligned"]) and f["dims"] == 0 and f["count"] % 8 != 0,
        "aligned, less than an access": lambda f: bool(f["is_aligned"]) and f["count"] < 4,
        "unaligned, more than a step": lambda f: not f["is_aligned"] and f["dims"] == 0 and f["count"] > 2048,
        "unaligned, second chunks": lambda f: not f["is_aligned"] and f["dims"] == 0 and f["number"] == 1,
        "unaligned, less than an access": lambda f: not f["is_aligned"] and f["count"] < 4,
    }
    for words, holds in where.items():
        yield Break(words, holds, fault, output)


def of_pack(gradient: torch.dtype, wire: torch.dtype, sums: bool) -> Iterator[Break]:
    aspects = [("bit", "result"), *([("one", "sums"), ("skip", "sums")] if sums else [("skip", "result")])]
    for fault, output in aspects:
        yield from of_sizes(fault, output)
        yield from of_places((gradient.itemsize, wire.itemsize), fault, output)
        yield Break("undefined", equal(is_defined=0), fault, output)
        yield Break("undefined, unaligned", lambda f: not f["is_defined"] and f["wire_offset"] != 0, fault, output)
        yield Break("undefined, second chunks", equal(is_defined=0, number=1), fault, output)
        yield Break("scale 1", equal(is_unscaled=1), fault, output)
        yield Break("other scales", equal(is_unscaled=0), fault, output)
        if gradient == wire:
            yield Break("in place", equal(is_in_place=1), fault, output)
            yield Break("in place, scale 1", equal(is_in_place=1, is_unscaled=1), fault, output)
            yield Break("in place, unaligned", equal(is_in_place=1, is_aligned=0), fault, output)
            yield Break("in place, second chunks", equal(is_in_place=1, number=1), fault, output)
    yield from beside()
    if sums:
        yield Break("writes past sums", lambda f: True, "after", "sums")
        yield Break("writes in front of sums", lambda f: True, "before", "sums")


def without_skipped_scale_1_in_place(found: Iterator[Break]) -> Iterator[Break]:
    """Nothing has to be done there."""
    return (one for one in found if (one.words, one.fault) != ("in place, scale 1", "skip"))


def of_unpack(gradient: torch.dtype, wire: torch.dtype) -> Iterator[Break]:
    for fault, output in (("bit", "result"), ("skip", "result"), ("one", "sums"), ("skip", "sums")):
        yield from of_sizes(fault, output)
        yield from of_places((gradient.itemsize, wire.itemsize), fault, output)
    yield Break("measuring", equal(measures=1))
    yield Break("not measuring", equal(measures=0))
    yield Break("undefined", equal(is_defined=0), "one", "sums")
    yield from beside()
    yield Break("writes past sums", lambda f: True, "after", "sums")


def of_measured(itemsize: int, gradients: bool) -> Iterator[Break]:
    yield from of_sizes("one", "sums")
    yield from of_sizes("skip", "sums")
    yield Break("writes past sums", equal(is_last=1), "after", "sums")
    yield Break("writes in front of sums", equal(number=0), "before", "sums")
    if gradients:
        for dims in range(1, 6):
            yield Break(f"strided in {dims} dims", equal(dims=dims), "one", "sums")
        for offset in range(itemsize, 16, itemsize):
            yield Break(f"gradient_offset == {offset}", equal(gradient_offset=offset), "one", "sums")
    else:
        yield Break("a count of what is not finite", lambda f: True, "bit", "sums")
        yield Break("unaligned", equal(is_aligned=0), "one", "sums")
        yield Break("unaligned, second chunks", equal(is_aligned=0, number=1), "one", "sums")
        yield Break("aligned, with a rest", lambda f: bool(f["is_aligned"]) and f["count"] % 8 != 0, "one", "sums")


def of_sum_shards() -> Iterator[Break]:
    for fault in ("bit", "skip"):
        yield from of_sizes(fault)
        for ranks in (1, 2, 3, 4, 5, 9):
            yield Break(f"{ranks} ranks", equal(ranks=ranks), fault)
        for name in ("shards_offset", "target_offset"):
            for offset in range(2, 16, 2):
                yield Break(f"{name} == {offset}", equal(**{name: offset}), fault)
        yield Break("aligned", equal(shards_offset=0, target_offset=0, rows_are_aligned=1), fault)
        yield Break("aligned but for the target", lambda f: not f["shards_offset"] and f["target_offset"] > 0, fault)
        yield Break("rows that are not aligned", equal(shards_offset=0, target_offset=0, rows_are_aligned=0), fault)
        yield Break("in place", equal(is_in_place=1), fault)
        yield Break("in place, aligned", equal(is_in_place=1, rows_are_aligned=1, shards_offset=0), fault)
    yield from beside()


def of_matrices(output: str, itemsize: int, rank: int, memory: bool = True) -> Iterator[Break]:
    """Of a kernel of PowerSGD."""
    where: dict[str, Where] = {
        "everywhere": lambda f: True,
        "blocks of fewer rows": lambda f: f["rows"] < 16,
        "whole blocks of rows": equal(rows=16) if output != "partials" else equal(rows=64),
        "later rows": lambda f: f["row"] > 0,
        "last rows": lambda f: f["row"] > 0 and f["rows"] == 1,
        "1 column": equal(width=1),
        "less than an access": lambda f: f["width"] < 4,
        "widths that are not whole accesses": equal(rows_are_aligned=0),
        "widths that are whole accesses": equal(rows_are_aligned=1),
        "more than a tile": lambda f: f["width"] > 128,
        "one tile": equal(width=128),
        "one tile and a column": equal(width=129),
        "a tile less a column": equal(width=127),
        "one row": equal(height=1),
        "more than a thousand columns": lambda f: f["width"] > 1024,
        "full ranks": equal(rank=rank),
        **{f"rank {one}": equal(rank=one) for one in {1, rank // 2 + 1}},
        **{f"width {width}": equal(width=width) for width in (2, 3, 5, 7, 8, 9, 31, 32, 33, 257)},
        "unaligned P": lambda f: f["p_offset"] != 0,
        "unaligned Q": lambda f: f["q_offset"] != 0 and not f["p_offset"],
    }
    for name in ("gradient_offset", "memory_offset"):
        for offset in range(itemsize, 16, itemsize):
            where[f"{name} == {offset}"] = equal(**{name: offset})
    if output != "gradient":
        where["no gradient"] = equal(has_gradient=0)
    if output != "memory":
        where["no memory"] = equal(has_memory=0)
    for words, holds in where.items():
        # A bit of a partial sum may be less than the rounding of the whole sum.
        yield Break(words, holds, "top" if output == "partials" else "bit", output)
        if "offset ==" not in words:
            yield Break(words, holds, "skip", output)
    if output != "partials":

        def past(facts: Facts) -> bool:
            ends = facts["row"] + facts["rows"], facts["column"] + facts["columns"]
            return ends == (facts["height"], facts["width"])

        yield Break("writes past it", past, "after", output)
        yield Break("writes in front of it", equal(row=0, column=0), "before", output)


def of_compress(itemsize: int, rank: int) -> Iterator[Break]:
    yield from of_matrices("p", itemsize, rank)
    yield from of_matrices("memory", itemsize, rank)
    yield Break("errors in place", equal(has_memory=1, is_in_place=1), "bit", "memory")
    for offset in range(itemsize, 16, itemsize):
        yield Break(f"before_offset == {offset}", equal(has_memory=1, before_offset=offset), "bit", "memory")


def of_project(itemsize: int, rank: int) -> Iterator[Break]:
    yield from of_matrices("partials", itemsize, rank)
    yield Break("later columns", lambda f: f["column"] > 0, "top", "partials")
    yield Break("the last of many rows", lambda f: f["row"] > 2000, "top", "partials")


def of_adder(rank: int) -> Iterator[Break]:
    where: dict[str, Where] = {
        "one": equal(spans=1),
        "two": equal(spans=2),
        "more than are added up at once": lambda f: f["spans"] > 32,
        "later elements": lambda f: f["begin"] > 0,
        "less than a program's": lambda f: f["count"] < 128,
        "a program's": equal(count=128),
        "full ranks": equal(rank=rank),
        "rank 1": equal(rank=1),
    }
    for words, holds in where.items():
        yield Break(words, holds, "bit", "q")
        yield Break(words, holds, "skip", "q")
    yield Break("writes past Q", lambda f: f["begin"] + f["count"] == f["rank"] * f["columns"], "after", "q")
    yield Break("writes in front of Q", equal(begin=0), "before", "q")


def of_reconstruct(itemsize: int, rank: int) -> Iterator[Break]:
    yield from of_matrices("gradient", itemsize, rank)
    yield from (one for one in of_matrices("memory", itemsize, rank) if one.words != "no gradient")  # refused
    yield Break("later columns", lambda f: f["column"] >= 1024, "bit", "gradient")
    yield Break("sums", lambda f: True, "one", "sums")
    yield Break("sums of one row", equal(rows=1), "one", "sums")
    yield Break("sums without memory", equal(has_memory=0), "one", "sums")
    yield Break("writes past sums", lambda f: True, "after", "sums")


def of_basis(output: str, rank: int, again: bool = False) -> Iterator[Break]:
    """Signs: a bit of such an element says nothing. ``again``: of the last kernel."""
    where: dict[str, Where] = {
        "later rows": lambda f: f["row"] > 0,
        "several blocks": lambda f: f["blocks"] > 1,
        "blocks of few rows": lambda f: f["rows"] < 64,
        "as long as there are vectors": lambda f: f["length"] == f["rank"],
        "full ranks": equal(rank=rank),
    }
    if output == "vectors":
        where |= {
            "refilled": equal(refills=1),
            "not refilled": equal(refills=0),
            "not the first basis": lambda f: f["basis"] > 0,
            "the last basis": lambda f: f["basis"] >= 12,
            **{f"rank {one}": equal(rank=one) for one in {1, rank // 2 + 1}},
        }
        if not again:
            where["an epsilon"] = equal(has_epsilon=1)
            where["no epsilon"] = equal(has_epsilon=0, refills=0)
        if rank > 1:
            where["transposed"] = lambda f: f["stride"] == 1 and f["rank"] > 1
            where["not transposed"] = lambda f: f["stride"] > 1
    for words, holds in where.items():
        yield Break(words, holds if output == "vectors" else full(holds, rank), "top", output)
        if not (again and words == "rank 1") and rank > 1:  # which is as long as it should be after the first pass
            yield Break(words, holds, "skip", output)
    if output == "vectors":
        yield Break("writes past it", lambda f: f["row"] + f["rows"] == f["length"], "after", output)
        yield Break("writes in front of it", equal(row=0), "before", output)


def full(holds: Where, rank: int) -> Where:
    """The last element of a Gram matrix is 0 where ranks are padded."""
    return both(holds, equal(rank=rank))


def of_runs(block: int, itemsize: int, encodes: bool) -> Iterator[Break]:
    """Of encode and decode."""
    where: dict[str, Where] = {
        "second programs": equal(number=1),
        "third programs": equal(number=2),
        "last blocks that are not full": lambda f: f["tail"] > 0,
        "one element in the last block": equal(tail=1),
        "one element less than a block": equal(tail=block - 1),
        "whole blocks": equal(tail=0),
        "one block": equal(count=block),
        "a program and 8 elements": equal(number=1, count=8),
        "less than an access": lambda f: f["count"] < 4,
        **{f"place {place} of a group": equal(place=place) for place in range(4)},
        **{f"the last block at place {place}": equal(last_place=place) for place in range(4)},
        **{f"count % 8 == {rest}": rest_of_8(rest) for rest in range(8)},
        **{f"gradient_offset == {offset}": equal(gradient_offset=offset) for offset in range(itemsize, 16, itemsize)},
        "blocks at the second group": lambda f: f["block"] // 4 == 1,
    }
    outputs = ("result", "scale", "error") if encodes else ("result",)
    for output, (words, holds) in itertools.product(outputs, where.items()):
        yield Break(words, holds, "bit", output)
    for words, holds in where.items():
        yield Break(words, holds, "skip", "result")
    if not encodes:
        yield Break("writes past it", lambda f: f["count"] < 4096, "after")
        yield Break("writes in front of it", equal(number=0), "before")
        yield Break("sums", lambda f: True, "one", "sums")
        yield Break("sums of second programs", equal(number=1), "one", "sums")
        yield Break("writes past sums", lambda f: True, "after", "sums")
        return
    for words, holds in {
        "no errors": equal(has_error=0),
        "errors": equal(has_error=1),
        "errors in place": equal(has_error=1, is_in_place=1),
        "errors from another place": equal(has_error=1, is_in_place=0),
        "unaligned errors": lambda f: f["error_offset"] != 0,
        "unaligned earlier errors": lambda f: f["before_offset"] != 0,
        "unaligned gradients alone": lambda f: f["gradient_offset"] != 0 and not f["error_offset"],
    }.items():
        yield Break(words, holds)
    yield Break("writes past errors", lambda f: f["block"] % 2 == 1, "after", "error")
    yield Break("writes past bytes", equal(last_place=3), "after")


def of_add() -> Iterator[Break]:
    where: dict[str, Where] = {
        **{f"{count} shards": equal(shards=count) for count in (1, 2, 4, 5, 9)},
        "second programs": equal(number=1),
        "last programs": lambda f: f["number"] > 0 and f["is_last"] == 1,
        "one group": equal(groups=1),
        "no errors": equal(has_error=0),
        "aligned errors": equal(has_error=1, error_offset=0),
        "unaligned errors": lambda f: f["error_offset"] != 0,
        "into a shard": equal(is_in_place=1),
        "beside the shards": equal(is_in_place=0),
        "a first element": lambda f: f["first_element"] > 0,
    }
    for words, holds in where.items():
        for output in ("result", "scale"):
            yield Break(words, holds, "bit", output)
        yield Break(words, holds, "skip")
        if words != "no errors":
            yield Break(words, both(equal(has_error=1), holds), "bit", "error")
    yield from beside()
    yield Break("writes past errors", equal(is_last=1), "after", "error")


@functools.cache
def here() -> torch.device:
    """The device, which only ranks have."""
    return torch.device(DEVICE, 0)


Table = list[tuple[str, Callable[[], Trial], Callable[[], Iterator[Break]]]]


def of_moves(gradient: torch.dtype, wire: torch.dtype) -> Table:
    launching.load_kernels([(here(), gradient, wire)], measuring_gradients=True)

    def packs(sums: bool) -> Callable[[], Iterator[Break]]:
        return lambda: without_skipped_scale_1_in_place(of_pack(gradient, wire, sums))

    return [
        ("fastddp_pack_", lambda: kernel_cases.pack(gradient, wire), packs(False)),
        ("fastddp_pack_measuring_", lambda: kernel_cases.pack_measuring(gradient, wire), packs(True)),
        ("fastddp_unpack_", lambda: kernel_cases.unpack(gradient, wire), lambda: of_unpack(gradient, wire)),
        (
            "fastddp_measure_gradients_",
            lambda: kernel_cases.measure_gradients(gradient),
            lambda: of_measured(gradient.itemsize, True),
        ),
        ("fastddp_measure_", lambda: kernel_cases.measure(wire), lambda: of_measured(wire.itemsize, False)),
    ]


def of_power_sgd(dtype: torch.dtype, rank: int) -> Table:
    launching.load_low_rank_kernels([(here(), dtype)], rank)
    size = dtype.itemsize
    basis: Table = [
        (
            name,
            lambda: codec_cases.orthogonalise(rank),
            functools.partial(of_basis, output, rank, "_re" in name),
        )  # type: ignore[misc]
        for name, output in (
            ("fastddp_gram", "gram"),
            ("fastddp_orthonormalise", "gram"),
            ("fastddp_orthonormalise", "vectors"),
            ("fastddp_reorthonormalise", "vectors"),
        )
    ]
    return [
        ("fastddp_compress", lambda: codec_cases.compress(dtype, rank), lambda: of_compress(size, rank)),
        ("fastddp_project", lambda: codec_cases.project(dtype, rank), lambda: of_project(size, rank)),
        ("fastddp_sum_partials", lambda: codec_cases.project(dtype, rank), lambda: of_adder(rank)),
        ("fastddp_reconstruct", lambda: codec_cases.reconstruct(dtype, rank), lambda: of_reconstruct(size, rank)),
        *basis,
    ]


def of_8_bits(dtype: torch.dtype, number: str, block: int, drawn: bool) -> Table:
    launching.load_block8_kernels([(here(), dtype)], number, block, drawn)
    size = dtype.itemsize
    return [
        ("_encode_", lambda: codec_cases.encode(dtype, number, block, drawn), lambda: of_runs(block, size, True)),
        ("_decode_", lambda: codec_cases.decode(dtype, number, block), lambda: of_runs(block, size, False)),
        ("_add_", lambda: codec_cases.add(number, block, drawn), of_add),
    ]


def of_sums(dtype: torch.dtype) -> Table:
    launching.load_sum_kernels([here()], dtype)
    return [("fastddp_sum_shards", lambda: kernel_cases.sum_shards(dtype), of_sum_shards)]


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


def noticed(table: Table, every_path: bool = False) -> Iterator[tuple[str, str, int, list[str]]]:
    """Of each break: the kernel, what is broken, how many programs, and the path (or each) that noticed it."""
    fake_cuda.schedule("in_order")
    for kernel, make, breaks in table:
        trial = make()
        expected = list(trial.expected(here()))
        assert [found.differing for found in trial.compare(expected, here(), trial=True) if found.differing] == []
        for broken in breaks():
            fake_cuda.break_kernels(kernel, broken.fault, broken.where, broken.output)
            paths = (found.path for found in trial.compare(expected, here(), trial=True) if found.differing)
            by = list(paths if every_path else itertools.islice(paths, 1))
            yield kernel, f"{broken.words}: {broken.fault} of {broken.output}", fake_cuda.broken_programs(), by
            fake_cuda.break_kernels("", "none")


@pytest.mark.tier("slow")
@pytest.mark.tier("nightly", but_one_in=5)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", TABLES)
@on_ranks(1, pool="simulated_ranks", time_limit=1100)
def test_a_trial_notices_what_is_broken_in_one_path_only(rank: int, name: str) -> None:
    torch.set_num_threads(1)
    missed = [(kernel, words, programs) for kernel, words, programs, paths in noticed(TABLES[name]()) if not paths]
    assert missed == []
