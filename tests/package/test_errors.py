"""Errors end with codes; each code is in the table of fastddp/errors.py, and each of the table is used."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

import fastddp
from fastddp.errors import ERRORS, see
from fastddp.tools.commands import app
from repository import ROOT

SOURCES = [
    path for tree in ("fastddp", "csrc") for kind in ("py", "cpp", "h") for path in (ROOT / tree).rglob(f"*.{kind}")
]
USED = {
    code
    for path in SOURCES
    if path.name not in ("errors.py", "see.h") and "tools" not in path.parts
    for code in re.findall(r"\bFD\d{3}\b", path.read_text())
}


def test_codes_of_messages_are_those_of_the_table_in_order() -> None:
    assert ERRORS.keys() == USED
    assert list(ERRORS) == sorted(ERRORS)


def test_explanations_are_short_sentences() -> None:
    for code, error in ERRORS.items():
        assert not error.title.endswith("."), code
        for text in (error.cause, error.remedy):
            assert text.endswith("."), code
            assert len(text) < 400, code


def test_an_error_from_python_ends_with_its_code() -> None:
    with pytest.raises(TypeError) as raised:
        fastddp.DistributedDataParallel(None)  # type: ignore[arg-type]
    assert str(raised.value).endswith("got None." + see("FD024"))


def explain(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["explain", *arguments])
    return result.exit_code, " ".join(result.output.split())


def test_the_command_explains_a_code_lists_all_and_refuses_others() -> None:
    status, text = explain("fd010")
    assert (status, text) == (
        0,
        f"FD010: {ERRORS['FD010'].title} {ERRORS['FD010'].cause} What to do: {ERRORS['FD010'].remedy}",
    )
    assert explain() == (0, " ".join(f"{code} {error.title}" for code, error in ERRORS.items()))
    status, text = explain("FD999")
    assert status == 2
    assert f"codes are FD001 to {list(ERRORS)[-1]}" in text
