"""Bandwidth of the kernels on the CPU, against torch's ways and a plain copy: `python -m bench.kernels --help`.

Bytes are those of the payload, each gradient element read once and written once, whatever a contestant really moves: a
way with an intermediate buffer shows as slow, not as busy. All contestants work on the same gradients and wire, in an
order that changes from round to round, and each finds them out of the caches, as a bucket is that was filled one
gradient at a time. Calls are made from Python, so each contestant's time includes the conversion of its lists of
tensors; inside a training step neither torch nor fastddp pays that.

Pack and unpack come first, then PowerSGD's kernels (`bench.low_rank`).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import harness, low_rank
from bench.cases import Shape, resnet50_shapes
from fastddp import _C

MODULE = "bench.kernels"

KERNELS = _C.Kernels(torch.device("cpu"))

# Two ranks' share. A power of two, so that scaling before or after a cast rounds alike and results can be compared.
SCALE = 0.5

# More than the last-level cache of most machines; read, not written, so that nothing is left to be written back.
EVICTION_BYTES = 256 * 2**20

# (gradient, wire)
DTYPES = (
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
)


@dataclass(frozen=True)
class Bucket:
    """Gradients, the wire, each gradient's view of the wire, and what the other ways need besides."""

    gradients: list[Tensor]
    wire: Tensor
    views: list[Tensor]
    staging: Tensor  # torch's bucket, which has the gradients' dtype whatever the wire's
    staging_views: list[Tensor]
    plain_source: Tensor  # two flat tensors, together as many bytes as gradients and wire
    plain_destination: Tensor

    @property
    def payload_bytes(self) -> int:
        """Of one pack or unpack: every element once in each dtype."""
        return self.wire.numel() * (self.staging.element_size() + self.wire.element_size())


def gradient_shapes(elements: int) -> list[Shape]:
    """ResNet-50's shapes from its input on, over and over, the last one cut: exactly so many elements.

    >>> gradient_shapes(9600)
    [(64, 3, 7, 7), (64,), (64,), (64,)]
    """
    shapes: list[Shape] = []
    for shape in itertools.cycle(resnet50_shapes()):
        size = torch.Size(shape).numel()
        if size >= elements:
            return [*shapes, shape if size == elements else (elements,)]
        shapes.append(shape)
        elements -= size
    raise AssertionError("a cycle has no end")


def make_bucket(mebibytes: float, gradient_dtype: torch.dtype, wire_dtype: torch.dtype, device: torch.device) -> Bucket:
    """A bucket with so many MiB of gradients, one behind the other in the wire, each gradient with its own memory."""
    shapes = gradient_shapes(int(mebibytes * 2**20) // gradient_dtype.itemsize)
    generator = torch.Generator().manual_seed(0)  # the simulated device has none of its own

    def random(shape: Shape) -> Tensor:
        # From 1 to 2: halved, nothing is subnormal in fp16, where to scale after the cast would round twice.
        return torch.empty(shape).uniform_(1, 2, generator=generator).to(device)

    gradients = [random(shape).to(gradient_dtype) for shape in shapes]
    sizes = [gradient.numel() for gradient in gradients]
    wire = torch.zeros(sum(sizes), dtype=wire_dtype, device=device)
    staging = torch.zeros(sum(sizes), dtype=gradient_dtype, device=device)
    plain_numel = sum(sizes) * (wire.element_size() + staging.element_size()) // 2 // torch.float32.itemsize

    def views_of(flat: Tensor) -> list[Tensor]:
        return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]

    plain_source, plain_destination = random((plain_numel,)), random((plain_numel,))
    return Bucket(gradients, wire, views_of(wire), staging, views_of(staging), plain_source, plain_destination)


def copy_plain(bucket: Bucket) -> None:
    bucket.plain_destination.copy_(bucket.plain_source)


def pack_fastddp(bucket: Bucket) -> Tensor:
    KERNELS.pack(bucket.gradients, bucket.views, SCALE)
    return bucket.wire


def pack_foreach_copy(bucket: Bucket) -> Tensor:
    """Without the scaling: less work than the others do."""
    torch._foreach_copy_(bucket.views, bucket.gradients)
    return bucket.wire


def pack_torch_ddp(bucket: Bucket) -> Tensor:
    """Gradient by gradient, as in torch's reducer; where the dtypes differ, its fp16/bf16 hook casts and divides."""
    if bucket.wire.dtype == bucket.staging.dtype:
        for gradient, view in zip(bucket.gradients, bucket.views, strict=True):
            torch.mul(gradient, SCALE, out=view)
        return bucket.wire
    for gradient, view in zip(bucket.gradients, bucket.staging_views, strict=True):
        view.copy_(gradient)
    return bucket.staging.to(bucket.wire.dtype).mul_(SCALE)


def unpack_fastddp(bucket: Bucket) -> None:
    KERNELS.unpack(bucket.gradients, bucket.views)


def unpack_foreach_copy(bucket: Bucket) -> None:
    torch._foreach_copy_(bucket.gradients, bucket.views)


