"""Traces that profilers could have written, made of a few events: chrome traces and exports of Nsight Systems.

Times are ms. Both have the same methods, so a test can ask the same of both; each method returns the trace.
"""

from __future__ import annotations

import gzip
import json
import sqlite3
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Self, TypeVar

import pytest

from fastddp.tools.trace import files
from fastddp.tools.trace.analysis import analyse
from fastddp.tools.trace.ranks import RankView, view
from fastddp.tools.trace.recording import Recording
from fastddp.tools.trace.report import Report

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
FORWARD = "DistributedDataParallel.forward"
HOST, BACKWARD, LAUNCHER, GLOO = 1, 2, 3, 9  # threads
STREAM, OTHER_STREAM, NCCL_STREAM = 7, 8, 20


def bucket(what: str, index: int, of: int = 2, layer: str = "layer") -> str:
    return (
        f"fastddp.{what} bucket={index} of={of} collective=0 tick={index} bytes={4 << 20} "
        f"wire=float32 first={layer}{index}.bias last={layer}{index}.weight"
    )


def gradient(parameter: str, index: int) -> str:
    return f"fastddp.gradient parameter={parameter} bucket={index}"


Times = tuple[float | None, float, float]  # of the launch, if it was recorded, and of what it launched


class Trace(ABC):
    suffix: str

    def __init__(self) -> None:
        self._launched = 0

    @abstractmethod
    def range(self, start: float, end: float, name: str, thread: int = HOST) -> Self: ...
    @abstractmethod
    def on_device(self, kind: str, times: Times, name: str, stream: int, thread: int = HOST) -> Self: ...
    @abstractmethod
    def write(self, path: Path) -> Path: ...

    def operator(self, start: float, end: float, name: str = "aten::mm", thread: int = HOST) -> Self:
        return self.range(start, end, name, thread)

    def moment(self, time: float, name: str, thread: int = HOST) -> Self:
        return self.range(time, time, name, thread)

    def steps(self, *moments: float) -> Self:
        for moment in moments:
            self.moment(moment, "fastddp.step")
        return self

    def launch(
        self, time: float | None, start: float, end: float, name: str = "gemm", stream: int = STREAM, thread: int = HOST
    ) -> Self:
        """A kernel, and the host's call that launches it; None: that was before recording began."""
        return self.on_device("KERNEL", (time, start, end), name, stream, thread)

    def copy(self, time: float, start: float, end: float, stream: int = STREAM) -> Self:
        return self.on_device("MEMCPY", (time, start, end), "Memcpy HtoD", stream)

    def nccl(
        self, time: float, start: float, end: float, index: int | None = None, of: int = 1, name: str = NCCL
    ) -> Self:
        """A collective of NCCL's, launched in fastddp's range for the bucket if it is one's."""
        if index is not None:
            self.range(time - 0.25, time + 0.25, bucket("collective", index, of))
        return self.launch(time, start, end, name, NCCL_STREAM)


AnyTrace = TypeVar("AnyTrace", bound=Trace)


class ChromeTrace(Trace):
    suffix = ".json"

    def __init__(self, rank: int | None = 0, world_size: int = 1, host: str = "machine", base_ms: float = 5e6) -> None:
        super().__init__()
        self.header: dict[str, Any] = {"schemaVersion": 1, "host_name": host, "baseTimeNanoseconds": 1_790_000_000}
        if rank is not None:
            self.header["distributedInfo"] = {"backend": "gloo", "rank": rank, "world_size": world_size}
        self.events: list[dict[str, Any]] = []
        self._base = base_ms

    def event(self, category: str, name: str, start: float, end: float, thread: object, **arguments: object) -> Self:
        times = {"ts": (self._base + start) * 1e3, "dur": (end - start) * 1e3}
        known = {"ph": "X", "cat": category, "name": name, "pid": 100, "tid": thread}
        self.events.append({**known, **times, "args": arguments})
        return self

    def operator(self, start: float, end: float, name: str = "aten::mm", thread: int = HOST) -> Self:
        return self.event("cpu_op", name, start, end, thread)

    def range(self, start: float, end: float, name: str, thread: int = HOST) -> Self:
        return self.event("user_annotation", name, start, end, thread)

    def gloo(self, launch: float, start: float, end: float, index: int | None, name: str = "all_reduce") -> Self:
        """A collective of gloo's, and its launch, in fastddp's range for the bucket if it is one's."""
        if index is not None:
            self.range(launch - 0.25, launch + 0.25, bucket("collective", index), LAUNCHER)
        self.operator(launch, launch + 0.125, f"c10d::{name.replace('_', '')}_", LAUNCHER)
        return self.range(start, end, f"gloo:{name}", GLOO)

    def on_device(self, kind: str, times: Times, name: str, stream: int, thread: int = HOST) -> Self:
        self._launched, (time, start, end) = self._launched + 1, times
        if time is not None:
            self.event("cuda_runtime", "cudaLaunchKernel", time, time, thread, correlation=self._launched)
        category = {"KERNEL": "kernel", "MEMCPY": "gpu_memcpy"}[kind]
        return self.event(category, name, start, end, stream, device=0, stream=stream, correlation=self._launched)

    def noting(self, **arguments: object) -> Self:
        """Of the last event, what torch notes there: ``Collective_name`` is noted as "Collective name"."""
        self.events[-1]["args"] |= {name.replace("_", " "): value for name, value in arguments.items()}
        return self

    def without(self, name: str) -> Self:
        self.events = [event for event in self.events if not event["name"].startswith(name)]
        return self

    def text(self) -> str:
        return json.dumps(self.header | {"traceEvents": self.events})

    def write(self, path: Path) -> Path:
        data = self.text().encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path


