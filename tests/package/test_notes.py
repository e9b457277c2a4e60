"""A note that is cited exists: ``note [X]`` is explained somewhere in the sources as ``Note [X]``."""

from __future__ import annotations

import re
from pathlib import Path

from repository import ROOT

FOLDERS = ("csrc", "fastddp", "kernels", "tests", "docs")
KINDS = {".cpp", ".h", ".py", ".md"}
NOTE = re.compile(r"\b([Nn])otes? ((?:\[[^\]]+\](?:, `[^`]+`,)?(?: and |, )?)+)")


def text_of(path: Path) -> str:
    """In one line: a name may go on in the next line of a comment."""
    return re.sub(r"\n\s*(?://|#)?\s*", " ", path.read_text())


def test_every_note_that_is_cited_exists() -> None:
    known: set[str] = set()
    cited: dict[str, str] = {}
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.suffix in KINDS]
    for path in paths:
        if path == Path(__file__).resolve():
            continue
        for first, names in NOTE.findall(text_of(path)):
            for name in re.findall(r"\[([^\]]+)\]", names):
                known.add(name) if first == "N" else cited.setdefault(name, str(path.relative_to(ROOT)))
    assert cited
    assert {name: path for name, path in cited.items() if name not in known} == {}
