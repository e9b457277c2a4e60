"""Note [Never destroyed], cuda_driver.cpp: threads that still run when the process ends find everything there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from repository import ROOT

SOURCES = sorted((ROOT / "csrc").rglob("*.[ch]*"))
# Objects of the standard library or of torch that live until the end: those in a function, and those of a namespace.
# Mutexes and atomics have nothing to destroy, and a thread's own objects go with the thread.
STATIC = re.compile(
    r"^(?:\s*static (?:inline )?|(?:inline |const )*(?=(?:std|c10|at)::))"
    r"(?:const )?(?:std|c10|at|c10d)::(?!mutex|atomic)[\w:]+(?:<.*>)? \w+(?: =.*|\{.*)?;",
    re.MULTILINE,
)


def static_objects(source: str) -> list[str]:
    return [match.group().strip() for match in STATIC.finditer(source)]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_static_variable_is_destroyed_when_the_process_ends(path: Path) -> None:
    assert static_objects(path.read_text()) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("  static std::map<Key, LoadedKernel> all;\n", True),
        ("std::unordered_map<int, std::vector<int>> known;\n", True),
        ("inline std::string name = {};\n", True),
        ("  static const std::vector<int64_t> none{};\n", True),
        ("  static auto& all = *new std::map<Key, LoadedKernel>();\n", False),
        ("std::mutex loaded_mutex;\n", False),
        ("  static std::atomic<size_t> count{0};\n", False),
        ("inline thread_local std::chrono::steady_clock::duration waited{};\n", False),
        ("std::map<int, int>& all();\n", False),
        ("  std::vector<int> local;\n", False),
    ],
)
def test_what_counts_as_such_a_variable(source: str, found: bool) -> None:
    assert bool(static_objects(source)) == found
