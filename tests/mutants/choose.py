"""Chooses the mutations of ``mutants.json``: ``python tests/mutants/choose.py`` writes the list anew.

The seed is part of the list's meaning: who changes it, or the sources, gets other mutations and another baseline.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import random
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutants.json")
SEED = 24
HOW_MANY = {"csrc": 20, "fastddp": 14, "kernels": 6}

COMPARISONS = (
    *((" < ", " <= "), (" <= ", " < "), (" > ", " >= "), (" >= ", " > "), (" == ", " != "), (" != ", " == ")),
    *((" && ", " || "), (" || ", " && "), (" and ", " or "), (" or ", " and ")),
    *((" is None", " is not None"), (" is not None", " is None"), (" not in ", " in ")),
)
CALL = r"(?!return\b|if\b|for\b|while\b|throw\b|assert\b)[\w.:>\-\[\]*]+\(.*\)"
WAITS = re.compile(r"\b\w*(wait(?!ing)|synchronize|join|drain|block_stream)\w*\(")
COMMENT = re.compile(r"\s+(//|#) .*$")


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One line that is another one."""

    kind: str
    file: str
    line: str
    """As it is, with its indentation."""
    occurrence: int
    """Which of the lines of the file that are equal to it, from 0."""
    mutated: str


def comparisons(line: str) -> Iterator[str]:
    """The line, with one of its comparisons or conjunctions another one."""
    for old, new in COMPARISONS:
        for match in re.finditer(re.escape(old), line):
            yield line[: match.start()] + new + line[match.end() :]


def constants(line: str) -> Iterator[str]:
    """The line, with one of its numbers greater by one, or a truth value another one."""
    for match in re.finditer(r"(?<![\w.\"'])\d+(?![\w.\"'])", line):
        yield f"{line[: match.start()]}{int(match.group()) + 1}{line[match.end() :]}"
    for old, new in (("true", "false"), ("false", "true"), ("True", "False"), ("False", "True")):
        for match in re.finditer(rf"\b{old}\b", line):
            yield f"{line[: match.start()]}{new}{line[match.end() :]}"


def dropped(line: str) -> Iterator[str]:
    """Nothing in place of a line that is a whole statement."""
    statement = line.strip()
    indent = line[: line.index(statement)] if statement else ""
    if not indent or statement.count("(") != statement.count(")"):
        return
    if re.fullmatch(rf"({CALL}|(\+\+|--)?[\w.>\-\[\]]+( [+\-|]?= [^{{]+)?);", statement):
        yield indent + ";"
    elif re.fullmatch(rf"({CALL}|[\w.]+ [+\-]= .+)", statement):
        yield indent + "pass"


def swapped(line: str) -> Iterator[str]:
    """The line, with two neighbouring arguments of a call in the other order."""
    for match in re.finditer(r"(?<=[(\s])([\w.]+), ([\w.]+)(?=[,)])", line):
        first, second = match.groups()
        if first != second and not re.match(r"\s*(def|class|template|for|from|import|void|struct)\b", line):
            yield f"{line[: match.start()]}{second}, {first}{line[match.end() :]}"


def skipped_waits(line: str) -> Iterator[str]:
    """Nothing in place of a wait."""
    if WAITS.search(line):
        yield from dropped(line)


KINDS: dict[str, Callable[[str], Iterator[str]]] = {
    "comparison": comparisons,
    "constant": constants,
    "dropped statement": dropped,
    "swapped arguments": swapped,
    "skipped wait": skipped_waits,
}


def lines_of_code(path: Path) -> list[int]:
    """Numbers, from 0, of lines that are neither comments nor documentation, nor declare what is elsewhere."""
    lines = path.read_text().splitlines()
    left_out: set[int] = set()
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(path.read_text())):
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            is_left_out = is_text or isinstance(node, (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom))
            if is_left_out and isinstance(node, (ast.stmt, ast.expr)):
                left_out.update(range(node.lineno - 1, (node.end_lineno or node.lineno)))
    skipped = re.compile(r"\s*($|#|//|using|template|\"|f\"|static_assert|constexpr\b.*\bauto\b)")
    return [number for number, line in enumerate(lines) if number not in left_out and not skipped.match(line)]


def candidates(area: str, kind: str) -> list[Mutant]:
    """All that there are in the sources of one folder."""
    found = []
    for path in sorted(path for path in (ROOT / area).rglob("*") if path.suffix in (".py", ".cpp", ".h")):
        lines = path.read_text().splitlines()
        for number in lines_of_code(path):
            occurrence = lines[:number].count(lines[number])
            file = path.relative_to(ROOT).as_posix()
            code = COMMENT.sub("", lines[number])
            found += [Mutant(kind, file, lines[number], occurrence, mutated) for mutated in KINDS[kind](code)]
    return found


def apply(mutant: Mutant, root: Path) -> None:
    """Change the file below ``root``."""
    path = root / mutant.file
    lines = path.read_text().split("\n")
    places = [number for number, line in enumerate(lines) if line == mutant.line]
    if len(places) <= mutant.occurrence:
        raise LookupError(f"{mutant.file} has no line {mutant.line.strip()!r}: choose anew, or correct mutants.json")
    lines[places[mutant.occurrence]] = mutant.mutated
    path.write_text("\n".join(lines))


def compiles(mutant: Mutant, sources: Path) -> bool:
    """Whether a compiler takes it, as far as one file tells; ``sources``: a copy of them."""
    path = sources / mutant.file
    before = path.read_text()
    try:
        apply(mutant, sources)
        if path.suffix == ".py":
            return compile(path.read_text(), path, "exec", dont_inherit=True) is not None
        includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
        flags = ["-std=c++20", "-fsyntax-only", "-w", "-DTORCH_EXTENSION_NAME=_C", f"-I{sources / 'csrc'}"]
        command = ["g++", "-x", "c++", *flags, *(f"-isystem{folder}" for folder in includes), str(path)]
        return subprocess.run(command, capture_output=True).returncode == 0
    except SyntaxError:
        return False
    finally:
        path.write_text(before)


def choose(sources: Path) -> list[Mutant]:
    """As many as there shall be, each kind as often as the others; ``sources``: a copy, to try them in."""
    dice = random.Random(SEED)
    chosen: list[Mutant] = []
    for area, how_many in HOW_MANY.items():
        there = {kind: candidates(area, kind) for kind in KINDS}
        kinds = [kind for kind in KINDS if there[kind]]
        for number in range(how_many):
            while True:
                mutant = dice.choice(there[kinds[number % len(kinds)]])
                same_line = any((mutant.file, mutant.line) == (other.file, other.line) for other in chosen)
                if not same_line and compiles(mutant, sources):
                    break
            chosen.append(mutant)
    return chosen


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for area in HOW_MANY:
            shutil.copytree(ROOT / area, Path(folder) / area)
        chosen = choose(Path(folder))
    LIST.write_text(json.dumps([dataclasses.asdict(mutant) for mutant in chosen], indent=1) + "\n")
