"""An extension for another torch is refused with a sentence, before anything is loaded."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import pytest
import torch

from fastddp import _build_check

RELEASE = ".".join(torch.__version__.split(".")[:2])


@pytest.mark.parametrize("version", [torch.__version__, f"{RELEASE}.99+cu999"])
def test_any_patch_release_of_the_torch_that_it_was_built_for_will_do(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    _build_check.check_build()


@pytest.mark.tier("slow")
def test_another_minor_version_is_named_with_the_command_that_rebuilds() -> None:
    # -P: what is installed, which is not what lies in this folder if a torch was named to make.
    code = "import torch; torch.__version__ = '2.999.0'; import fastddp"
    ended = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    said = ended.stderr.strip().splitlines()[-1]
    assert said.startswith("ImportError: fastddp was built for torch 2.")
    assert "but torch 2.999.0 is imported" in said
    assert "pip install --no-build-isolation" in said


def test_an_extension_that_was_never_built_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    find: Any = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "fastddp._C" else find(name))
    with pytest.raises(ImportError, match=r"fastddp\._C has not been built"):
        _build_check.check_build()
