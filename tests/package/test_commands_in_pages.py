"""Commands that pages show exist with their options, and CI or a test runs each, or CONTRIBUTING.md says otherwise."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer.main

from fastddp.__main__ import _OPTIONS
from fastddp.tools.commands import app
from repository import ROOT, TESTS

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "bench/results/README.md", *(ROOT / "docs").glob("*.md")]
BLOCK = re.compile(r"```\w*\n(.*?)```|`([^`\n]+)`", re.DOTALL)
STARTS = ("make ", "fastddp ", "python -m ", "torchrun ", "docker ", "nsys ")
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def commands() -> set[str]:
    """Without comments, and what a shell would join in one line."""
    found = set()
    for page in PAGES:
        for block in BLOCK.finditer(page.read_text().replace("\\\n", " ")):
            lines = (block[1] or block[2]).splitlines()
            found |= {line.partition("#")[0].strip() for line in lines if line.startswith(STARTS)}
    return found


def after(start: str) -> list[list[str]]:
    """The words after ``start`` of each command that has it."""
    return [command.split(start, 1)[1].split() for command in sorted(commands()) if start in command]


def options(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if re.match(r"--\w", word)}


TARGETS = {word for words in after("make ") for word in words if re.fullmatch(r"[a-z][a-z-]+", word)}
BENCHES = {words[0] for words in after("python -m ") if words[0].startswith("bench.")}


def test_targets_of_make_exist() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert TARGETS - {*phony[1].split()} == set()


@pytest.mark.parametrize("bench", sorted(BENCHES))
def test_benches_have_the_options_that_pages_show_and_a_small_run_in_the_tests(bench: str) -> None:
    shown = set[str]().union(*(options(words) for words in after(f"python -m {bench} ")))
    sources = "".join(path.read_text() for path in (ROOT / "bench").rglob("*.py"))
    assert {option for option in shown if f'"{option}"' not in sources} == set()
    assert any(bench.split(".")[1] in path.read_text() for path in (TESTS / "bench").glob("*.py"))


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_commands_have_the_options_that_pages_show(command: str) -> None:
    known = {name for parameter in COMMANDS[command].params for name in parameter.opts}
    for words in after(f"fastddp {command} "):
        assert options(words) <= known


def test_a_job_has_the_options_that_pages_show() -> None:
    for words in after("-m fastddp "):
        own = words[: next((place for place, word in enumerate(words) if word.endswith(".py")), len(words))]
        assert options(own) <= _OPTIONS.keys() | {"--help"}


def test_what_nobody_runs_is_listed() -> None:
    listed = (ROOT / "CONTRIBUTING.md").read_text().split("## What CI does not run")[1].split("\n## ")[0]
    ran = (ROOT / ".ci" / "run").read_text()
    not_run = {f"make {target}" for target in TARGETS if not re.search(rf"^make {target}\b", ran, re.MULTILINE)}
    not_run |= {" ".join(words.split()[:2]) for words in commands() if words.startswith(("docker ", "nsys "))}
    assert {command for command in not_run if f"`{command}`" not in listed} == set()
