"""Nsight Systems' traces: its export to SQLite, read row by row, into one recording a process.

Tables: CUPTI_ACTIVITY_KIND_KERNEL, _MEMCPY, _MEMSET, _GRAPH_TRACE and _RUNTIME, NVTX_EVENTS, StringIds; times are ns. A
table is there only if it has rows, and older versions export fewer columns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
import sqlite3
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

from fastddp.tools.trace import names
from fastddp.tools.trace.collectives import Collective, is_collective_kernel, operation_of, wire_of
from fastddp.tools.trace.nsight_nccl import SCHEMAS, Calls, payload_of, schemas_of
from fastddp.tools.trace.recording import NONE, Builder, Kind, Recording, TraceError
from fastddp.tools.trace.wording import plural

SQLITE = b"SQLite format 3\0"
KERNELS, RUNTIME, NVTX = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
COPIES = {"CUPTI_ACTIVITY_KIND_MEMCPY": "memcpy", "CUPTI_ACTIVITY_KIND_MEMSET": "memset"}
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
TABLES = (KERNELS, NVTX, RUNTIME, *COPIES, GRAPHS)
RANGES = (59, 60)  # NVTX_EVENTS.eventType: pushed and popped, started and ended
THREAD = 0xFFFFFF  # of a globalTid; the rest is its process's globalPid
TIMES = ("start", "end")
NAMES = ("demangledName", "shortName")
WHERE = (*TIMES, "deviceId", "streamId", "correlationId", "globalPid")
# What torch.autograd.profiler.emit_nvtx() adds to the names of operators and annotations.
ADDED = re.compile(r"(?:, seq = -?\d+)?, op_id = \d+.*", re.DOTALL)
AGAIN = "Profile again with --cuda-graph-trace=node."
COMPUTES = (names.FORWARD, f"{names.PREFIX}window")  # on a host, outside of launches and waits
NO_GPU = "has nothing that a GPU did. Profile with: nsys profile --trace=cuda,nvtx python train.py"
ONLY_HOST = "has nothing that a GPU did: all times are of the host, where backward counts from its first gradient."


def read(path: Path, step_range: str | None = None) -> list[Recording]:
    """A recording of each process that a GPU worked for, or else fastddp; TraceError: no good export, or no process."""
    try:
        with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            # Names of a script's ranges need not be UTF-8.
            database.text_factory = lambda data: data.decode("utf-8", "replace")
            return _Reader(path, database, step_range).read()
    except sqlite3.Error as error:
        raise TraceError(
            f"{path} is no complete export of Nsight Systems ({error}). Export the report again: "
            "nsys export --type sqlite --force-overwrite true REPORT.nsys-rep"
        ) from None


def read_report(path: Path, step_range: str | None = None) -> list[Recording]:
    """As :func:`read`, for a report, which is exported first; TraceError: nsys is not installed, or fails."""
    nsys = shutil.which("nsys")
    if nsys is None:
        raise TraceError(
            f"{path} has to be exported, and nsys is not on PATH here. Where it is, run\n"
            f"    nsys export --type sqlite {path}\nand give the .sqlite file."
        )
    with tempfile.TemporaryDirectory(prefix="fastddp-trace-") as folder:
        target = Path(folder) / f"{path.stem}.sqlite"
        command = [nsys, "export", "--type", "sqlite", "--output", str(target), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not target.exists():
            raise TraceError(f"{path}: {' '.join(command)} failed:\n{(done.stderr or done.stdout).strip()}")
        return [dataclasses.replace(recording, source=str(path)) for recording in read(target, step_range)]


class _Reader:
    def __init__(self, path: Path, database: sqlite3.Connection, step_range: str | None) -> None:
        self._path = path
        self._marks = names.marks(step_range)
        self._database = database
        tables = database.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
        self._columns = {
            name: {row[1] for row in database.execute(f'PRAGMA table_info("{name}")')} for (name,) in tables.fetchall()
        }
        self._strings: dict[int, str] = {}
        self._builders: dict[int, Builder] = {}
        self._calls = Calls()
        self._collectives: dict[Hashable, tuple[Collective, int]] = {}  # by process and correlation
        self._graphs: Counter[Builder] = Counter()  # launches of CUDA graphs
        self._marked: set[Builder] = set()  # by fastddp itself
        self._unreadable = 0  # rows
        self._origin = 0

    def read(self) -> list[Recording]:
        if not self._columns.keys() & set(TABLES):
            raise TraceError(
                f"{self._path} is an SQLite file, but no export of Nsight Systems: it has none of the tables "
                f"{KERNELS}, {RUNTIME}, {NVTX}."
            )
        texts = self._rows("StringIds", "id", "value")
        self._strings = {row["id"]: row["value"] for row in texts if isinstance(row["value"], str)}
        with_times = [table for table in TABLES if "start" in self._columns.get(table, set())]
        firsts = [self._database.execute(f'SELECT MIN(start) FROM "{table}"').fetchone()[0] for table in with_times]
        self._origin = min((first for first in firsts if isinstance(first, int)), default=0)
        self._read_host()
        self._collectives = self._calls.resolved()
        self._read_device()
        is_all_unknown = not any(builder.on_device for builder in self._builders.values())
        self._read_graphs()
        if self._graphs and is_all_unknown:
            raise TraceError(
                f"{self._path} has nothing that a GPU did but CUDA graphs that were recorded as a whole: what is "
                f"computed and sent in them is not known. {AGAIN}"
            )
        found = {process: builder for process, builder in self._builders.items() if builder.on_device}
        found = found or {process: builder for process, builder in self._builders.items() if builder in self._marked}
        if not found:
            raise TraceError(f"{self._path} {NO_GPU}")
        return [self._finish(builder) for _, builder in sorted(found.items())]

    def _rows(self, table: str, *columns: str, whole: tuple[str, ...] = ()) -> Iterator[dict[str, Any]]:
        """A dict a row; columns that this export lacks are None. Rows without numbers in ``whole`` are left out."""
        present = [column for column in columns if column in self._columns.get(table, set())]
        if not present:
            return
        missing = dict.fromkeys(columns)
        quoted = ", ".join(f'"{column}"' for column in present)
        for row in self._database.execute(f'SELECT {quoted} FROM "{table}"'):
            values = missing | dict(zip(present, row, strict=True))
            if all(isinstance(values[column], int) for column in whole):
                yield values
            else:
                self._unreadable += 1

    def _time(self, nanoseconds: int) -> float:
        return (nanoseconds - self._origin) / 1e6

    def _builder(self, process: int) -> Builder:
        return self._builders.setdefault(process, Builder())

    # ----------------------------------------------------------------------------------------------------- the host

    def _read_host(self) -> None:
        columns = ("globalPid", "correlationId", *NAMES)
        kernels = self._rows(KERNELS, *columns)
        of_nccl = {self._key(row) for row in kernels if is_collective_kernel(self._name_of(row))}
        for row in self._rows(RUNTIME, "start", "globalTid", "correlationId", whole=("start",)):
            if not isinstance(row["correlationId"], int) or not isinstance(row["globalTid"], int):
                continue
            builder, lane = self._thread(row["globalTid"])
            builder.add_launch(row["correlationId"], lane, self._time(row["start"]))
            key = (row["globalTid"] & ~THREAD, row["correlationId"])
            if key in of_nccl or (None, row["correlationId"]) in of_nccl:
                self._calls.add_launch(row["globalTid"], row["start"], key)
        self._read_ranges()

    def _read_ranges(self) -> None:
        schemas = schemas_of(self._rows(SCHEMAS, "domainId", "schemaId", "name", "offset"))
        from_torch: defaultdict[Builder, list[tuple[int, float, float, str]]] = defaultdict(list)
        columns = ("start", "end", "eventType", "text", "textId", "globalTid", "jsonText", "jsonTextId", "binaryData")
        for row in self._rows(NVTX, *columns):
            text = row["text"] or self._strings.get(row["textId"], "")
            if row["eventType"] not in RANGES or not isinstance(text, str):
                continue
            if not text.startswith(("nccl", *self._marks)):
                continue
            if not isinstance(row["start"], int) or not isinstance(row["globalTid"], int):
                self._unreadable += 1
                continue
            if text.startswith("nccl"):
                json_text = row["jsonText"] or self._strings.get(row["jsonTextId"])
                payload = payload_of(json_text, row["binaryData"], schemas)
                self._calls.add(row["globalTid"], row["start"], text, payload)
            if not text.startswith(self._marks):
                continue
            builder, lane = self._thread(row["globalTid"])
            end = row["end"] if isinstance(row["end"], int) else row["start"]  # it was open when recording ended
            plain = ADDED.sub("", text)
            range_ = (lane, self._time(row["start"]), self._time(end), plain)
            if plain != text and plain.startswith(names.PREFIX):
                from_torch[builder].append(range_)
                continue
            if plain.startswith(names.PREFIX):
                self._marked.add(builder)
            builder.add_range(*range_)
            if plain.startswith(COMPUTES):
                builder.add_operator(*range_)
        # fastddp itself gives its names to tools: torch's repetitions would count twice.
        for builder in from_torch.keys() - self._marked:
            for range_ in from_torch[builder]:
                builder.add_range(*range_)

    def _thread(self, global_tid: int) -> tuple[Builder, int]:
        builder = self._builder(global_tid & ~THREAD)
        return builder, builder.lane(("thread", global_tid), f"thread {global_tid & THREAD}")

    # --------------------------------------------------------------------------------------------------- the device

    def _name_of(self, kernel: dict[str, Any]) -> str:
        return next(filter(None, (self._strings.get(kernel[column]) for column in NAMES)), "kernel")

    @staticmethod
    def _key(row: dict[str, Any]) -> tuple[int | None, object]:
        process = row["globalPid"]
        return process & ~THREAD if isinstance(process, int) else None, row["correlationId"]

    def _read_device(self) -> None:
        for row in self._rows(KERNELS, *WHERE, *NAMES, whole=TIMES):
            name = self._name_of(row)
            if not is_collective_kernel(name):
                self._add("compute", row, name)
                continue
            key = self._process(row["globalPid"]), row["correlationId"]
            known, size = self._collectives.get(key, (Collective(operation_of(name)), NONE))
            about = dataclasses.replace(known, wire=wire_of(name))
            self._add("collective", row, name, size, about)
        for table, name in COPIES.items():
            for row in self._rows(table, *WHERE, whole=TIMES):
                self._add("copy", row, name)

    def _read_graphs(self) -> None:
        """A graph recorded as a whole counts as compute: a GPU that runs it is not idle."""
        for row in self._rows(GRAPHS, *WHERE, "graphId", whole=TIMES):
            self._graphs[self._add("compute", row, f"CUDA graph {row['graphId']}")] += 1

    def _add(
        self, kind: Kind, row: dict[str, Any], name: str, size: int = NONE, about: Collective | None = None
    ) -> Builder:
        builder = self._builder(self._process(row["globalPid"]))
        builder.on_device = True
        lane = builder.lane(
            ("device", row["deviceId"], row["streamId"]), f"device {row['deviceId']} stream {row['streamId']}"
        )
        correlation = row["correlationId"] if isinstance(row["correlationId"], int) else NONE
        builder.add(kind, lane, self._time(row["start"]), self._time(row["end"]), name, correlation, size, about=about)
        return builder

    def _process(self, global_pid: object) -> int:
        if isinstance(global_pid, int):
            return global_pid & ~THREAD
        if len(self._builders) > 1:
            raise TraceError(
                f"{self._path} has {len(self._builders)} processes, and does not say to which of them a kernel "
                "belongs. Export the report with a newer version of nsys, or profile each rank into a file of its own."
            )
        return next(iter(self._builders), 0)

    # ---------------------------------------------------------------------------------------------------------- end

    def _finish(self, builder: Builder) -> Recording:
        if not builder.on_device:
            builder.add_collectives_of_host()
        hosts = [
            row["value"] for row in self._rows("TARGET_INFO_SYSTEM_ENV", "name", "value") if row["name"] == "Hostname"
        ]
        started = self._rows("TARGET_INFO_SESSION_START_TIME", "utcEpochNs", whole=("utcEpochNs",))
        epochs = [row["utcEpochNs"] for row in started]
        return builder.finish(
            str(self._path),
            "Nsight Systems",
            # All processes of a file have one clock.
            host=str(hosts[0]) if hosts and epochs else f"that of {self._path}",
            origin_ns=(epochs[0] if epochs else 0) + self._origin,
            notes=self._notes(builder),
            warnings=[] if builder.on_device else [f"{self._path} {ONLY_HOST}"],
        )

    def _notes(self, builder: Builder) -> list[str]:
        notes = []
        if self._graphs[builder]:
            notes.append(
                f"{self._path}: CUDA graphs were recorded as a whole. What is in them, communication included, is not "
                f"known, and all of their time counts as compute. {AGAIN}"
            )
        if self._unreadable:
            rows = plural(self._unreadable, "row")
            notes.append(f"{self._path}: {rows} without times that can be read; left out.")
        return notes
