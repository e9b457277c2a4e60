"""What adds up shards of 16 bits on the GPU, against torch's operators and a plain copy of as many bytes."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from bench.gpu import ceilings, timing
from bench.gpu.results import Run
from bench.kernels import compare
from fastddp import _C

_MEBIBYTES = 12.5  # a wire of 16 bits of a bucket of 25 MiB
_RANKS = (2, 8)
_ROUNDS = 30


def calls(shards: Tensor, target: Tensor) -> dict[str, Callable[[], object]]:
    """By contestant."""
    flat = torch.empty((shards.nbytes + target.nbytes) // 2, dtype=torch.uint8, device=shards.device)
    source = torch.empty_like(flat)
    return {
        "copy_": lambda: flat.copy_(source),
        "operators": lambda: target.copy_(shards.sum(0, dtype=torch.float32)),
        "fastddp": lambda: _C.sum_shards(shards, target),
    }


def measure(run: Run) -> None:
    """Adds a row for each dtype, number of ranks and contestant."""
    from fastddp.kernels.sum_shards_reference import sum_shards

    from fastddp.exchange.launching import load_sum_kernels

    ceiling = ceilings.copy_gb_per_s(run.device, 5 if run.quick else 30, 2**24 if run.quick else 2**30)
    flush = timing.CacheFlush(run.device)
    for dtype, ranks in itertools.product((torch.bfloat16, torch.float16), _RANKS):
        if run.out_of_time() and run.results.of_kind("shards kernel"):
            run.skip(f"the sum of shards of {dtype} from {ranks} ranks")
            continue
        load_sum_kernels([run.device], dtype)
        elements = int((0.1 if run.quick else _MEBIBYTES) * 2**20) // dtype.itemsize // ranks // 8 * 8
        shards = timing.random_tensor(ranks * elements, dtype, run.device).view(ranks, elements)
        target = torch.empty_like(shards[0])
        _C.sum_shards(shards, target)
        result = "right" if torch.equal(target, sum_shards(shards)) else "WRONG"
        by_name = calls(shards, target)
        rounds = 5 if run.quick else _ROUNDS
        samples = timing.time_calls(list(by_name.values()), rounds, flush, run.device)
        payload = shards.nbytes + target.nbytes
        seconds = {name: sample.device_seconds for name, sample in zip(by_name, samples, strict=True)}
        for row, sample in zip(compare(payload, seconds), samples, strict=True):
            run.results.add(
                "shards kernel",
                operation="sum_shards",
                wire_dtype=str(dtype).removeprefix("torch."),
                world_size=ranks,
                payload_bytes=payload,
                rounds=rounds,
                **row,
                fraction_of_ceiling=row["gb_per_s"] / ceiling.median,
                host_us=1e6 * statistics.median(sample.host_seconds),
                host_ahead=sample.host_ahead,
                result=result if row["contestant"] == "fastddp" else "right",
            )
