"""Traces of real steps: ``record`` runs on each rank; ``python tests/support/trace_recording.py`` renews tests/data.

``trace_recording.py nsight step.sqlite FOLDER`` renews tests/data/nsight: from an export of Nsight Systems, and the
folder of torch.profiler's traces, of one run of ``bench.gpu.profiled --device cpu --case gpt-tiny --bucket-cap-mb 1``.
"""

from __future__ import annotations

import gzip
import json
import sqlite3
import sys
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


FORWARD = "DistributedDataParallel.forward"


def thin_nsight(source: Path, skipped: int) -> None:
    """Of an export, only fastddp's ranges, without those of the first steps: the rest names processes and variables."""
    target = DATA / "nsight" / "step.sqlite"
    target.unlink(missing_ok=True)
    kept = "start, end, eventType, text, textId, globalTid, domainId"
    with sqlite3.connect(target) as database:
        database.execute("ATTACH ? AS whole", (str(source),))
        database.execute(f"CREATE TABLE NVTX_EVENTS AS SELECT {kept} FROM whole.NVTX_EVENTS WHERE FALSE")
        database.execute(
            "CREATE TABLE TARGET_INFO_SESSION_START_TIME AS SELECT * FROM whole.TARGET_INFO_SESSION_START_TIME"
        )
        begun = "SELECT start, globalTid FROM whole.NVTX_EVENTS WHERE text = ? ORDER BY start"
        forwards: dict[int, list[int]] = {}
        for start, thread in database.execute(begun, (FORWARD,)).fetchall():
            forwards.setdefault(thread >> 24, []).append(start)
        for process, starts in forwards.items():
            rows = "FROM whole.NVTX_EVENTS WHERE globalTid >> 24 = ? AND start >= ? AND end IS NOT NULL"
            database.execute(f"INSERT INTO NVTX_EVENTS SELECT {kept} {rows}", (process, starts[skipped]))
    database.close()


def thin_chrome(source: Path) -> None:
    """Of a trace of torch.profiler, fastddp's ranges and the collectives."""
    trace = json.loads(gzip.decompress(source.read_bytes()))
    starts = ("fastddp.", "gloo:", "c10d::", FORWARD)
    events = [one for one in trace["traceEvents"] if one.get("ph") == "X" and one["name"].startswith(starts)]
    events = [{key: one[key] for key in ("ph", "cat", "name", "pid", "tid", "ts", "dur")} for one in events]
    known = {key: trace[key] for key in ("schemaVersion", "distributedInfo", "baseTimeNanoseconds")}
    thinned = json.dumps(known | {"host_name": "machine", "traceEvents": events}).encode()
    (DATA / "nsight" / "torch" / source.name).write_bytes(gzip.compress(thinned, mtime=0))


if __name__ == "__main__" and sys.argv[1:2] == ["nsight"]:
    (DATA / "nsight" / "torch").mkdir(parents=True, exist_ok=True)
    thin_nsight(Path(sys.argv[2]), skipped=3)
    for path in Path(sys.argv[3]).glob("rank*.json.gz"):
        thin_chrome(path)
elif __name__ == "__main__":
    from trace_recording import record as record_by_name  # what is pickled has to be found by its module

    pool = RankPool()
    (DATA / "fastddp").mkdir(parents=True, exist_ok=True)
    pool.run(record_by_name, 2, DATA / "fastddp")
    pool.stop()
