"""Folders of csrc/ refer only to those before them in docs/design.md: data flows one way, nothing goes in circles."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
SOURCES = sorted(path.relative_to(CSRC) for path in CSRC.rglob("*.[ch]*"))
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


def order() -> list[str]:
    """The folders, as design.md lists them."""
    section = (ROOT / "docs" / "design.md").read_text().split("| folder | knows | does not know |")[1]
    return re.findall(r"^\| `(\w+)/` \|", section.split("\n\n")[0], re.MULTILINE)


def upward(folder: str, included: list[str], folders: list[str]) -> list[str]:
    """What a file of ``folder`` must not include."""
    allowed = folders[: folders.index(folder) + 1]
    return [path for path in included if path.split("/")[0] not in allowed]


def test_design_md_lists_every_folder() -> None:
    assert sorted(order()) == sorted(path.name for path in CSRC.iterdir() if path.is_dir())


def test_every_file_is_in_a_folder() -> None:
    assert {len(path.parts) for path in SOURCES} == {2}


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_includes_go_one_way(source: Path) -> None:
    included = INCLUDE.findall((CSRC / source).read_text())
    assert all((CSRC / path).is_file() for path in included), "includes are written from csrc/ on"
    assert upward(source.parts[0], included, order()) == []


def includes_of(source: Path) -> set[Path]:
    return {Path(path) for path in INCLUDE.findall((CSRC / source).read_text())}


def test_no_headers_include_each_other() -> None:
    left = {path: includes_of(path) for path in SOURCES if path.suffix == ".h"}
    while free := [path for path, included in left.items() if not included & left.keys()]:
        for path in free:
            del left[path]
    assert not left


def test_an_include_that_goes_up_is_found() -> None:
    included = ["device/streams.h", "codec/codec.h", "pipeline/exchange.h"]
    assert upward("codec", included, ["device", "codec", "pipeline"]) == ["pipeline/exchange.h"]
