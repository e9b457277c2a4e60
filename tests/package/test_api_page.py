"""docs/api.md names every public name of the package, with its arguments and defaults, and none that does not exist."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import typer.main

import fastddp
from fastddp import comm_hooks
from fastddp.planning.profile import Profile
from fastddp.tools.commands import app
from repository import ROOT

PAGE = ROOT / "docs" / "api.md"
LISTED = re.compile(r"- ((?:`[^`]+`(?:, )?)+)")
LAZY = {"torch": torch, "Tensor": torch.Tensor}  # for type checkers alone, in modules that do without torch
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def sections() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in PAGE.read_text().splitlines():
        if line.startswith("#"):
            name = re.fullmatch(r"## `([^`]+)`", line)
            lines = found.setdefault(name[1], []) if name else []
        lines.append(line)
    return found


SECTIONS = sections()


def members(section: str) -> list[str]:
    """What the section lists, as it is written: ``name`` or ``name(arguments)``."""
    matches = [LISTED.match(line) for line in SECTIONS[section]]
    return [span for match in matches if match for span in re.findall("`([^`]+)`", match[1])]


def rows(section: str) -> list[tuple[list[str], str]]:
    """Of the section's table of arguments: the names in the first cell, and the default."""
    cells = [line.split("|")[1:3] for line in SECTIONS[section] if line.startswith("| `")]
    return [(re.findall("`([^`]+)`", names), default.strip().strip("`")) for names, default in cells]


def resolved(path: str) -> Any:
    """What a dotted name stands for. The module, where a package has something else of its name."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        with contextlib.suppress(ImportError):
            return functools.reduce(getattr, parts[length:], importlib.import_module(".".join(parts[:length])))
    raise AttributeError(path)


def is_ours(value: object) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] == "fastddp"


def attributes(cls: type) -> dict[str, object]:
    """The public ones that fastddp's own classes among ``cls`` and its bases define."""
    found: dict[str, object] = {}
    for base in reversed([base for base in cls.__mro__ if is_ours(base)]):
        fields = dataclasses.fields(base) if dataclasses.is_dataclass(base) else ()
        found |= {**{field.name: None for field in fields}, **vars(base)}
    if cls is comm_hooks.PowerSGDState:
        found = {**vars(comm_hooks.PowerSGDState(None)), **found}
    return {name: value for name, value in found.items() if not name.startswith("_")}


def function_of(attribute: object) -> Any:
    """What is called to get a value, and None for a plain attribute."""
    if isinstance(attribute, property):
        return attribute.fget
    if isinstance(attribute, functools.cached_property):
        return attribute.func
    if isinstance(attribute, (classmethod, staticmethod)):
        return attribute.__func__
    return attribute if inspect.isfunction(attribute) else None


def of_annotations(value: Any) -> Iterator[type]:
    """Fastddp's classes among what a function returns or what a class holds and its functions return."""
    hints = list(typing.get_type_hints(value, None, LAZY).values()) if dataclasses.is_dataclass(value) else []
    functions = [function_of(one) for one in attributes(value).values()] if isinstance(value, type) else [value]
    hints += [
        typing.get_type_hints(inspect.unwrap(function), None, LAZY).get("return") for function in functions if function
    ]
    for hint in hints:  # inside of ``|``, ``tuple`` and the like, too
        yield from (one for one in (hint, *typing.get_args(hint)) if isinstance(one, type) and is_ours(one))


def public_classes() -> set[type]:
    """Those that the package's two lists name, and what is returned or held by something public."""
    waiting = [getattr(module, name) for module in (fastddp, comm_hooks) for name in module.__all__]
    waiting = [
        Profile,
        *(value for value in waiting if is_ours(value) and (isinstance(value, type) or callable(value))),
    ]
    found: set[Any] = set()
    while waiting:
        value = waiting.pop()
        if value not in found:
            found.add(value)
            waiting += of_annotations(value)
    return {value for value in found if isinstance(value, type)}


