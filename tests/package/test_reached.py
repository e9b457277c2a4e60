"""What a user can set is read by the engine, and what C++ offers to Python is used: nothing is left of what went."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main

import fastddp
from fastddp.comm_hooks import BlockState, CompressState, PowerSGDState
from fastddp.config import Config
from fastddp.tools.commands import app
from repository import ROOT, TESTS

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


@pytest.mark.parametrize("kind", OPTIONS, ids=lambda kind: kind.__name__)
def test_options_are_read(kind: Any) -> None:
    read = set[str]().union(*(attributes(path) for path in ENGINE))
    assert OPTIONS[kind] - read - IGNORED == set()


def test_what_the_extension_offers_is_used() -> None:
    stubs = (ROOT / "fastddp" / "_C.pyi").read_text()
    nodes = [*ast.walk(ast.parse(stubs))]
    offered = {node.name for node in nodes if isinstance(node, (ast.ClassDef, ast.FunctionDef))} - {"__init__"}
    offered |= {ast.unparse(node.target) for node in nodes if isinstance(node, ast.AnnAssign)}
    used = set(re.findall(r"\w+", " ".join(path.read_text() for path in USERS)))
    named = set(re.findall(r"\w+", " ".join(re.findall(r"->.*|: .*|(?<=\()\w+(?=\):)", stubs))))  # returned, or a base
    assert offered - used - named == set()


def test_commands_stand_on_the_page_of_commands() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert {command for command in commands if f"fastddp {command}" not in page} == set()
