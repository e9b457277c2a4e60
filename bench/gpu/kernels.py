"""Pack and unpack on the GPU: fastddp's kernels, torch's ways and a plain copy of as many bytes, with cold caches."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench import harness
from bench.gpu import ceilings, timing
from bench.gpu.results import Run
from bench.kernels import (
    CEILING,
    SCALE,
    Bucket,
    Contestant,
    compare,
    make_bucket,
    pack_foreach_copy,
    pack_torch_ddp,
    unpack_foreach_copy,
    unpack_torch_ddp,
    wrong_contestants,
)

# (gradient, wire)
DTYPES = (
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float64, torch.float64),
)
MEBIBYTES = (1.0, 25.0, 256.0)
_ROUNDS = 40

FASTDDP = "fastddp"
MOVED = "fastddp moved"


class FastddpKernels:
    """fastddp's kernels for one bucket."""

    def __init__(self, device: torch.device) -> None:
        from fastddp import _C

        self.kernels = _C.Kernels(device)

    def pack(self, bucket: Bucket) -> Tensor:
        """One launch."""
        self.kernels.pack(bucket.gradients, bucket.views, SCALE)
        return bucket.wire

    def unpack(self, bucket: Bucket) -> None:
        """One launch."""
        self.kernels.unpack(bucket.gradients, bucket.views)

    def counts(self) -> tuple[int, int]:
        """Launches and uploads of the table of addresses up to now."""
        return self.kernels.launches, self.kernels.uploads


class MovedGradients(FastddpKernels):
    """The same when the allocator gave every gradient another place since the last call: a table is uploaded."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._spare: list[Tensor] = []

    def _move(self, bucket: Bucket) -> None:
        """Swaps the bucket's gradients with copies that it had from the beginning."""
        if not self._spare:
            self._spare = [gradient.clone() for gradient in bucket.gradients]
        bucket.gradients[:], self._spare = self._spare, list(bucket.gradients)

    def pack(self, bucket: Bucket) -> Tensor:
        """One upload, one launch."""
        self._move(bucket)
        return super().pack(bucket)

    def unpack(self, bucket: Bucket) -> None:
        """One upload, one launch."""
        self._move(bucket)
        super().unpack(bucket)


@dataclass(frozen=True)
class Entry:
    """A contestant with the bucket that it works on, and fastddp's counters where it has them."""

    contestant: Contestant
    bucket: Bucket
    kernels: FastddpKernels | None = None

    def call(self, direction: str) -> None:
        """What is timed."""
        if direction == "pack":
            self.contestant.pack(self.bucket)
        else:
            self.contestant.unpack(self.bucket)


def make_entries(mebibytes: float, gradient: torch.dtype, wire: torch.dtype, device: torch.device) -> list[Entry]:
    """All contestants. They share a bucket, but for the one that moves its gradients about."""
    bucket, moving = (make_bucket(mebibytes, gradient, wire, device) for _ in range(2))
    fast, moved = FastddpKernels(device), MovedGradients(device)
    return [
        Entry(CEILING, bucket),
        Entry(Contestant(FASTDDP, fast.pack, fast.unpack), bucket, fast),
        Entry(Contestant(MOVED, moved.pack, moved.unpack), moving, moved),
        Entry(Contestant("_foreach_copy_", pack_foreach_copy, unpack_foreach_copy, scale=1.0), bucket),
        Entry(Contestant("torch DDP", pack_torch_ddp, unpack_torch_ddp), bucket),
    ]


def wrong_entries(entries: Sequence[Entry]) -> set[tuple[str, str]]:
    """Direction and name of those that compute something else than plain torch.

    Those that share a bucket are checked together: the wire is another one for each, so nobody passes by doing nothing.
    """
    buckets = {id(entry.bucket): entry.bucket for entry in entries}
    wrong: set[tuple[str, str]] = set()
    for bucket in buckets.values():
        wrong |= wrong_contestants(bucket, [entry.contestant for entry in entries if entry.bucket is bucket])
    return wrong


