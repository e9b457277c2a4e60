"""JSON that fastddp reads: however deep, large or wrong, it is refused with a sentence."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from fastddp.documents.formats import DocumentFormat
from fastddp.documents.typed_json import DEEPEST, Unexpected, parsed, restored
from fastddp.planning.bucket_plan import BucketPlan
from fastddp.tools.trace.as_json import read_json
from file_kinds import FILE_KINDS

FORMATS: dict[str, Callable[[Path], Any]] = {
    "fastddp bucket plan": BucketPlan.load,
    "fastddp trace": read_json,
}
SMALL = DocumentFormat("small", 1, "note", "Write it anew.", largest=2**20)


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_nested_deeply_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    for depth in (DEEPEST, 10**6):
        path.write_text(f'{{"format": "{name}", "version": 1, "more": {nested(depth)}}}')
        with pytest.raises(ValueError, match=rf"file\.json holds no .*it is nested more than {DEEPEST} deep"):
            FORMATS[name](path)


def test_depth_counts_lists_and_objects_and_no_brackets_in_strings() -> None:
    for shape in (nested, lambda depth: '{"a":' * depth + "1" + "}" * depth):
        assert parsed(shape(DEEPEST).encode()) is not None
        with pytest.raises(ValueError, match="nested more than"):
            parsed(shape(DEEPEST + 1).encode())
    assert parsed(b'["' + b"[" * 100_000 + b'"]') == ["[" * 100_000]


def test_no_more_is_read_than_the_limit_and_a_version_may_be_anything(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    SMALL.save(path, {"text": "a" * (2**20 - 100)})
    assert SMALL.load(path)["format"] == "small"
    with pytest.raises(ValueError, match="it has more than 1 MiB"):
        SMALL.load("/dev/zero")
    path.write_text(f'{{"format": "small", "version": [{"1," * 1000}1]}}')
    with pytest.raises(ValueError, match=r"a note of version \[1, 1, .*…, and this fastddp reads version 1"):
        SMALL.load(path)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"\xff\xfe\x00", "it is not JSON"),
        (b'{"format": NaN}', "NaN is no number of JSON"),
        (b'{"traceEvents": []}', 'does not begin with "format": "small"'),
        (b'{"format": "small", "version": 2}', "holds a note of version 2, and this fastddp reads version 1"),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path: Path, data: bytes, complaint: str) -> None:
    (tmp_path / "file.json").write_bytes(data)
    with pytest.raises(ValueError, match=rf"file\.json .*{complaint}"):
        SMALL.load(tmp_path / "file.json")


@dataclass
class Thing:
    name: str
    size: int | None
    time: float
    kind: Literal["one", "two"]
    inside: tuple[Thing, ...] = ()


ONE = {"name": "a", "size": None, "time": 0.5, "kind": "one"}


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (None, "it: expected an object, found null"),
        (ONE | {"inside": 7}, "it.inside: expected a list, found 7"),
        (ONE | {"inside": [ONE, ONE | {"time": "much"}]}, r'it.inside\[1\].time: expected a number, found "much"'),
        ({"name": "a"}, "it.size is missing"),
        (ONE | {"more": 1}, "it.more: there is no such field"),
        (ONE | {"time": True}, "it.time: expected a number, found true"),
        (ONE | {"size": 2.5}, "it.size: expected a whole number, found 2.5"),
        (ONE | {"name": None}, "it.name: expected a string, found null"),
        (ONE | {"kind": "three"}, "it.kind: expected one of 'one', 'two'"),
    ],
)
def test_values_of_other_types_are_refused_with_their_place(value: object, complaint: str) -> None:
    with pytest.raises(Unexpected, match=f"^{complaint}"):
        restored(value, Thing, "it")
    assert repr(restored(ONE | {"time": 3}, Thing, "it").time) == "3.0"  # a whole number may stand for one


# Whatever a user names; a pipe is read as long as somebody writes to it.
@pytest.mark.parametrize("kind", [kind for kind in FILE_KINDS if kind not in ("closed", "somebody else's")])
def test_a_file_of_any_other_kind_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    FILE_KINDS[kind](tmp_path / "note")
    with pytest.raises((ValueError, OSError), match="note"):
        SMALL.load(tmp_path / "note")


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    SMALL.save(tmp_path / "note", {"a": 1})
    with subprocess.Popen(["sh", "-c", f"sleep 0.1; cat {tmp_path}/note"], stdout=-1) as process:
        assert process.stdout is not None
        assert SMALL.load(f"/dev/fd/{process.stdout.fileno()}")["a"] == 1


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    """As /dev/null does, which root could replace by a file for everybody."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    DocumentFormat("some", 1, "thing", "").save(pipe, {"a": 1})
    assert b'"a": 1' in os.read(reader, 1000)
    os.close(reader)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]
