"""Folders refer only to those before them in docs/design.md: data flows one way, nothing goes in circles.

In csrc/ by includes, in fastddp/ by imports, those for type checkers and those in functions too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import pytest

from repository import ROOT

Name = TypeVar("Name")


def order(heading: str) -> list[str]:
    """The folders and files below ``heading``, as design.md lists them."""
    section = (ROOT / "docs" / "design.md").read_text().split(f"| {heading} | knows | does not know |")[1]
    return re.findall(r"^\| `(\w+(?:/|\.py))` \|", section.split("\n\n")[0], re.MULTILINE)


def upward(part: str, used: Collection[str], parts: list[str]) -> list[str]:
    """What a file of ``part`` must not use; ``used``: the parts that it uses."""
    return sorted(set(used) - set(parts[: parts.index(part) + 1]))


def in_circles(uses: Mapping[Name, Collection[Name]]) -> set[Name]:
    """Those that use themselves by way of others, and whoever uses them."""
    left = dict(uses)
    while free := [name for name, used in left.items() if not left.keys() & set(used)]:
        for name in free:
            del left[name]
    return set(left)


# ---------------------------------------------------------------------------------------------------------------- csrc

CSRC = ROOT / "csrc"
SOURCES = sorted(path.relative_to(CSRC) for path in CSRC.rglob("*.[ch]*"))
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
FOLDERS = "folder of `csrc/`"


def includes_of(source: Path) -> set[Path]:
    return {Path(path) for path in INCLUDE.findall((CSRC / source).read_text())}


def test_design_md_lists_every_folder() -> None:
    assert sorted(order(FOLDERS)) == sorted(f"{path.name}/" for path in CSRC.iterdir() if path.is_dir())


def test_every_file_is_in_a_folder() -> None:
    assert {len(path.parts) for path in SOURCES} == {2}


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_includes_go_one_way(source: Path) -> None:
    included = includes_of(source)
    assert all((CSRC / path).is_file() for path in included), "includes are written from csrc/ on"
    assert upward(f"{source.parts[0]}/", [f"{path.parts[0]}/" for path in included], order(FOLDERS)) == []


def test_no_headers_include_each_other() -> None:
    assert in_circles({path: includes_of(path) for path in SOURCES if path.suffix == ".h"}) == set()


# ------------------------------------------------------------------------------------------------------------- fastddp

PACKAGE = ROOT / "fastddp"
PARTS = "part of `fastddp/`"
# What the build writes or maps into the package: it imports nothing of fastddp's, and everybody may import it.
BENEATH = {"fastddp._C", "fastddp._build_info", "fastddp.kernels"}


def module_name(path: Path) -> str:
    """As it is imported."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_name(path): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name != "_build_info.py" and "kernels" not in path.parts
}


def part_of(module: str) -> str:
    """The folder, or the file that is in none."""
    path = MODULES[module].relative_to(PACKAGE)
    return f"{path.parts[0]}/" if len(path.parts) > 1 else path.name


def names_in(code: str) -> Iterator[str]:
    """Every dotted name that Python code imports, wherever it does."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written from fastddp on"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_of(code: str) -> set[str]:
    """The modules of fastddp among them; of ``from module import name``, the module."""
    found = set()
    for name in names_in(code):
        while name.startswith("fastddp") and name not in MODULES.keys() | BENEATH:
            name = name.rpartition(".")[0]
        if name in MODULES:
            found.add(name)
    return found


IMPORTS = {module: imports_of(path.read_text()) for module, path in MODULES.items()}


def test_design_md_lists_every_part_of_the_package() -> None:
    assert sorted(order(PARTS)) == sorted({part_of(module) for module in MODULES})


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module: str) -> None:
    assert upward(part_of(module), [part_of(imported) for imported in IMPORTS[module]], order(PARTS)) == []


def test_no_modules_import_each_other() -> None:
    assert in_circles(IMPORTS) == set()
