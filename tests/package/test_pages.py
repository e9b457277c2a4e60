"""Links, notes and commands of pages lead somewhere, the README is short, and the smallest example trains.

CI or a test runs each command that a page shows, or CONTRIBUTING.md says otherwise.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from fastddp.__main__ import _OPTIONS
from fastddp.tools.commands import app
from repository import ROOT, TESTS

README = ROOT / "README.md"
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_of_the_readme_lead_somewhere() -> None:
    """Make docs does the same for all other pages."""
    for link in LINK.findall(CODE.sub("", README.read_text())):
        if link.startswith(("http:", "https:")):
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / name).resolve() if name else README
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_scripts_that_pages_show_are_whole() -> None:
    """A formatter of Python that finds the line of an include in a fence of Python makes an expression of it."""
    shown = []
    for page in (ROOT / "docs").glob("*.md"):
        for line in re.findall(r"^.*8 *<.*$", page.read_text(), re.MULTILINE):
            include = re.fullmatch(r'--8<-- "(examples/[\w/]+\.py)(?::(\d+))?"', line)
            assert include is not None, (page.name, line)
            shown.append(include[1])
            docstring, code, *_ = ast.parse((ROOT / include[1]).read_text()).body
            assert int(include[2] or 1) in (docstring.lineno, code.lineno), (page.name, line)
    assert {"examples/recipes/restarts.py", "examples/recipes/in_process.py"} <= {*shown}


def test_the_readme_takes_no_longer_than_800_words() -> None:
    assert len(README.read_text().split()) <= 800


@pytest.mark.tier("slow")
def test_the_smallest_example_trains() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = subprocess.run(
        [*torchrun, str(ROOT / "examples" / "minimal.py")], capture_output=True, text=True, timeout=250
    )
    assert ended.returncode == 0, ended.stderr
    losses = [float(line.rpartition(" ")[2]) for line in ended.stdout.splitlines()]
    assert len(losses) == 5
    assert losses[-1] < 0.01 * losses[0] or losses[-1] < 1e-4


# ------------------------------------------------------------------------------------------------------------- notes


NOTE = re.compile(r"\b([Nn])otes? ((?:\[[^\]]+\](?:, `[^`]+`,)?(?: and |, )?)+)")


def test_every_note_that_is_cited_exists() -> None:
    """``note [X]`` is explained somewhere in the sources as ``Note [X]``."""
    known: set[str] = set()
    cited: dict[str, str] = {}
    paths = [path for folder in ("csrc", "fastddp", "kernels", "tests", "docs") for path in (ROOT / folder).rglob("*")]
    for path in paths:
        if path.suffix not in {".cpp", ".h", ".py", ".md"} or path == Path(__file__).resolve():
            continue
        # In one line: a name may go on in the next line of a comment.
        for first, names in NOTE.findall(re.sub(r"\n\s*(?://|#)?\s*", " ", path.read_text())):
            for name in re.findall(r"\[([^\]]+)\]", names):
                known.add(name) if first == "N" else cited.setdefault(name, str(path.relative_to(ROOT)))
    assert cited
    assert {name: path for name, path in cited.items() if name not in known} == {}


# ---------------------------------------------------------------------------------------------------------- commands


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
        if words[0] == "build":
            assert set(words[1:]) <= {"--in-package"}
            continue
        own = words[: next((place for place, word in enumerate(words) if word.endswith(".py")), len(words))]
        assert options(own) <= _OPTIONS.keys() | {"--help"}


def test_what_nobody_runs_is_listed() -> None:
    listed = (ROOT / "CONTRIBUTING.md").read_text().split("## What CI does not run")[1].split("\n## ")[0]
    ran = (ROOT / ".ci" / "run").read_text()
    not_run = {f"make {target}" for target in TARGETS if not re.search(rf"^make {target}\b", ran, re.MULTILINE)}
    not_run |= {" ".join(words.split()[:2]) for words in commands() if words.startswith(("docker ", "nsys "))}
    assert {command for command in not_run if f"`{command}`" not in listed} == set()
