"""Traces that profilers could have written, made of a few events: chrome traces and exports of Nsight Systems.

Times are ms. Both have the same methods, so a test can ask the same of both.
"""

from __future__ import annotations

import gzip
import json
import sqlite3
from pathlib import Path
from typing import Any

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
HOST, BACKWARD, LAUNCHER, GLOO = 1, 2, 3, 9  # threads
STREAM, NCCL_STREAM = 7, 20


def bucket(what: str, index: int, of: int = 2, size: int = 4 << 20, collective: int = 0) -> str:
    """The name of what happens to a bucket."""
    return (
        f"fastddp.{what} bucket={index} of={of} collective={collective} tick={index + collective} bytes={size} "
        f"wire=float32 first=layer{index}.bias last=layer{index}.weight"
    )


def gradient(parameter: str, index: int) -> str:
    return f"fastddp.gradient parameter={parameter} bucket={index}"


class ChromeTrace:
    """What torch.profiler writes."""

    def __init__(self, rank: int | None = 0, world_size: int = 1, host: str = "machine", base_ms: float = 5e6) -> None:
        self.header: dict[str, Any] = {"schemaVersion": 1, "host_name": host, "baseTimeNanoseconds": 1_790_000_000}
        if rank is not None:
            self.header["distributedInfo"] = {"backend": "gloo", "rank": rank, "world_size": world_size}
        self.events: list[dict[str, Any]] = []
        self._base = base_ms

    def event(self, category: str, name: str, start: float, end: float, thread: object, **arguments: object) -> None:
        times = {"ts": (self._base + start) * 1e3, "dur": (end - start) * 1e3}
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 100, "tid": thread, **times, "args": arguments}
        )

    def operator(self, start: float, end: float, name: str = "aten::mm", thread: int = HOST) -> None:
        self.event("cpu_op", name, start, end, thread)

    def range(self, start: float, end: float, name: str, thread: int = HOST) -> None:
        self.event("user_annotation", name, start, end, thread)

    def moment(self, time: float, name: str, thread: int = HOST) -> None:
        self.range(time, time, name, thread)

    def gloo(self, launch: float, start: float, end: float, index: int | None, name: str = "all_reduce") -> None:
        """A collective of gloo's, and its launch, in fastddp's range for the bucket if it is one's."""
        if index is not None:
            self.range(launch - 0.25, launch + 0.25, bucket("collective", index), LAUNCHER)
        self.operator(launch, launch + 0.125, f"c10d::{name.replace('_', '')}_", LAUNCHER)
        self.event("user_annotation", f"gloo:{name}", start, end, GLOO)

    def call(self, time: float, correlation: int, thread: int = HOST) -> None:
        self.event("cuda_runtime", "cudaLaunchKernel", time, time, thread, correlation=correlation)

    def kernel(
        self, start: float, end: float, correlation: int, name: str = "gemm", stream: int = STREAM, **arguments: object
    ) -> None:
        where = {"device": 0, "stream": stream, "correlation": correlation}
        self.event("kernel", name, start, end, stream, **where, **arguments)

    def copy(self, start: float, end: float, correlation: int) -> None:
        self.event("gpu_memcpy", "Memcpy HtoD", start, end, STREAM, device=0, stream=STREAM, correlation=correlation)

    def text(self) -> str:
        return json.dumps(self.header | {"traceEvents": self.events})

    def write(self, path: Path) -> Path:
        data = self.text().encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path


SCHEMA = {
    "StringIds": "id INTEGER PRIMARY KEY, value TEXT",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER, streamId INTEGER, "
    "correlationId INTEGER, globalPid INTEGER, demangledName INTEGER, shortName INTEGER, mangledName INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, "
    "correlationId INTEGER, globalPid INTEGER, bytes INTEGER, copyKind INTEGER",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER, end INTEGER, eventClass INTEGER, globalTid INTEGER, "
    "correlationId INTEGER, nameId INTEGER, returnValue INTEGER",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "start INTEGER, end INTEGER, deviceId INTEGER, graphId INTEGER, "
    "streamId INTEGER, correlationId INTEGER, globalPid INTEGER",
    "NVTX_EVENTS": "start INTEGER, end INTEGER, eventType INTEGER, text TEXT, textId INTEGER, globalTid INTEGER, "
    "domainId INTEGER, jsonTextId INTEGER, jsonText TEXT, binaryData BLOB",
    "NVTX_PAYLOAD_SCHEMA_ENTRIES": "domainId INTEGER, schemaId INTEGER, idx INTEGER, name TEXT, offset INTEGER",
    "TARGET_INFO_SYSTEM_ENV": "globalVid INTEGER, name TEXT, nameEnum INTEGER, value TEXT",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs INTEGER",
}


