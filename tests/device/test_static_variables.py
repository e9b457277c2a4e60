"""Note [Never destroyed], cuda_driver.cpp: threads that still run when the process ends find everything there."""

from __future__ import annotations

import re

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


def test_no_static_variable_is_destroyed_when_the_process_ends() -> None:
    assert {path.name: found for path in SOURCES if (found := static_objects(path.read_text()))} == {}
    assert static_objects("  static std::map<Key, LoadedKernel> all;\n"), "the pattern finds none at all"
