"""Each mutation of `mutants.json` still has the line that it changes."""

from __future__ import annotations

import json
from typing import Any

from repository import TESTS

MUTANTS: list[dict[str, Any]] = json.loads((TESTS / "mutants" / "mutants.json").read_text())


def has_line(mutant: dict[str, Any]) -> bool:
    file = TESTS.parent / mutant["file"]
    return file.exists() and file.read_text().split("\n").count(mutant["line"]) > mutant["occurrence"]


def test_each_mutation_has_its_line() -> None:
    assert MUTANTS
    assert [(number, mutant["file"]) for number, mutant in enumerate(MUTANTS) if not has_line(mutant)] == []
