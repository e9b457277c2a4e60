"""Traces of real steps: ``record`` runs on each rank; ``python tests/support/trace_recording.py`` renews tests/data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastddp
from hooks_by_name import register
from ranks import RankPool
from repository import TESTS

DATA = TESTS / "data"
STEPS = 4


def record(rank: int, folder: Path, how: str = "none") -> Path:
    """Three layers of 256 KiB, a bucket each; recorded after buckets have been rebuilt. Returns the file.

    ``how``: fastddp's hook; "sharded": its sharded optimizer, which gathers in its step; "torch": torch's DDP;
    "compiled": by torch.compile.
    """
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(3)])
    kind = DistributedDataParallel if how == "torch" else fastddp.DistributedDataParallel
    model = kind(layers, bucket_cap_mb=0.2)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.01)
    if how == "sharded":
        optimizer = fastddp.ShardedOptimizer(model, torch.optim.SGD, lr=0.01, gather="step")
    elif how == "compiled":
        model.compile(backend="aot_eager")
    elif how != "torch":
        register(model, how)

    def step() -> None:
        model(torch.ones(256, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(STEPS + 1):  # the last has no end in the trace
            step()
    path = folder / f"rank{rank}.json.gz"
    profile.export_chrome_trace(str(path))
    return path


if __name__ == "__main__":
    from trace_recording import record as record_by_name  # what is pickled has to be found by its module

    pool = RankPool()
    (DATA / "fastddp").mkdir(parents=True, exist_ok=True)
    pool.run(record_by_name, 2, DATA / "fastddp")
    pool.stop()
