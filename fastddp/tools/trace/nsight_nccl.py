"""What NCCL says of its calls in Nsight Systems' export: its own NVTX ranges, each with a payload.

Note [NCCL's payloads]
A range such as ncclAllReduce carries the communicator, the size of the message in bytes and more. The range of
ncclCommInitRank carries the number of ranks. If the export holds payloads as JSON, we read that. Otherwise we read
``binaryData``: 32 bytes of header (4 each: domain, unused, schema, unused; 8 each: size of the payload, size of all),
then the fields at the offsets in NVTX_PAYLOAD_SCHEMA_ENTRIES. A payload in any other form is ignored, and sizes are
unknown. NCCL launches kernels when the outermost group of calls ends. So a launch belongs to all calls of its thread
since the launch before.
"""

from __future__ import annotations

import json
import re
import struct
from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import Any

from fastddp.tools.trace.collectives import MESSAGES, OTHER, Collective, operation_of
from fastddp.tools.trace.recording import NONE

COMMUNICATOR, SIZE, RANKS = "NCCL communicator ID", "Message size [bytes]", "No. of ranks"
SCHEMAS = "NVTX_PAYLOAD_SCHEMA_ENTRIES"
_HEADER = struct.Struct("<IIIIQQ")
_FIELDS = {COMMUNICATOR: struct.Struct("<Q"), SIZE: struct.Struct("<Q"), RANKS: struct.Struct("<I")}

Schemas = dict[tuple[int, int], dict[str, int]]  # by domain and schema: offsets of fields
Call = tuple[int, str, dict[str, int]]  # when, operation, payload


def schemas_of(rows: Iterable[dict[str, Any]]) -> Schemas:
    """From rows of NVTX_PAYLOAD_SCHEMA_ENTRIES."""
    found: defaultdict[tuple[int, int], dict[str, int]] = defaultdict(dict)
    for row in rows:
        if row["name"] in _FIELDS and isinstance(row["offset"], int | None):
            found[row["domainId"], row["schemaId"]][row["name"]] = row["offset"] or 0
    return dict(found)


def payload_of(json_text: object, binary: object, schemas: Schemas) -> dict[str, int]:
    """The known fields; empty if there are none."""
    if isinstance(json_text, str):
        return _from_json(json_text)
    if not isinstance(binary, bytes) or len(binary) < _HEADER.size:
        return {}
    domain, _, schema, _, size, total = _HEADER.unpack_from(binary)
    if total != len(binary) or size != total - _HEADER.size:
        return {}
    fields = schemas.get((domain, schema), {})
    return {
        name: _FIELDS[name].unpack_from(binary, _HEADER.size + offset)[0]
        for name, offset in fields.items()
        if 0 <= offset <= size - _FIELDS[name].size
    }


def _from_json(text: str) -> dict[str, int]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    values = values if isinstance(values, dict) else {}
    digits = {name: re.sub(r"\D", "", str(values[name])) for name in _FIELDS if name in values}
    return {name: int(number) for name, number in digits.items() if 0 < len(number) < 21}


class Calls:
    """NCCL's calls by thread, and the kernels that they launched."""

    def __init__(self) -> None:
        self._calls: defaultdict[Hashable, list[Call]] = defaultdict(list)
        self._launches: defaultdict[Hashable, list[tuple[int, Hashable]]] = defaultdict(list)
        self._ranks: dict[int, int] = {}  # by communicator

    def add(self, thread: Hashable, start: int, name: str, payload: dict[str, int]) -> None:
        """Add a range of NCCL; ``start``: ns."""
        if COMMUNICATOR in payload and RANKS in payload:
            self._ranks[payload[COMMUNICATOR]] = payload[RANKS]
        if operation_of(name) != OTHER:
            self._calls[thread].append((start, operation_of(name), payload))

    def add_launch(self, thread: Hashable, start: int, kernel: Hashable) -> None:
        """Add a launch of NCCL's kernel; ``start``: ns."""
        self._launches[thread].append((start, kernel))

    def resolved(self) -> dict[Hashable, tuple[Collective, int]]:
        """By kernel: its collective, and the bytes that go in on this rank."""
        found = {}
        for thread, launches in self._launches.items():
            calls, place = sorted(self._calls[thread], key=lambda call: call[0]), 0
            for start, kernel in sorted(launches, key=lambda launch: launch[0]):
                first = place
                while place < len(calls) and calls[place][0] <= start:
                    place += 1
                if place > first:
                    found[kernel] = self._together([call[1:] for call in calls[first:place]])
        return found

    def _together(self, calls: list[tuple[str, dict[str, int]]]) -> tuple[Collective, int]:
        operations = {operation for operation, _ in calls}
        groups = {payload.get(COMMUNICATOR) for _, payload in calls}
        group = groups.pop() if len(groups) == 1 else None
        ranks = None if group is None else self._ranks.get(group)
        sizes = [self._bytes(operation, payload, ranks) for operation, payload in calls]
        if operations <= set(MESSAGES):
            # In a group of messages all ranks exchange parts. Received bytes are those that others send.
            operation = next(iter(operations)) if len(calls) == 1 else "send/recv"
            sent = [size for size, (what, _) in zip(sizes, calls, strict=True) if what == "send"]
            sizes = sent or sizes
        else:
            operation = next(iter(operations)) if len(operations) == 1 else OTHER
        name = None if group is None else f"{group:#x}"
        return Collective(operation, name, ranks), NONE if NONE in sizes else sum(sizes)

    @staticmethod
    def _bytes(operation: str, payload: dict[str, int], ranks: int | None) -> int:
        """Bytes that go in; a reduce_scatter names those that come out."""
        if SIZE not in payload or (operation == "reduce_scatter" and ranks is None):
            return NONE
        size = payload[SIZE] * (ranks or 1 if operation == "reduce_scatter" else 1)
        return size if size < 2**63 else NONE
