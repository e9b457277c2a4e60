"""PowerSGD's kernels on the GPU, against torch's operators and a plain copy of as many bytes, with cold caches."""

from __future__ import annotations

import itertools
import statistics

import torch

from bench import low_rank
from bench.gpu import ceilings, timing
from bench.gpu.results import Run
from bench.kernels import compare, low_rank_table

_ROUNDS = 30


def measure(run: Run) -> None:
    """Adds a row for each operation, dtype, rank and contestant."""
    from fastddp.exchange.launching import load_low_rank_kernels

    ceiling = ceilings.copy_gb_per_s(run.device, 5 if run.quick else 30, 2**24 if run.quick else 2**30)
    flush = timing.CacheFlush(run.device)
    for operation, dtype, rank in itertools.product(low_rank.OPERATIONS, low_rank.DTYPES, low_rank.RANKS):
        if operation == "orthogonalise" and dtype != torch.float32:
            continue  # P is fp32 whatever the gradients are
        if run.out_of_time():
            run.skip(f"{operation} of {dtype}, rank {rank}")
            continue
        load_low_rank_kernels({(run.device, dtype)}, rank)
        _measure_operation(run, operation, dtype, rank, ceiling.median, flush)
    rows = [row | {"direction": row["operation"]} for row in run.results.of_kind("low-rank kernel")]
    if rows:
        run.out.print(low_rank_table(rows))


def _measure_operation(
    run: Run, operation: str, dtype: torch.dtype, rank: int, ceiling_gb_per_s: float, flush: timing.CacheFlush
) -> None:
    rounds = 5 if run.quick else _ROUNDS
    # 48 matrices are GPT-2's; what a bucket of 25 MiB has is nearer to 4.
    blocks = 1 if run.quick else 12 if operation == "orthogonalise" else 4
    matrices = low_rank.Matrices.make(blocks, rank, dtype, run.device)
    wrong = low_rank.wrong_contestants(operation, rank, dtype, run.device)
    calls = low_rank.calls(operation, matrices)
    samples = dict(zip(calls, timing.time_calls(list(calls.values()), rounds, flush, run.device), strict=True))
    payload = matrices.payload_bytes(operation)
    columns = compare(payload, {name: sample.device_seconds for name, sample in samples.items()})
    for row, sample in zip(columns, samples.values(), strict=True):
        run.results.add(
            "low-rank kernel",
            operation=operation,
            gradient_dtype=str(dtype).removeprefix("torch."),
            rank=rank,
            gradient_mib=round(matrices.elements * dtype.itemsize / 2**20, 1),
            gradients=len(matrices.gradients),
            payload_bytes=payload,
            rounds=rounds,
            **row,
            fraction_of_ceiling=row["gb_per_s"] / ceiling_gb_per_s,
            host_us=1e6 * statistics.median(sample.host_seconds),
            host_ahead=sample.host_ahead,
            result="WRONG" if row["contestant"] in wrong else "right",
        )
