"""Chrome traces of torch.profiler (``.json``, ``.json.gz``), read as a stream. Memory holds only compact arrays.

Categories are today's, and those of torch before 1.13 ("Operator", "Kernel"). The list of events that
``torch.autograd.profiler`` exports has none.
"""

from __future__ import annotations

import gzip
import math
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from fastddp.tools.trace import names
from fastddp.tools.trace.collectives import MESSAGES, Collective, is_collective_kernel, operation_of, wire_of
from fastddp.tools.trace.events import ChromeDocument, Damaged, NoTrace
from fastddp.tools.trace.recording import NONE, Builder, Recording, TraceError

MESSAGES_ARE_LONGER = (
    "Messages between pairs of ranks over gloo (16 bits on the wire, added up in fp32), and what ranks of one machine "
    "read, are recorded from their launch until the host notices their end: communication looks longer than it is."
)

Progress = Callable[[int], None]  # is told how many bytes of the file have been read

GZIP = b"\x1f\x8b"
BASE = "baseTimeNanoseconds"


def read(path: Path, progress: Progress = lambda count: None, step_range: str | None = None) -> Recording:
    """The recording in a chrome trace, up to where it is damaged; TraceError: it is no trace, or has no events."""
    with path.open("rb") as file:
        try:
            document = ChromeDocument(_bytes_of(path, file, progress))
        except (Damaged, NoTrace) as error:
            is_json = isinstance(error, NoTrace)
            what = f"JSON, but no trace: {error}" if is_json else f"no JSON that can be read ({error})"
            raise TraceError(f"{path} is {what}. {_EXPECTED}") from None
        reader = _Reader(step_range)
        damage = reader.read(document)
    why = f" ({damage})" if damage else ""
    if document.is_list and not reader.has_events:
        raise TraceError(f"{path} is JSON, but no trace: a list without events{why}. {_EXPECTED}")
    if reader.builder.is_empty():
        raise TraceError(
            f"{path} holds no event that could be read{why}. Was the profiler stopped "
            "before export_chrome_trace(), and did it record a step?"
        )
    warning = f"{path} is damaged or was not written to its end{why}: only what lies before is counted."
    return reader.finish(path, document.header, (warning,) if damage else ())


def _bytes_of(path: Path, file: IO[bytes], progress: Progress) -> Callable[[int], bytes]:
    """A function that reads the file, unpacked."""
    start = file.read(2)
    if not start:
        raise TraceError(f"{path} is empty. Did the run end before the profiler could export its trace?")
    file.seek(0)
    # GzipFile.read() of a truncated file would raise, and lose what came before.
    unpacked = gzip.GzipFile(fileobj=file).read1 if start == GZIP else file.read

    def read_and_tell(count: int) -> bytes:
        data = unpacked(count)
        progress(file.tell())
        return data

    return read_and_tell


_EXPECTED = (
    "Give traces of torch.profiler (export_chrome_trace() or tensorboard_trace_handler(): .json, .json.gz) or of "
    "Nsight Systems (.nsys-rep, .sqlite)."
)


