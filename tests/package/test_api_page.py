"""docs/api.md names every public name of the package, with its arguments and defaults, and none that does not exist."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

import fastddp
from fastddp import comm_hooks
from fastddp.planning.profile import Profile
from fastddp.tools.commands import app
from repository import ROOT

PAGE = ROOT / "docs" / "api.md"
LISTED = re.compile(r"- ((?:`[^`]+`(?:, )?)+)")
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def sections() -> dict[str, list[str]]:
    """The lines below each heading that is a name."""
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


def named(spans: list[str]) -> set[str]:
    return {span.partition("(")[0] for span in spans}


# What there is. The package's two lists of names are where it begins; what is returned or held by something public is
# public, too.


def returned(function: Any) -> object:
    function = inspect.unwrap(function)
    annotation = inspect.signature(function).return_annotation
    return eval(annotation, function.__globals__) if isinstance(annotation, str) else annotation


def is_ours(value: object) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] == "fastddp"


def classes_in(annotation: object) -> Iterator[type]:
    """Fastddp's own classes in ``annotation``, inside of ``|``, ``tuple`` and the like."""
    if isinstance(annotation, type) and not typing.get_args(annotation) and is_ours(annotation):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from classes_in(argument)


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


def held(cls: type) -> Iterator[object]:
    """Annotations of what an object of ``cls`` holds and returns."""
    if dataclasses.is_dataclass(cls):
        yield from typing.get_type_hints(cls).values()
    yield from (returned(function) for attribute in attributes(cls).values() if (function := function_of(attribute)))


def public_classes() -> set[type]:
    named_here = [getattr(module, name) for module in (fastddp, comm_hooks) for name in module.__all__]
    functions = [value for value in named_here if inspect.isfunction(value) and is_ours(value)]
    waiting = [value for value in named_here if isinstance(value, type) and is_ours(value)]
    waiting += [Profile, *(cls for function in functions for cls in classes_in(returned(function)))]
    found: set[type] = set()
    while waiting:
        cls = waiting.pop()
        if cls not in found:
            found.add(cls)
            waiting += [other for annotation in held(cls) for other in classes_in(annotation)]
    return found


def resolved(path: str) -> Any:
    """What a dotted name stands for. The module, where a package has something else of its name."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        return functools.reduce(getattr, parts[length:], value)
    raise AttributeError(path)


CLASSES = {path: resolved(path) for path in SECTIONS if path.startswith("fastddp.") and path != "fastddp.comm_hooks"}


def test_all_classes_have_a_section() -> None:
    assert set(CLASSES.values()) == public_classes()


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


def test_each_command_has_a_section() -> None:
    commands = {section for section in SECTIONS if re.fullmatch(r"fastddp \w+", section)}
    assert commands == {f"fastddp {name}" for name in COMMANDS}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_have_their_options_and_defaults(command: str) -> None:
    page = {option: default for names, default in rows(f"fastddp {command}") for option in names}
    options = [parameter for parameter in COMMANDS[command].params if parameter.param_type_name == "option"]
    expected = {name: default_of(option) for option in options for name in option.opts}
    assert {name: default for name, default in page.items() if name.startswith("-")} == expected


def default_of(option: Any) -> str:
    return "" if option.default in (None, False) else str(getattr(option.default, "value", option.default))


def names_in_text() -> list[str]:
    """Whatever the page calls ``fastddp.x.y``, ``comm_hooks.x`` or ``model.x``."""
    text = " ".join(re.findall("`([^`]+)`", PAGE.read_text()))
    found = sorted(set(re.findall(r"(?<![\w.])(?:fastddp|comm_hooks|model)(?:\.\w+)+", text)))
    prefixes = {"comm_hooks": "fastddp.comm_hooks", "model": "fastddp.DistributedDataParallel"}
    return [prefixes.get(name.split(".")[0], name.split(".")[0]) + name[name.index(".") :] for name in found]


def test_names_in_the_text_exist() -> None:
    for name in names_in_text():
        resolved(name)