CLASSES = {path: resolved(path) for path in SECTIONS if path.startswith("fastddp.") and path != "fastddp.comm_hooks"}


def test_all_classes_have_a_section() -> None:
    assert set(CLASSES.values()) == public_classes()


def named(spans: list[str]) -> set[str]:
    return {span.partition("(")[0] for span in spans}


@pytest.mark.parametrize("module", ["fastddp", "fastddp.comm_hooks"])
def test_modules_list_what_is_in_all(module: str) -> None:
    assert named(members(module)) == set(resolved(module).__all__)


@pytest.mark.parametrize("path", CLASSES)
def test_classes_list_their_public_attributes(path: str) -> None:
    there = attributes(CLASSES[path])
    in_table = {name for names, _ in rows(path) for name in names if function_of(there.get(name)) is None}
    assert named(members(path)) == there.keys() - in_table


def parameters(function: Any) -> dict[str, object]:
    """Names of a function's parameters, with their stars, and defaults; ``self`` and ``cls`` are left out."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = inspect.signature(function).parameters.values()
    return {stars.get(p.kind, "") + p.name: p.default for p in found if p.name not in ("self", "cls")}


def written(span: str) -> dict[str, object]:
    """The same of ``name(arguments)``, as the page writes it."""
    definition = ast.parse(f"def {span}: ...").body[0]
    assert isinstance(definition, ast.FunctionDef)
    function = ast.Lambda(args=definition.args, body=ast.Constant(None))
    return parameters(eval(compile(ast.fix_missing_locations(ast.Expression(function)), str(PAGE), "eval")))


@pytest.mark.parametrize("path", ["fastddp", "fastddp.comm_hooks", *CLASSES])
def test_functions_have_their_arguments_and_defaults(path: str) -> None:
    owner = resolved(path)
    for span in members(path):
        name, parenthesis, _ = span.partition("(")
        attribute = attributes(owner).get(name) if isinstance(owner, type) else getattr(owner, name)
        is_value = isinstance(attribute, (property, functools.cached_property))
        function = None if is_value else function_of(attribute)
        if function is not None and is_ours(function):
            assert written(span) == parameters(function), span
        else:
            assert not parenthesis, f"{span} is not a function of fastddp's"


@pytest.mark.parametrize("path", [path for path in CLASSES if rows(path)])
def test_constructors_have_their_arguments_and_defaults(path: str) -> None:
    empty = inspect.Parameter.empty
    known = {"Watch": fastddp.Watch}
    page = {names[0]: eval(default, known) if default else empty for names, default in rows(path)}
    assert list(page.items()) == list(parameters(CLASSES[path].__init__).items())


def test_commands_have_a_section_with_their_options_and_defaults() -> None:
    assert {section for section in SECTIONS if re.fullmatch(r"fastddp \w+", section)} == {
        f"fastddp {c}" for c in COMMANDS
    }
    for name, command in COMMANDS.items():
        page = {option: default for names, default in rows(f"fastddp {name}") for option in names}
        expected = {}
        for option in (parameter for parameter in command.params if parameter.param_type_name == "option"):
            default = "" if option.default in (None, False) else str(getattr(option.default, "value", option.default))
            expected |= dict.fromkeys(option.opts, default)
        assert {option: default for option, default in page.items() if option.startswith("-")} == expected, name


def test_names_in_the_text_exist() -> None:
    """Whatever the page calls ``fastddp.x.y``, ``comm_hooks.x`` or ``model.x``."""
    text = " ".join(re.findall("`([^`]+)`", PAGE.read_text()))
    prefixes = {"comm_hooks": "fastddp.comm_hooks", "model": "fastddp.DistributedDataParallel"}
    for name in set(re.findall(r"(?<![\w.])(?:fastddp|comm_hooks|model)(?:\.\w+)+", text)):
        first, _, rest = name.partition(".")
        resolved(f"{prefixes.get(first, first)}.{rest}")
