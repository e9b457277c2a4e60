"""The reference (docs/api.md, made of docstrings): all public names are on it, and docstrings explain all arguments."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import pkgutil
import re
import textwrap
import typing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import typer.main

import fastddp
from fastddp import __main__, comm_hooks
from fastddp.tools.commands import app
from repository import ROOT

PAGE = (ROOT / "docs" / "api.md").read_text()
COMMANDS = (ROOT / "docs" / "commands.md").read_text()


def directives() -> Iterator[tuple[str, list[str] | None]]:
    """What the page shows: dotted names and, of a class, the members that are listed; None: all that are public."""
    for name, options in re.findall(r"^::: (\S+)\n((?:    .*\n)*)", PAGE, re.MULTILINE):
        listed = re.search(r"members:((?:\n +- \w+)+| \[.*\])", options)
        yield name, re.findall(r"\w+", listed[1]) if listed else None


SHOWN = dict(directives())
VALUES = {path: pkgutil.resolve_name(path) for path in SHOWN}


def is_ours(value: object) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] == "fastddp"


def public(cls: type) -> dict[str, Any]:
    """Its own attributes, without those of its bases."""
    return {name: value for name, value in vars(cls).items() if not name.startswith("_")}


def function_of(attribute: Any) -> Any:
    """What is called to get a value, and None for a plain attribute."""
    if isinstance(attribute, property):
        return attribute.fget
    attribute = getattr(attribute, "__func__", attribute)  # of a class or static method
    return inspect.unwrap(attribute) if inspect.isfunction(attribute) else None


LAZY = {"torch": torch, "Tensor": torch.Tensor}  # for type checkers alone, in modules that do without torch


def of_annotations(value: Any) -> Iterator[type]:
    """Fastddp's classes among what a function returns or what a class holds and its functions return."""
    hints = list(typing.get_type_hints(value, None, LAZY).values()) if dataclasses.is_dataclass(value) else []
    bases = [base for base in value.__mro__ if is_ours(base)] if isinstance(value, type) else []
    members = [one for base in bases for one in public(base).values()] if bases else [value]
    functions = [function for function in map(function_of, members) if function]
    hints += [typing.get_type_hints(function, None, LAZY).get("return") for function in functions]
    for hint in hints:  # inside of ``|``, ``tuple`` and the like, too
        yield from (one for one in (hint, *typing.get_args(hint)) if isinstance(one, type) and is_ours(one))


@pytest.mark.parametrize("module", [fastddp, comm_hooks], ids=lambda module: module.__name__)
def test_all_public_names_are_on_the_page(module: Any) -> None:
    """Torch's own functions by name."""
    for name in module.__all__:
        value = getattr(module, name)
        if is_ours(value):
            assert f"{module.__name__}.{name}" in SHOWN
        else:
            assert re.search(rf"`(fastddp\.)?{name}`", PAGE), name


def test_all_classes_that_public_names_lead_to_are_on_the_page() -> None:
    waiting: list[Any] = [getattr(module, name) for module in (fastddp, comm_hooks) for name in module.__all__]
    waiting = [value for value in waiting if is_ours(value) and callable(value)]
    found: set[Any] = set()
    while waiting:
        value = waiting.pop()
        if value not in found:
            found.add(value)
            waiting += of_annotations(value)
    assert {value for value in found if isinstance(value, type)} <= set(VALUES.values())


def test_all_that_the_wrapper_has_is_on_the_page() -> None:
    model = fastddp.DistributedDataParallel
    shown = {name for path, value in VALUES.items() if value in model.__mro__ for name in SHOWN[path] or public(value)}
    has = {name for base in model.__mro__ if is_ours(base) for name in public(base)}
    assert shown == has


def described_arguments(doc: str) -> set[str]:
    """The names under ``Args:``."""
    section = re.search(r"^Args:\n((?:    .*\n|\n)*)", textwrap.dedent(doc) + "\n", re.MULTILINE)
    return set(re.findall(r"^    \*{0,2}(\w+):", section[1], re.MULTILINE)) if section else set()


def check_function(function: Any, doc: str | None, name: str) -> None:
    assert doc, name
    taken = [argument for argument in inspect.signature(function).parameters if argument not in ("self", "cls")]
    assert set(taken) == described_arguments(inspect.cleandoc(doc)), name


def described_fields(cls: type) -> set[str]:
    """Fields with a docstring of their own below."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    pairs = zip(body.body, body.body[1:], strict=False)
    return {
        before.target.id
        for before, after in pairs
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }


@pytest.mark.parametrize("path", SHOWN)
def test_docstrings_explain_all_arguments(path: str) -> None:
    value = VALUES[path]
    if not isinstance(value, type):
        check_function(value, value.__doc__, path)
        return
    assert value.__doc__, path
    if dataclasses.is_dataclass(value):
        fields = {field.name for field in dataclasses.fields(value)}
        assert fields == described_fields(value) | described_arguments(inspect.cleandoc(value.__doc__))
    elif "__init__" in vars(value):
        check_function(inspect.unwrap(value.__init__), value.__doc__, path)  # type: ignore[misc]
    for name in SHOWN[path] or public(value):
        function = function_of(vars(value).get(name))
        if function is not None:
            check_function(function, function.__doc__, f"{path}.{name}")


def options_on_the_page(command: str) -> set[str]:
    section = COMMANDS.partition(f"\n## {command}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`-[^|]*) \|", section, re.MULTILINE)
    return {option for cell in cells for option in re.findall("`([^`]+)`", cell)}


def test_the_page_of_commands_has_all_options() -> None:
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert set(re.findall(r"^## fastddp (\w+)$", COMMANDS, re.MULTILINE)) == commands.keys()
    for name, command in commands.items():
        options = [parameter.opts for parameter in command.params if parameter.param_type_name == "option"]
        assert options_on_the_page(f"fastddp {name}") == {option for forms in options for option in forms}, name
    assert options_on_the_page("python -m fastddp") == __main__._OPTIONS.keys()
