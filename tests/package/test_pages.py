"""The README's links lead somewhere, it is short, and the smallest example trains."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from repository import ROOT

README = ROOT / "README.md"
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_of_the_readme_lead_somewhere() -> None:
    """Make docs does the same for all other pages."""
    for link in LINK.findall(CODE.sub("", README.read_text())):
        if link.startswith(("http:", "https:")):
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / name).resolve() if name else README
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_readme_takes_no_longer_than_800_words() -> None:
    assert len(README.read_text().split()) <= 800


@pytest.mark.tier("slow")
def test_the_smallest_example_trains() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = subprocess.run(
        [*torchrun, str(ROOT / "examples" / "minimal.py")], capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 0, ended.stderr
    losses = [float(line.rpartition(" ")[2]) for line in ended.stdout.splitlines()]
    assert len(losses) == 5
    assert losses[-1] < 0.01 * losses[0] or losses[-1] < 1e-4