def measure(run: Run) -> None:
    """Adds a row for each bucket, direction and contestant; of one bucket, however little time there is."""
    from fastddp.exchange.launching import load_kernels

    dtypes = DTYPES[1:2] if run.quick else DTYPES
    sizes = (1.0,) if run.quick else MEBIBYTES
    ceiling = ceilings.copy_gb_per_s(run.device, 5 if run.quick else 30, 2**24 if run.quick else 2**30)
    flush = timing.CacheFlush(run.device)
    # The size that matters most first, in case that there is no time for all.
    for mebibytes, (gradient, wire) in itertools.product(sorted(sizes, key=lambda size: size != 25), dtypes):
        if run.out_of_time() and run.results.of_kind("kernel"):
            run.skip(f"pack and unpack of {mebibytes:g} MiB, {gradient} to {wire}")
            continue
        load_kernels([(run.device, gradient, wire)])
        entries = make_entries(mebibytes, gradient, wire, run.device)
        wrong = wrong_entries(entries)
        for direction in ("pack", "unpack"):
            _measure_direction(run, entries, direction, wrong, ceiling.median, flush, mebibytes)
    rows = run.results.of_kind("kernel")
    if rows:
        run.out.print(kernel_table(rows))


def _measure_direction(
    run: Run,
    entries: list[Entry],
    direction: str,
    wrong: set[tuple[str, str]],
    ceiling_gb_per_s: float,
    flush: timing.CacheFlush,
    mebibytes: float,
) -> None:
    rounds = 5 if run.quick else _ROUNDS
    bucket = entries[0].bucket
    before = [entry.kernels.counts() if entry.kernels else None for entry in entries]
    calls = [lambda entry=entry: entry.call(direction) for entry in entries]
    samples = timing.time_calls(calls, rounds, flush, run.device)
    device_seconds = {e.contestant.name: s.device_seconds for e, s in zip(entries, samples, strict=True)}
    for entry, sample, counts, columns in zip(
        entries, samples, before, compare(bucket.payload_bytes, device_seconds), strict=True
    ):
        run.results.add(
            "kernel",
            direction=direction,
            gradient_dtype=str(bucket.staging.dtype).removeprefix("torch."),
            wire_dtype=str(bucket.wire.dtype).removeprefix("torch."),
            gradient_mib=mebibytes,
            gradients=len(bucket.gradients),
            payload_bytes=bucket.payload_bytes,
            rounds=rounds,
            **columns,
            fraction_of_ceiling=columns["gb_per_s"] / ceiling_gb_per_s,
            host_us=1e6 * statistics.median(sample.host_seconds),
            host_ahead=sample.host_ahead,
            **_per_call(entry, counts, rounds + timing.WARMUP_ROUNDS),
            result="WRONG" if (direction, entry.contestant.name) in wrong else "right",
        )


def _per_call(entry: Entry, before: tuple[int, int] | None, calls: int) -> harness.Row:
    """What fastddp's counters say; no launches mean that torch's operators did the work."""
    if entry.kernels is None or before is None:
        return {"launches_per_call": None, "uploads_per_call": None}
    launches, uploads = entry.kernels.counts()
    return {"launches_per_call": (launches - before[0]) / calls, "uploads_per_call": (uploads - before[1]) / calls}


def by_bucket(rows: Sequence[harness.Row]) -> list[dict[str, harness.Row]]:
    """The rows of each bucket and direction, by contestant."""
    groups: dict[tuple[object, ...], dict[str, harness.Row]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("direction", "gradient_dtype", "wire_dtype", "gradient_mib"))
        groups.setdefault(key, {})[row["contestant"]] = row
    return list(groups.values())


def kernel_table(rows: Sequence[harness.Row]) -> object:
    """A line for each bucket and direction: µs of each contestant, and how near fastddp comes to the ceilings."""
    columns = ["direction", "gradients to wire", "MiB", "number", *dict.fromkeys(row["contestant"] for row in rows)]
    cells = []
    for group in by_bucket(rows):
        fast = group[FASTDDP]
        times = [f"{row['median_us']:.1f}" + (" WRONG" if row["result"] == "WRONG" else "") for row in group.values()]
        cells.append(
            [
                fast["direction"],
                f"{fast['gradient_dtype']} to {fast['wire_dtype']}",
                f"{fast['gradient_mib']:g}",
                str(fast["gradients"]),
                *times,
                *(f"{100 * fast[column]:.0f} %" for column in ("fraction_of_copy", "fraction_of_ceiling")),
            ]
        )
    title = f"µs on the device with cold caches, median of {rows[0]['rounds']} calls"
    return harness.table(title, [*columns, "of copy_", "of ceiling"], cells, left=2)