class _Reader:
    def __init__(self, step_range: str | None) -> None:
        self.builder = Builder()
        self._marks = names.marks(step_range)
        self._origin: float | None = None  # µs
        self._launches: list[tuple[float, int, str]] = []  # collectives of a host: start, lane, operation
        self._runs: list[tuple[float, float, int, str]] = []
        self.unreadable = 0
        self.has_messages = False
        self.has_events = False

    def read(self, document: ChromeDocument) -> str | None:
        """Read all events; return what was wrong with the file, if anything."""
        try:
            for event in document.events():
                self._take(event)
        except Damaged as error:
            return str(error)
        return None

    def _take(self, event: Any) -> None:
        if not isinstance(event, dict) or "ph" not in event:
            return
        self.has_events = True
        if event["ph"] != "X":
            return
        category = event.get("cat")
        # Without category: events in the list that torch.autograd.profiler exports.
        handler = _HANDLERS.get(str(category).lower()) if category is not None else _Reader._host_range
        if handler is None:
            return
        try:
            start, length = float(event["ts"]), float(event.get("dur", 0))
            if not math.isfinite(start + length):
                raise ValueError(start)
            if self._origin is None:
                self._origin = start
            start = (start - self._origin) / 1e3
            handler(self, event, start, start + length / 1e3)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
            self.unreadable += 1

    # ----------------------------------------------------------------------------------------------------- the host

    def _thread(self, event: dict[str, Any]) -> int:
        return self.builder.lane((event["pid"], event["tid"]), f"thread {event['tid']}")

    def _operator(self, event: dict[str, Any], start: float, end: float) -> None:
        name, lane = event["name"], self._thread(event)
        if not name.startswith("c10d::"):
            self.builder.add_operator(lane, start, end, name)
            return
        self.builder.add("launch", lane, start, end, name)
        self._launches.append((start, lane, _operation(name)))

    def _annotation(self, event: dict[str, Any], start: float, end: float) -> None:
        name, lane = event["name"], self._thread(event)
        if name.startswith("gloo:"):
            self._runs.append((start, end, lane, name))
        elif name.startswith(self._marks):
            self.builder.add_range(lane, start, end, name)

    def _host_range(self, event: dict[str, Any], start: float, end: float) -> None:
        """An operator or annotation; the category does not tell which."""
        is_annotation = event["name"].startswith(("gloo:", *self._marks))
        (self._annotation if is_annotation else self._operator)(event, start, end)

    def _host_call(self, event: dict[str, Any], start: float, end: float) -> None:
        arguments = event.get("args", {})
        if arguments.get("correlation") is not None:
            self.builder.add_launch(_correlation(arguments), self._thread(event), start)

    # --------------------------------------------------------------------------------------------------- the device

    def _stream(self, event: dict[str, Any]) -> int:
        arguments = event.get("args", {})
        device, stream = arguments.get("device", event.get("pid")), arguments.get("stream", event.get("tid"))
        return self.builder.lane(("device", device, stream), f"device {device} stream {stream}")

    def _kernel(self, event: dict[str, Any], start: float, end: float) -> None:
        self.builder.on_device = True
        name, arguments = event["name"], event.get("args", {})
        place = (self._stream(event), start, end, name, _correlation(arguments))
        if is_collective_kernel(name):  # torch notes a collective also at the copies around it
            size, sequence = _bytes_of_message(arguments), _whole(arguments.get("Seq"))
            sequence = NONE if sequence is None else sequence
            self.builder.add("collective", *place, size, sequence, _collective(name, arguments))
        else:
            self.builder.add("compute", *place)

    def _copy(self, event: dict[str, Any], start: float, end: float) -> None:
        self.builder.on_device = True
        correlation = _correlation(event.get("args", {}))
        self.builder.add("copy", self._stream(event), start, end, event["name"], correlation)

    # ---------------------------------------------------------------------------------------------------------- end

    def finish(self, path: Path, header: dict[str, Any], warnings: tuple[str, ...]) -> Recording:
        self._match_runs_to_launches()
        notes = []
        if self.unreadable:
            notes.append(f"{path}: {self.unreadable} events have no times that can be read; they are left out.")
        if self.has_messages:
            notes.append(MESSAGES_ARE_LONGER)
        info = header.get("distributedInfo")
        info = info if isinstance(info, dict) else {}
        host = header.get("host_name")
        base = _whole(header.get(BASE))
        return self.builder.finish(
            str(path),
            "torch.profiler",
            _whole(info.get("rank")),
            _whole(info.get("world_size")) or None,
            host if isinstance(host, str) and (base is not None or BASE not in header) else None,
            (base or 0) + round((self._origin or 0.0) * 1e3),
            notes,
            warnings,
        )

    def _match_runs_to_launches(self) -> None:
        """Gloo's workers run collectives of one kind in the order of their launches.

        A run that begins before all remaining launches belongs to a launch that was not recorded.
        """
        waiting: defaultdict[str, deque[tuple[int, int | None]]] = defaultdict(deque)
        launches = [(start, 0, number) for number, (start, _, _) in enumerate(self._launches)]
        runs = [(start, 1, number) for number, (start, _, _, _) in enumerate(self._runs)]
        for _, is_run, number in sorted(launches + runs):
            if not is_run:
                start, lane, operation = self._launches[number]
                correlation = NONE - 1 - number  # a device's are positive
                self.builder.add_launch(correlation, lane, start)
                waiting[operation].append((correlation, lane))
                continue
            start, end, lane, name = self._runs[number]
            queue = waiting[_operation(name)]
            correlation, launcher = queue.popleft() if queue else (NONE, None)
            if lane == launcher or _operation(name) in MESSAGES:
                # No thread runs it. It is recorded on its launching thread, until that notices its end.
                self.has_messages = True
                lane = self.builder.lane(("messages", lane), "messages between ranks")
            self.builder.add("collective", lane, start, end, name, correlation, about=Collective(operation_of(name)))


_HANDLERS: dict[str, Callable[[_Reader, dict[str, Any], float, float], None]] = {
    "cpu_op": _Reader._operator,
    "operator": _Reader._host_range,
    "user_annotation": _Reader._annotation,
    "cuda_runtime": _Reader._host_call,
    "cuda_driver": _Reader._host_call,
    "runtime": _Reader._host_call,
    "kernel": _Reader._kernel,
    "gpu_memcpy": _Reader._copy,
    "gpu_memset": _Reader._copy,
    "memcpy": _Reader._copy,
    "memset": _Reader._copy,
}


def _whole(value: object) -> int | None:
    """A whole number of the file's header; None if something else is there."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if 0 <= value < 2**63 and value == int(value) else None


def _correlation(arguments: dict[str, Any]) -> int:
    return _in_64_bits(int(arguments.get("correlation", NONE)))


def _in_64_bits(value: int) -> int:
    if not -(2**63) <= value < 2**63:
        raise OverflowError(value)
    return value


def _operation(name: str) -> str:
    """``allreduce`` of ``c10d::allreduce_`` and of ``gloo:all_reduce``."""
    plain = name.split(":")[-1].replace("_", "").lower()
    return plain.removesuffix("base").removesuffix("coalesced")


# By torch's name of a dtype: bytes of an element, and fastddp's name.
_DTYPES = {
    "Byte": (1, "uint8"),
    "Char": (1, "int8"),
    "Half": (2, "float16"),
    "BFloat16": (2, "bfloat16"),
    "Float": (4, "float32"),
    "Int": (4, "int32"),
    "Double": (8, "float64"),
    "Long": (8, "int64"),
}


def _bytes_of_message(arguments: dict[str, Any]) -> int:
    """The size that torch notes at NCCL's kernels."""
    elements, (size, _) = arguments.get("In msg nelems"), _DTYPES.get(arguments.get("dtype", ""), (None, None))
    return _in_64_bits(int(elements) * size) if elements is not None and size is not None else NONE


def _collective(kernel: str, arguments: dict[str, Any]) -> Collective:
    """Which collective a kernel runs: as torch notes it, or else by its name."""
    group, ranks = arguments.get("Process Group Name"), arguments.get("Process Group Ranks")
    _, wire = _DTYPES.get(arguments.get("dtype", ""), (None, None))
    return Collective(
        operation_of(str(arguments.get("Collective name") or kernel)),
        None if group is None else f"{group} {ranks}",
        _whole(arguments.get("Group size")),
        wire or wire_of(kernel),
    )
