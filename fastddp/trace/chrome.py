"""Chrome traces of torch.profiler (``.json``, ``.json.gz``), read as a stream, in memory for compact arrays only."""

from __future__ import annotations

import gzip
import io
import math
import zlib
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Protocol

from fastddp.trace import names
from fastddp.trace.recording import NONE, Builder, Recording, TraceError

MESSAGES = ("send", "recv")
MESSAGES_ARE_LONGER = (
    "Messages between pairs of ranks over gloo (16 bits on the wire, added up in fp32) are recorded from their launch "
    "until the host notices that they have arrived: communication looks longer than it is."
)

Progress = Callable[[int], None]  # is told how many bytes of the file have been read

CHUNK = 1 << 16
GZIP = b"\x1f\x8b"
EVENTS, BASE = "traceEvents", "baseTimeNanoseconds"
# Ranges of torch's that mark steps, beside fastddp's.
MARKS = (names.PREFIX, names.FORWARD, names.PROFILER_STEP)


def read(path: Path, progress: Progress = lambda count: None) -> Recording:
    """The recording in a chrome trace.

    A file that ends too early, or is damaged, gives what lies before, with a note.

    Raises:
        TraceError: it is empty, no JSON, no trace of torch.profiler's, or has no events.
    """
    with path.open("rb") as file:
        header = _header(path, _text_of(path, file, lambda count: None))
    with path.open("rb") as file:
        reader = _Reader()
        damage = reader.read(_text_of(path, file, progress))
    notes = []
    if damage is not None:
        notes.append(f"{path} is damaged or was not written to its end ({damage}): only what lies before is counted.")
    if reader.unreadable:
        notes.append(f"{path}: {reader.unreadable} events have no times that can be read; they are left out.")
    if reader.is_empty():
        raise TraceError(
            f"{path} holds no event that could be read{f' ({damage})' if damage else ''}. Was the profiler stopped "
            "before export_chrome_trace(), and did it record a step?"
        )
    return reader.finish(path, header, notes)


class _Counted(io.RawIOBase):
    """A file that tells how far it has been read."""

    def __init__(self, file: IO[bytes], progress: Progress) -> None:
        self._file = file
        self._progress = progress

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self._progress(self._file.tell())
        return len(data)


class _Unpacked:
    """What gzip unpacks, up to the last byte that a truncated file has."""

    def __init__(self, file: gzip.GzipFile) -> None:
        self._file = file

    def read(self, size: int) -> bytes:
        return self._file.read1(size)  # read() would raise, and keep what came before the end


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def _text_of(path: Path, file: IO[bytes], progress: Progress) -> _Readable:
    start = file.read(2)
    if not start:
        raise TraceError(f"{path} is empty. Did the run end before the profiler could export its trace?")
    file.seek(0)
    counted = io.BufferedReader(_Counted(file, progress), CHUNK)
    return _Unpacked(gzip.GzipFile(fileobj=counted)) if start == GZIP else counted


def _damages() -> tuple[type[Exception], ...]:
    import ijson

    return (ijson.JSONError, EOFError, gzip.BadGzipFile, zlib.error, UnicodeDecodeError)


def _header(path: Path, text: _Readable) -> dict[str, Any]:
    """What stands in front of the events.

    Raises:
        TraceError: there are no events, so it is something else.
    """
    import ijson

    builder = ijson.ObjectBuilder()
    try:
        for prefix, event, value in ijson.parse(text, use_float=True, buf_size=CHUNK):
            if prefix == "" and event == "map_key" and value == EVENTS:
                return dict(builder.value)
            if prefix == "" and event not in ("start_map", "map_key", "end_map"):
                break
            builder.event(event, value)
    except _damages() as error:
        raise TraceError(f"{path} is no JSON that can be read ({error}). {_EXPECTED}") from None
    raise TraceError(f"{path} is JSON, but no trace: it has no {EVENTS!r}. {_EXPECTED}")


_EXPECTED = (
    "Give traces of torch.profiler (export_chrome_trace() or tensorboard_trace_handler(): .json, .json.gz) or of "
    "Nsight Systems (.nsys-rep, .sqlite)."
)


