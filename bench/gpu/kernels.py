"""The kernels on the GPU, beside torch's ways and a plain copy of as many bytes, with cold caches: `bench.jobs`.

The section `kernels` is pack and unpack; the others' modules call `measure_family`.
"""

from __future__ import annotations

import statistics

import torch

from bench import harness, jobs, pack
from bench.gpu import timing
from bench.gpu.results import Run

_ROUNDS = 40
_CEILING_BYTES, _CEILING_WARMUP, _CEILING_ROUNDS = 2**30, 5, 30


def measure(run: Run) -> None:
    """Adds a row for each bucket, direction and contestant; of one bucket, however little time there is."""
    measure_family(run, pack.FAMILY)


def measure_family(run: Run, family: jobs.Family) -> None:
    """Adds a row for each job and contestant; of the first one, however little time there is. Quick: of that alone."""
    ceiling = copy_gb_per_s(run)
    flush = timing.CacheFlush(run.device)
    for what, make in family.jobs(run.device, run.quick):
        if (run.out_of_time() or run.quick) and run.results.of_kind(family.kind):
            run.skip(what)
            continue
        for job in make():
            _measure_job(run, family.kind, job, ceiling, flush)
    run.out.print(jobs.table(run.results.of_kind(family.kind), family, "on the device"))


def _measure_job(run: Run, kind: str, job: jobs.Job, ceiling_gb_per_s: float, flush: timing.CacheFlush) -> None:
    rounds = 2 if run.quick else _ROUNDS
    before = {name: counts() for name, counts in job.counts.items()}
    timed = timing.time_calls(list(job.calls.values()), rounds, flush, run.device)
    samples = dict(zip(job.calls, timed, strict=True))
    seconds = {name: sample.device_seconds for name, sample in samples.items()}
    for name, sample in samples.items():
        row = job.row(name, seconds)
        counted: harness.Row = {}
        if name in before:  # no launches mean that torch's operators did the work
            counts = zip(("launches", "uploads"), before[name], job.counts[name](), strict=True)
            calls = rounds + timing.WARMUP_ROUNDS
            counted = {f"{what}_per_call": (after - begin) / calls for what, begin, after in counts}
        run.results.add(
            kind,
            **row,
            rounds=rounds,
            fraction_of_ceiling=row["gb_per_s"] / ceiling_gb_per_s,
            host_us=1e6 * statistics.median(sample.host_seconds),
            host_ahead=sample.host_ahead,
            **counted,
        )


def copy_gb_per_s(run: Run) -> float:
    """What the device can do at best; adds a row.

    GB/s of copies within its memory that follow each other without a pause: bytes read plus bytes written.
    """
    source = timing.random_tensor((2**24 if run.quick else _CEILING_BYTES) // 4, torch.float32, run.device)
    destination = torch.empty_like(source)
    for _ in range(_CEILING_WARMUP):
        destination.copy_(source)
    timers = [timing.DeviceTimer(run.device) for _ in range(5 if run.quick else _CEILING_ROUNDS)]
    for timer in timers:
        timer.start()
        destination.copy_(source)
        timer.stop()
    # The other way round: the slowest tenth of the times are the lowest tenth of the rates.
    rates = harness.Percentiles.of([2 * source.nbytes / timer.seconds() / 1e9 for timer in timers])
    what, unit = f"copy of {source.nbytes / 2**20:g} MiB", "GB/s, read and written"
    run.results.add("ceiling", what=what, unit=unit, median=rates.median, p10=rates.p10, p90=rates.p90)
    return rates.median
