"""Block8's kernels on the GPU, against torch's operators and a plain copy of as many bytes, with cold caches."""

from __future__ import annotations

import itertools
import statistics

import torch

from bench import block8
from bench.gpu import ceilings, timing
from bench.gpu.results import Run
from bench.kernels import compare

_MEBIBYTES = 25.0
_ROUNDS = 30


def measure(run: Run) -> None:
    """Adds a row for each operation, number, dtype and contestant; for one of them, however little time there is."""
    from fastddp.exchange.launching import load_block8_kernels

    ceiling = ceilings.copy_gb_per_s(run.device, 5 if run.quick else 30, 2**24 if run.quick else 2**30)
    flush = timing.CacheFlush(run.device)
    for number, dtype, operation in itertools.product(block8.NUMBERS, block8.DTYPES, block8.OPERATIONS):
        if operation == "add" and dtype != torch.float32:
            continue  # it has no gradients
        if run.out_of_time() and run.results.of_kind("block8 kernel"):
            run.skip(f"{operation} of {number} and {dtype}")
            continue
        load_block8_kernels({(run.device, dtype)}, number, block8.BLOCK, False)
        _measure_operation(run, operation, number, dtype, ceiling.median, flush)
    rows = run.results.of_kind("block8 kernel")
    if rows:
        title = f"Block8: µs on the device with cold caches, median of {rows[0]['rounds']} calls"
        run.out.print(block8.table(rows, title))


def _measure_operation(
    run: Run, operation: str, number: str, dtype: torch.dtype, ceiling_gb_per_s: float, flush: timing.CacheFlush
) -> None:
    rounds = 5 if run.quick else _ROUNDS
    coded = block8.Coded.make(0.1 if run.quick else _MEBIBYTES, number, dtype, run.device)
    wrong = block8.wrong_contestants(operation, number, dtype, run.device)
    calls = block8.calls(operation, coded)
    samples = dict(zip(calls, timing.time_calls(list(calls.values()), rounds, flush, run.device), strict=True))
    payload = coded.payload_bytes(operation)
    columns = compare(payload, {name: sample.device_seconds for name, sample in samples.items()})
    for row, sample in zip(columns, samples.values(), strict=True):
        run.results.add(
            "block8 kernel",
            operation=operation,
            number=number,
            block=block8.BLOCK,
            gradient_dtype=str(dtype).removeprefix("torch."),
            gradient_mib=round(coded.elements * dtype.itemsize / 2**20, 1),
            gradients=len(coded.gradients),
            payload_bytes=payload,
            rounds=rounds,
            **row,
            fraction_of_ceiling=row["gb_per_s"] / ceiling_gb_per_s,
            host_us=1e6 * statistics.median(sample.host_seconds),
            host_ahead=sample.host_ahead,
            result="WRONG" if row["contestant"] in wrong else "right",
        )