class _Reader:
    def __init__(self) -> None:
        self._builder = Builder()
        self._origin: float | None = None  # µs
        self._threads: dict[tuple[Any, Any], str] = {}
        self._launches: list[tuple[float, int, str]] = []  # collectives of a host: start, lane, operation
        self._runs: list[tuple[float, float, int, str]] = []
        self.unreadable = 0
        self.has_messages = False

    def read(self, text: _Readable) -> str | None:
        """All events; returns what was wrong with the file, if anything."""
        import ijson

        try:
            for event in ijson.items(text, f"{EVENTS}.item", use_float=True, buf_size=CHUNK):
                self._take(event)
        except _damages() as error:
            return str(error).splitlines()[0] if str(error) else type(error).__name__
        return None

    def is_empty(self) -> bool:
        return self._builder.is_empty()

    def _take(self, event: Any) -> None:
        if not isinstance(event, dict) or event.get("ph") != "X":
            return
        handler = _HANDLERS.get(str(event.get("cat")))
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
        return self._builder.lane((event["pid"], event["tid"]), f"thread {event['tid']}")

    def _operator(self, event: dict[str, Any], start: float, end: float) -> None:
        name, lane = event["name"], self._thread(event)
        if not name.startswith("c10d::"):
            self._builder.add_operator(lane, start, end, name)
            return
        self._builder.add("launch", lane, start, end, name)
        self._launches.append((start, lane, _operation(name)))

    def _annotation(self, event: dict[str, Any], start: float, end: float) -> None:
        name, lane = event["name"], self._thread(event)
        if name.startswith("gloo:"):
            self._runs.append((start, end, lane, name))
        elif name.startswith(MARKS):
            self._builder.add_range(lane, start, end, name)

    def _host_call(self, event: dict[str, Any], start: float, end: float) -> None:
        arguments = event.get("args", {})
        if arguments.get("correlation") is not None:
            self._builder.add_launch(_correlation(arguments), self._thread(event), start)

    # --------------------------------------------------------------------------------------------------- the device

    def _stream(self, event: dict[str, Any]) -> int:
        arguments = event.get("args", {})
        device, stream = arguments.get("device", event.get("pid")), arguments.get("stream", event.get("tid"))
        return self._builder.lane(("device", device, stream), f"device {device} stream {stream}")

    def _kernel(self, event: dict[str, Any], start: float, end: float) -> None:
        self._builder.on_device = True
        name, arguments = event["name"], event.get("args", {})
        is_collective = is_collective_kernel(name)
        self._builder.add(
            "collective" if is_collective else "compute",
            self._stream(event),
            start,
            end,
            name,
            _correlation(arguments),
            _bytes_of_message(arguments) if is_collective else NONE,
            str(arguments.get("Collective name") or name),
        )

    def _copy(self, event: dict[str, Any], start: float, end: float) -> None:
        self._builder.on_device = True
        correlation = _correlation(event.get("args", {}))
        self._builder.add("copy", self._stream(event), start, end, event["name"], correlation)

    # ---------------------------------------------------------------------------------------------------------- end

    def finish(self, path: Path, header: dict[str, Any], notes: list[str]) -> Recording:
        self._match_runs_to_launches()
        if self.has_messages:
            notes.append(MESSAGES_ARE_LONGER)
        info = header.get("distributedInfo")
        info = info if isinstance(info, dict) else {}
        host = header.get("host_name")
        base = _whole(header.get(BASE))
        return self._builder.finish(
            str(path),
            "torch.profiler",
            _whole(info.get("rank")),
            _whole(info.get("world_size")) or None,
            host if isinstance(host, str) and (base is not None or BASE not in header) else None,
            (base or 0) + round((self._origin or 0.0) * 1e3),
            notes,
        )

    def _match_runs_to_launches(self) -> None:
        """Gloo's workers run collectives of a kind in the order in which they were launched.

        A run that begins before any launch that is left belongs to one that was not recorded.
        """
        waiting: defaultdict[str, deque[int]] = defaultdict(deque)
        launches = [(start, 0, number) for number, (start, _, _) in enumerate(self._launches)]
        runs = [(start, 1, number) for number, (start, _, _, _) in enumerate(self._runs)]
        for _, is_run, number in sorted(launches + runs):
            if not is_run:
                start, lane, operation = self._launches[number]
                correlation = NONE - 1 - number  # a device's are positive
                self._builder.add_launch(correlation, lane, start)
                waiting[operation].append(correlation)
                continue
            start, end, lane, name = self._runs[number]
            if _operation(name) in MESSAGES:
                # No thread runs it: recorded on that which launched it, up to when that noticed its end.
                self.has_messages = True
                lane = self._builder.lane(("messages", lane), "messages between ranks")
            queue = waiting[_operation(name)]
            self._builder.add("collective", lane, start, end, name, queue.popleft() if queue else NONE)


_HANDLERS: dict[str, Callable[[_Reader, dict[str, Any], float, float], None]] = {
    "cpu_op": _Reader._operator,
    "user_annotation": _Reader._annotation,
    "cuda_runtime": _Reader._host_call,
    "cuda_driver": _Reader._host_call,
    "kernel": _Reader._kernel,
    "gpu_memcpy": _Reader._copy,
    "gpu_memset": _Reader._copy,
}


def _whole(value: object) -> int | None:
    """A number in the file's header, where profilers of other versions, or other hands, may have put something else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if 0 <= value < 2**63 and value == int(value) else None


def _correlation(arguments: dict[str, Any]) -> int:
    return _in_64_bits(int(arguments.get("correlation", NONE)))


def _in_64_bits(value: int) -> int:
    if not -(2**63) <= value < 2**63:
        raise OverflowError(value)
    return value


def is_collective_kernel(name: str) -> bool:
    """Whether a kernel is one of NCCL's: ``ncclDevKernel_...``, ``ncclSymkDevKernel_...``, ``ncclKernel_...``."""
    return name.startswith("nccl") and "Kernel" in name


def _operation(name: str) -> str:
    """``allreduce`` of ``c10d::allreduce_`` and of ``gloo:all_reduce``."""
    plain = name.split(":")[-1].replace("_", "").lower()
    return plain.removesuffix("base").removesuffix("coalesced")


_BYTES = {"Byte": 1, "Char": 1, "Half": 2, "BFloat16": 2, "Float": 4, "Int": 4, "Double": 8, "Long": 8}


def _bytes_of_message(arguments: dict[str, Any]) -> int:
    """What torch notes at kernels of NCCL's."""
    elements, size = arguments.get("In msg nelems"), _BYTES.get(arguments.get("dtype", ""))
    return _in_64_bits(int(elements) * size) if elements is not None and size is not None else NONE