def small(steps: int = 3) -> ChromeTrace:
    """Steps of 100 ms, of which 40 compute and 29 send, 19 of these hidden."""
    trace = ChromeTrace(rank=1, world_size=2)
    for step in range(steps):
        t = 100 * step
        trace.steps(t).operator(t + 10, t + 50).gloo(t + 30, t + 31, t + 60, 0)
    return trace


class NsightExport(Trace):
    """What ``nsys export --type sqlite`` writes; ``without``: a column that older versions did not.

    A table is there only if it has rows.
    """

    suffix = ".sqlite"

    def __init__(self, process: int = 100, without: str = "") -> None:
        super().__init__()
        self.process = process
        self._without = without
        self.tables: dict[str, list[dict[str, object]]] = {}
        self._strings: dict[str, int] = {}
        self.row("NVTX_EVENTS", start=0, eventType=75, text="fastddp", globalTid=self.thread(HOST), domainId=1)

    def row(self, table: str, **values: object) -> Self:
        self.tables.setdefault(table, []).append(values)
        return self

    def thread(self, thread: int) -> int:
        return (1 << 48) | (self.process << 24) | thread

    def _string(self, text: str) -> int:
        return self._strings.setdefault(text, len(self._strings) + 1)

    def range(self, start: float, end: float | None, name: str, thread: int = HOST) -> Self:
        """Steps and windows are started and ended: they may lie across ranges that are pushed and popped."""
        times = {"start": _ns(start), "end": None if end is None else _ns(end)}
        kind = 60 if name in ("fastddp.step", "fastddp.window") else 59
        text = {"text": name} if self._without == "textId" else {"textId": self._string(name)}
        return self.row("NVTX_EVENTS", **times, **text, eventType=kind, globalTid=self.thread(thread), domainId=1)

    def on_device(self, kind: str, times: Times, name: str, stream: int, thread: int = HOST) -> Self:
        self._launched, (time, start, end) = self._launched + 1, times
        known = {"correlationId": self._launched, "globalTid": self.thread(thread)}
        if time is not None:
            self.row("CUPTI_ACTIVITY_KIND_RUNTIME", start=_ns(time), end=_ns(time), **known)
        known = {"correlationId": self._launched, "globalPid": self.thread(0), "deviceId": 0, "streamId": stream}
        names = {"demangledName": self._string(name), "shortName": self._string(name[:30])} if kind == "KERNEL" else {}
        return self.row(f"CUPTI_ACTIVITY_KIND_{kind}", start=_ns(start), end=_ns(end), **known, **names)

    def graph(self, time: float, start: float, end: float) -> Self:
        """It was recorded as a whole."""
        return self.on_device("GRAPH_TRACE", (time, start, end), "", STREAM)

    def write(self, path: Path) -> Path:
        strings = [{"id": number, "value": text} for text, number in self._strings.items()]
        path.unlink(missing_ok=True)
        with sqlite3.connect(path) as database:
            for table, rows in {**self.tables, "StringIds": strings + self.tables.get("StringIds", [])}.items():
                columns = [*dict.fromkeys(name for row in rows for name in row if name != self._without)]
                database.execute(f"CREATE TABLE {table} ({', '.join(columns)})")
                marks = ", ".join("?" * len(columns))
                values = [[row.get(column) for column in columns] for row in rows]
                database.executemany(f"INSERT INTO {table} VALUES ({marks})", values)
        database.close()
        return path


def _ns(milliseconds: float) -> int:
    return round(milliseconds * 1e6)


BOTH_RECORDERS = pytest.mark.parametrize("recorder", [ChromeTrace, NsightExport], ids=["torch.profiler", "nsight"])


# ------------------------------------------------------------------------------------------ what fastddp says of them


def recordings(folder: Path, *traces: Trace, step_range: str | None = None) -> list[Recording]:
    paths = [trace.write(folder / f"{number}{trace.suffix}") for number, trace in enumerate(traces)]
    return [found for path in paths for found in files.read(path, step_range=step_range)]


def seen(folder: Path, trace: Trace) -> RankView:
    (recording,) = recordings(folder, trace)
    return view(0, recording)


def report(folder: Path, *traces: Trace, step_range: str | None = None) -> Report:
    return analyse(recordings(folder, *traces, step_range=step_range), "run", step_range=step_range)


def collectives(recording: Recording) -> list[tuple[float, int | None]]:
    """Start, from the first event, and bucket of each, by start."""
    activities = recording.activities
    found = []
    for i in activities.of("collective").nonzero()[0]:
        place = int(activities.range[i])
        name = recording.ranges[place].name if place >= 0 else None
        found.append((round(float(activities.start[i]), 6), name.bucket if name else None))
    return sorted(found)
