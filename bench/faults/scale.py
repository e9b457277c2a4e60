"""A report about many ranks: one that is real, and records of the others in a real store.

The real rank trains over torch's "fake" group, whose collectives end at once and which may be as large as one likes.
Its communication hook then returns a future that nobody completes, and so the rank waits, as it would for others.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

import fastddp
from bench import harness
from fastddp.watch.stalls import stall_key

STEPS = 20
LIMIT = 60.0  # seconds, which guard against a report that never comes


@dataclass
class Scale:
    """What a report took."""

    ranks: int
    keys_in_healthy_steps: int
    keys_in_report: int  # of the records too
    seconds: float  # from the reporter's claim to the report in the store
    report: Any  # a fastddp.StallReport


def measure(ranks: int, culprit: int, patience: float = 1.0) -> Scale:
    """A report over so many ranks; in a process that belongs to no group. `culprit` is in forward, the others wait."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    reader = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    dist.init_process_group("fake", store=server, rank=0, world_size=ranks)
    try:
        return _measure(reader, ranks, culprit, patience)
    finally:
        dist.destroy_process_group()


def row(ranks: int) -> dict[str, Any]:
    """What the bench keeps."""
    measured = measure(ranks, culprit=ranks // 2)
    facts = {name: value for name, value in vars(measured).items() if name != "report"}
    findings = [(finding.cause, list(finding.ranks)) for finding in measured.report.causes]
    said = {"findings": findings, "said": measured.report.message}
    return {"fault": "scale", "implementation": "fastddp"} | harness.rounded(facts, 3) | said


def _measure(reader: dist.Store, ranks: int, culprit: int, patience: float) -> Scale:
    reports: list[Any] = []
    model = fastddp.DistributedDataParallel(
        nn.Linear(8, 8), init_sync=False, watch=fastddp.Watch(stall=reports.append, patience=patience)
    )
    hook = _Hook()
    model.register_comm_hook(hook, _Hook.average)
    model(torch.ones(1, 8)).sum().backward()
    before = reader.num_keys()
    for _ in range(STEPS):
        model(torch.ones(1, 8)).sum().backward()
    healthy = reader.num_keys() - before
    store = dist.distributed_c10d._get_process_group_store(model.process_group)
    key = stall_key(model.engine.now)
    hook.completes = False
    output = model(torch.ones(1, 8)).sum()
    backward = threading.Thread(target=output.backward, daemon=True)
    backward.start()
    for rank in range(1, ranks):
        store.set(f"{key}/{rank}", record(rank, ranks, STEPS + 1, waits=rank != culprit))
    claim, end = f"{key}/claims/{STEPS + 1}", f"{key}/report/{STEPS + 1}"
    claimed = _when(lambda: store.check([claim]))
    seconds = _when(lambda: store.check([end])) - claimed
    keys = reader.num_keys() - before
    _when(lambda: bool(reports))
    hook.complete()
    backward.join()
    return Scale(ranks, healthy, keys, seconds, reports[0])


def _when(holds: Callable[[], bool]) -> float:
    """The moment in which it holds for the first time."""
    until = time.monotonic() + LIMIT
    while not holds():
        if time.monotonic() > until:
            raise TimeoutError("there was no report")
        time.sleep(0.002)
    return time.monotonic()


class _Hook:
    def __init__(self) -> None:
        self.completes = True
        self._waiting: list[tuple[torch.futures.Future[Tensor], Tensor]] = []

    def average(self, bucket: Any) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        if self.completes:
            future.set_result(bucket.buffer())
        else:
            self._waiting.append((future, bucket.buffer()))
        return future

    def complete(self) -> None:
        for future, buffer in self._waiting:
            future.set_result(buffer)


def record(rank: int, ranks: int, windows: int, waits: bool) -> str:
    """What a rank writes that is no process: it waits for the only bucket, or is in forward."""
    fields = {
        "rank": rank,
        "ranks": ranks,
        "host": f"node{rank // 8}",
        "pid": os.getpid(),
        "life": "runs",
        "written": int(time.time() * 1000),
        "doing": "finish" if waits else "forward",
        "seconds": 2.0,
        "still": 2.0,
        "windows": windows,
        "buckets": 1,
        "bytes": 288,
        "stack": "train.py:1 main: model(batch)",
    }
    if waits:
        fields["bucket"] = 0
    return "\n".join(["fastddp 1", *(f"{key} {value}" for key, value in fields.items())]) + "\n"
