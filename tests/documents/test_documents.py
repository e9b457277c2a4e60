"""JSON that fastddp reads: however deep, large or wrong, it is refused with a sentence."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastddp.bucket_plan import BucketPlan
from fastddp.documents.formats import DocumentFormat
from fastddp.documents.typed_json import DEEPEST, parsed
from fastddp.planning.profile import Profile
from fastddp.trace.as_json import read_json

FORMATS: dict[str, Callable[[Path], Any]] = {
    "fastddp bucket plan": BucketPlan.load,
    "fastddp profile": Profile.load,
    "fastddp trace": read_json,
}
SMALL = DocumentFormat("small", 1, "note", "Write it anew.", largest=2**20)


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_nested_deeply_or_too_large_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    for depth in (DEEPEST, 10**6):
        path.write_text(f'{{"format": "{name}", "version": 1, "more": {nested(depth)}}}')
        with pytest.raises(ValueError, match=rf"file\.json holds no .*it is nested more than {DEEPEST} deep"):
            FORMATS[name](path)
    with path.open("w") as file:
        file.write(f'{{"format": "{name}", "more": "')
        file.truncate(10**12)  # without taking place on the disk
    with pytest.raises(ValueError, match=r"it has more than \d+ MiB"):
        FORMATS[name](path)


@pytest.mark.parametrize("shape", [nested, lambda depth: '{"a":' * depth + "1" + "}" * depth])
def test_depth_counts_lists_and_objects(shape: Callable[[int], str]) -> None:
    assert parsed(shape(DEEPEST).encode()) is not None
    with pytest.raises(ValueError, match="nested more than"):
        parsed(shape(DEEPEST + 1).encode())


def test_brackets_in_strings_are_no_depth() -> None:
    assert parsed(b'["' + b"[" * 100_000 + b'"]') == ["[" * 100_000]


def test_no_more_is_read_than_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    SMALL.save(path, {"text": "a" * (2**20 - 100)})
    assert SMALL.load(path)["format"] == "small"
    with pytest.raises(ValueError, match="it has more than 1 MiB"):
        SMALL.load("/dev/zero")


def test_a_version_may_be_anything(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text(f'{{"format": "small", "version": [{"1," * 1000}1]}}')
    with pytest.raises(ValueError, match=r"a note of version \[1, 1, .*…, and this fastddp reads version 1"):
        SMALL.load(path)


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