def unpack_torch_ddp(bucket: Bucket) -> None:
    """Gradient by gradient, behind the hook's cast of the whole bucket where the dtypes differ."""
    views = bucket.views
    if bucket.wire.dtype != bucket.staging.dtype:
        bucket.staging.copy_(bucket.wire)
        views = bucket.staging_views
    for gradient, view in zip(bucket.gradients, views, strict=True):
        gradient.copy_(view)


@dataclass(frozen=True)
class Contestant:
    """Both directions of one way to move gradients; pack returns the wire that would travel."""

    name: str
    pack: Callable[[Bucket], Tensor | None]
    unpack: Callable[[Bucket], None]
    scale: float = SCALE  # by which its pack multiplies


# The first is the ceiling that the others are fractions of.
CEILING = Contestant("copy_", copy_plain, copy_plain)
CONTESTANTS = (
    CEILING,
    Contestant("fastddp", pack_fastddp, unpack_fastddp),
    Contestant("_foreach_copy_", pack_foreach_copy, unpack_foreach_copy, scale=1.0),
    Contestant("torch DDP", pack_torch_ddp, unpack_torch_ddp),
)


def main() -> None:
    parser = harness.parser(MODULE, __doc__)
    parser.add_argument("--mib", nargs="+", type=float, default=[1.0, 25.0, 100.0], help="MiB of gradients a bucket")
    parser.add_argument("--rounds", type=int, default=40, help="calls of each contestant that count (default: 40)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1, as a rank of bench.step)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a row for each bucket, direction, contestant")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    facts = harness.environment(MODULE, torch.device("cpu"), options.threads)
    eviction = torch.ones(EVICTION_BYTES // torch.float32.itemsize)

    jobs = list(itertools.product(DTYPES, options.mib))
    rows: list[harness.Row] = []
    with harness.progress("buckets", len(jobs), show=True) as advance:
        for (gradient_dtype, wire_dtype), mebibytes in jobs:
            bucket = make_bucket(mebibytes, gradient_dtype, wire_dtype, torch.device("cpu"))
            wrong = wrong_contestants(bucket, CONTESTANTS)
            for direction in ("pack", "unpack"):
                facts_of_job = {
                    "direction": direction,
                    "gradient_dtype": str(gradient_dtype).removeprefix("torch."),
                    "wire_dtype": str(wire_dtype).removeprefix("torch."),
                    "gradient_mib": mebibytes,
                    "gradients": len(bucket.gradients),
                    "payload_bytes": bucket.payload_bytes,
                    "rounds": options.rounds,
                }
                calls = {contestant.name: partial(getattr(contestant, direction), bucket) for contestant in CONTESTANTS}
                samples = time_calls(calls, options.rounds, eviction)
                for columns in compare(bucket.payload_bytes, samples):
                    verdict = "WRONG" if (direction, columns["contestant"]) in wrong else "right"
                    rows.append(facts | facts_of_job | columns | {"result": verdict})
            advance()
    rows += low_rank_rows(facts, options, eviction)
    finish(rows, options)


def low_rank_rows(facts: harness.Row, options: argparse.Namespace, eviction: Tensor) -> list[harness.Row]:
    """PowerSGD's kernels: a row for each operation, dtype, rank and contestant."""
    rows = []
    jobs = list(itertools.product(low_rank.OPERATIONS, low_rank.DTYPES, low_rank.RANKS))
    with harness.progress("PowerSGD", len(jobs), show=True) as advance:
        for operation, dtype, rank in jobs:
            advance()
            if operation == "orthogonalise" and dtype != torch.float32:
                continue  # P is fp32 whatever the gradients are
            matrices = low_rank.Matrices.make(_orthogonalised(operation), rank, dtype, torch.device("cpu"))
            wrong = low_rank.wrong_contestants(operation, rank, dtype, torch.device("cpu"))
            payload = matrices.payload_bytes(operation)
            samples = time_calls(low_rank.calls(operation, matrices), options.rounds, eviction)
            for columns in compare(payload, samples):
                verdict = "WRONG" if columns["contestant"] in wrong else "right"
                rows.append(
                    facts
                    | low_rank_facts(operation, matrices)
                    | {"rounds": options.rounds}
                    | columns
                    | {"result": verdict}
                )
    return rows


def _orthogonalised(operation: str) -> int:
    """Blocks: 48 matrices are GPT-2's, and more than a bucket has."""
    return 12 if operation == "orthogonalise" else 1


def low_rank_facts(operation: str, matrices: low_rank.Matrices) -> harness.Row:
    """The columns that say what was measured."""
    gradient = matrices.gradients[0]
    return {
        "direction": operation,
        "gradient_dtype": str(gradient.dtype).removeprefix("torch."),
        "wire_dtype": None,
        "rank": matrices.p[0].shape[1],
        "gradient_mib": round(matrices.elements * gradient.element_size() / 2**20, 1),
        "gradients": len(matrices.gradients),
        "payload_bytes": matrices.payload_bytes(operation),
    }


def wrong_contestants(bucket: Bucket, contestants: Sequence[Contestant]) -> set[tuple[str, str]]:
    """Which contestants' pack or unpack is not bitwise what a cast of the flat gradients or wire gives."""
    wrong = set()
    flat = torch.cat([gradient.flatten() for gradient in bucket.gradients])
    for contestant in contestants:
        bucket.wire.fill_(math.nan)
        packed = contestant.pack(bucket)
        if packed is not None and not torch.equal(packed, (flat.float() * contestant.scale).to(packed.dtype)):
            wrong.add(("pack", contestant.name))
    for index, contestant in enumerate(contestants):
        if contestant is CEILING:
            continue
        bucket.wire.copy_(torch.randn(bucket.wire.shape, generator=torch.Generator().manual_seed(index)))
        contestant.unpack(bucket)
        expected = bucket.wire.to(flat.dtype)
        if not torch.equal(torch.cat([gradient.flatten() for gradient in bucket.gradients]), expected):
            wrong.add(("unpack", contestant.name))
    return wrong


def time_calls(calls: Mapping[str, Callable[[], object]], rounds: int, eviction: Tensor) -> dict[str, list[float]]:
    """Seconds of each call, by contestant; a round that does not count goes first."""
    names = list(calls)
    samples: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    try:
        for round_index in range(-1, rounds):
            for index in harness.round_order(len(names), round_index % len(names)):
                call = calls[names[index]]
                eviction.sum()
                start = time.perf_counter()
                call()
                seconds = time.perf_counter() - start
                if round_index >= 0:
                    samples[names[index]].append(seconds)
    finally:
        gc.enable()
    return samples


def compare(payload_bytes: int, samples: dict[str, list[float]]) -> list[harness.Row]:
    """The columns of one bucket and direction: a row for each contestant."""
    rows = []
    for name, seconds in samples.items():
        percentiles = harness.Percentiles.of(seconds)
        rows.append(
            {
                "contestant": name,
                "median_us": round(1e6 * percentiles.median, 2),
                "p10_us": round(1e6 * percentiles.p10, 2),
                "p90_us": round(1e6 * percentiles.p90, 2),
                "gb_per_s": round(payload_bytes / percentiles.median / 1e9, 3),
                "fraction_of_copy": round(1 / harness.paired_ratio(seconds, samples[CEILING.name]), 4),
            }
        )
    return rows


def finish(rows: Sequence[harness.Row], options: argparse.Namespace) -> None:
    """Prints the table, writes the rows, and exits with 1 when a result was wrong."""
    out = harness.console()
    out.print(harness.describe(rows[0]), highlight=False)
    out.print(bandwidth_table([row for row in rows if "rank" not in row]))
    out.print(low_rank_table([row for row in rows if "rank" in row]))
    if options.json:
        harness.write_json(options.json, rows)
    wrong = [f"{row['direction']} of {row['contestant']}" for row in rows if row["result"] == "WRONG"]
    if wrong:
        sys.exit(f"wrong results: {', '.join(dict.fromkeys(wrong))}")


def bandwidth_table(rows: Sequence[harness.Row]) -> Any:
    """A line for each bucket and direction: GB/s of each contestant, and the fraction of the plain copy's."""
    columns = ["direction", "gradient", "wire", "MiB", "gradients", CEILING.name]
    for contestant in CONTESTANTS[1:]:
        columns += [contestant.name, "of copy_"]
    lines: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        key = (row["direction"], row["gradient_dtype"], row["wire_dtype"], f"{row['gradient_mib']:g}")
        line = lines.setdefault(key, [*key, str(row["gradients"])])
        line.append("WRONG" if row["result"] == "WRONG" else f"{row['gb_per_s']:.1f}")
        if row["contestant"] != CEILING.name:
            line.append(f"{100 * row['fraction_of_copy']:.0f} %")
    title = f"GB/s of payload, read and written; median of {rows[0]['rounds']} calls, cold caches"
    return harness.table(title, columns, sorted(lines.values(), key=lambda line: line[0]), left=3)


def low_rank_table(rows: Sequence[harness.Row]) -> Any:
    """A line for each operation, dtype and rank: ms of each contestant, and how near fastddp comes to the copy."""
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        key = (row["direction"], row["gradient_dtype"], str(row["rank"]), f"{row['gradient_mib']:g}")
        line = lines.setdefault(key, {})
        line[row["contestant"]] = f"{row['median_us'] / 1e3:.3f}" + (" WRONG" if row["result"] == "WRONG" else "")
        if row["contestant"] == low_rank.FASTDDP:
            line["of copy_"] = f"{100 * row['fraction_of_copy']:.0f} %"
    columns = [*names, "of copy_"]
    cells = [[*key, *(line.get(column, "-") for column in columns)] for key, line in lines.items()]
    title = f"PowerSGD: ms a call, median of {rows[0]['rounds']} calls, cold caches"
    return harness.table(title, ["operation", "gradient", "rank", "MiB", *columns], cells, left=2)


if __name__ == "__main__":
    main()
