"""Folders refer only to those before them in docs/design.md: data flows one way, nothing goes in circles.

In csrc/ by includes, in fastddp/ by imports, those for type checkers and those in functions too. And nothing is left of
what went: what a user can set is read by the engine, and what C++ offers to Python is used.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import fastddp
from fastddp.comm_hooks import BlockState, CompressState, PowerSGDState
from fastddp.config import Config
from repository import ROOT, TESTS

CSRC, PACKAGE = ROOT / "csrc", ROOT / "fastddp"
# What the build writes or maps into the package: it imports nothing of fastddp's, and everybody may import it.
BENEATH = {"fastddp._C", "fastddp._pages", "fastddp._build_info", "fastddp.kernels"}
MODULES = {  # as they are imported
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name != "_build_info.py" and "kernels" not in path.relative_to(PACKAGE).parts
}


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


def includes_of(code: str) -> set[str]:
    return set(re.findall(r'^#include "([^"]+)"', code, re.MULTILINE))


SOURCES = {str(path.relative_to(CSRC)): path for path in sorted(CSRC.rglob("*.[ch]*"))}
INCLUDES = {name: includes_of(path.read_text()) for name, path in SOURCES.items()}
HEADERS = {name: used for name, used in INCLUDES.items() if name.endswith(".h")}
IMPORTS = {module: imports_of(path.read_text()) for module, path in MODULES.items()}
# What each uses, and the folder of each, or the file that is in none.
TREES = {
    "folder of `csrc/`": (INCLUDES, {name: f"{path.parent.name}/" for name, path in SOURCES.items()}),
    "part of `fastddp/`": (
        IMPORTS,
        {
            module: path.name if path.parent == PACKAGE else f"{path.relative_to(PACKAGE).parts[0]}/"
            for module, path in MODULES.items()
        },
    ),
}


@pytest.mark.parametrize("tree", TREES)
def test_design_md_lists_every_part_and_each_uses_those_before_it(tree: str) -> None:
    uses, part_of = TREES[tree]
    section = (ROOT / "docs" / "design.md").read_text().split(f"| {tree} | knows | does not know |")[1]
    order = re.findall(r"^\| `(\w+(?:/|\.py))` \|", section.split("\n\n")[0], re.MULTILINE)
    assert sorted(order) == sorted(set(part_of.values()))
    for one, used in uses.items():
        assert [other for other in used if order.index(part_of[other]) > order.index(part_of[one])] == [], one


@pytest.mark.parametrize("uses", [HEADERS, IMPORTS], ids=["csrc", "fastddp"])
def test_nothing_uses_itself_by_way_of_others(uses: dict[str, set[str]]) -> None:
    left = dict(uses)
    while free := [name for name, used in left.items() if not left.keys() & used]:
        for name in free:
            del left[name]
    assert left == {}


def test_collectives_outside_of_windows_go_through_together() -> None:
    """So all end alike, with rank and cause. Works are waited for there too, and numbers gathered."""
    plain = re.compile(r"dist\.(?:all_gather|(?:all_reduce|broadcast|barrier)\((?!.*async_op=True))")
    waits = re.compile(r"\bwork\.wait\(\)")
    found = [
        (module, line.strip())
        for module, path in MODULES.items()
        if module not in ("fastddp.ranks.together", "fastddp.reference") and not module.startswith("fastddp.tools")
        for line in path.read_text().splitlines()
        if plain.search(line) or waits.search(line)
    ]
    assert found == []


WEAK = re.compile(r"\b(\w+)(?:: .+)? = weakref\.Weak(?:Set|KeyDictionary|ValueDictionary)\(")
CALLS = "(?:list|tuple|sorted|set|min|max|any|all|enumerate|iter|next)"


def test_what_is_known_while_it_lives_is_not_walked_as_weakref_does() -> None:
    """Another thread may add to it meanwhile, and that raises: fastddp.ranks.living has what does not."""
    sources = {module: path.read_text() for module, path in MODULES.items()}
    names = {name for source in sources.values() for name in WEAK.findall(source)}
    assert names
    of = rf"(?:\w+\.)*(?:{'|'.join(names)})\b"
    walked = re.compile(rf"\bfor (?:(?! in ).)+ in {of}|\b{CALLS}\({of}[,)]|{of}\.(?:items|keys|values|copy)\(")
    found = [
        (module, line.strip())
        for module, source in sources.items()
        for line in source.splitlines()
        if walked.search(line)
    ]
    assert found == []


# -------------------------------------------------------------------------------------------------- what is reached


OPTIONS: dict[type, set[str]] = {
    kind: {field.name for field in dataclasses.fields(kind)} for kind in (Config, fastddp.Watch)
} | {kind: {*inspect.signature(kind).parameters} for kind in (BlockState, CompressState, PowerSGDState)}
ENGINE = [*(ROOT / "fastddp").rglob("*.py")]
USERS = [*ENGINE, *(ROOT / "bench").rglob("*.py"), *TESTS.rglob("*.py")]


IGNORED = {"batch_tensors_with_same_shape"}
"""Torch's, which says how many launches its hook takes: fastddp's takes one for all matrices of a bucket."""


def attributes(path: Path) -> set[str]:
    """What a file reads of any object, except where an object is made and its arguments are checked."""
    tree = ast.parse(path.read_text())
    makers = {"__init__", "__post_init__"}
    making = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name in makers
        for part in ast.walk(node)
    }
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and id(node) not in making
    }


def test_options_are_read() -> None:
    read = IGNORED.union(*(attributes(path) for path in ENGINE))
    assert {kind.__name__: unread for kind, options in OPTIONS.items() if (unread := options - read)} == {}


def test_what_the_extension_offers_is_used() -> None:
    stubs = (ROOT / "fastddp" / "_C.pyi").read_text()
    nodes = [*ast.walk(ast.parse(stubs))]
    offered = {node.name for node in nodes if isinstance(node, (ast.ClassDef, ast.FunctionDef))} - {"__init__"}
    offered |= {ast.unparse(node.target) for node in nodes if isinstance(node, ast.AnnAssign)}
    used = set(re.findall(r"\w+", " ".join(path.read_text() for path in USERS)))
    named = set(re.findall(r"\w+", " ".join(re.findall(r"->.*|: .*|(?<=\()\w+(?=\):)", stubs))))  # returned, or a base
    assert offered - used - named == set()