class NsightExport:
    """What ``nsys export --type sqlite`` writes; ``without``: columns that older versions did not."""

    def __init__(self, process: int = 100, without: tuple[str, ...] = ()) -> None:
        self.process = process
        self._without = without
        self._rows: dict[str, list[dict[str, object]]] = {}
        self._strings: dict[str, int] = {}
        self.row(
            "NVTX_EVENTS", start=0, end=None, eventType=75, text="fastddp", globalTid=self._thread(HOST), domainId=1
        )

    def row(self, table: str, **values: object) -> None:
        self._rows.setdefault(table, []).append(values)

    def _thread(self, thread: int) -> int:
        return (1 << 48) | (self.process << 24) | thread

    def _string(self, text: str) -> int:
        return self._strings.setdefault(text, len(self._strings) + 1)

    def range(self, start: float, end: float | None, name: str, thread: int = HOST, event_type: int = 59) -> None:
        self.row(
            "NVTX_EVENTS", start=_ns(start), end=None if end is None else _ns(end), eventType=event_type,
            textId=self._string(name), globalTid=self._thread(thread), domainId=1,
        )  # fmt: skip

    def span(self, start: float, end: float | None, name: str, thread: int = HOST) -> None:
        """A range that is started and ended: it may lie across those that are pushed and popped."""
        self.range(start, end, name, thread, event_type=60)

    def moment(self, time: float, name: str, thread: int = HOST) -> None:
        is_span = name in ("fastddp.step", "fastddp.window")
        self.range(time, time, name, thread, 60 if is_span else 59)

    def call(self, time: float, correlation: int, thread: int = HOST) -> None:
        self.row(
            "CUPTI_ACTIVITY_KIND_RUNTIME", start=_ns(time), end=_ns(time), globalTid=self._thread(thread),
            correlationId=correlation, nameId=self._string("cudaLaunchKernel_v7000"),
        )  # fmt: skip

    def _on_device(self, start: float, end: float, correlation: int, stream: int) -> dict[str, object]:
        times = {"start": _ns(start), "end": _ns(end), "deviceId": 0, "streamId": stream}
        return {**times, "correlationId": correlation, "globalPid": self._thread(0)}

    def kernel(self, start: float, end: float, correlation: int, name: str = "gemm", stream: int = STREAM) -> None:
        where = self._on_device(start, end, correlation, stream)
        self.row("CUPTI_ACTIVITY_KIND_KERNEL", **where, demangledName=self._string(name))

    def copy(self, start: float, end: float, correlation: int) -> None:
        self.row("CUPTI_ACTIVITY_KIND_MEMCPY", **self._on_device(start, end, correlation, STREAM), copyKind=1)

    def graph(self, start: float, end: float, correlation: int) -> None:
        """A CUDA graph that was recorded as a whole."""
        self.row("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", **self._on_device(start, end, correlation, STREAM), graphId=1)

    def write(self, path: Path) -> Path:
        strings = [{"id": number, "value": text} for text, number in self._strings.items()]
        with sqlite3.connect(path) as database:
            for table, rows in {**self._rows, "StringIds": strings}.items():
                columns = [column.split()[0] for column in SCHEMA[table].split(", ")]
                columns = [column for column in columns if column not in self._without]
                database.execute(f"CREATE TABLE {table} ({', '.join(columns)})")
                marks = ", ".join("?" * len(columns))
                values = [[row.get(column) for column in columns] for row in rows]
                database.executemany(f"INSERT INTO {table} VALUES ({marks})", values)
        database.close()
        return path


def _ns(milliseconds: float) -> int:
    return round(milliseconds * 1e6)
