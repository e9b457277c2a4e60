"""An extension for another torch is refused with a sentence, before anything is loaded."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from fastddp import _build_check

RELEASE = ".".join(torch.__version__.split(".")[:2])


@pytest.mark.parametrize("version", [torch.__version__, f"{RELEASE}.99+cu999"])
def test_any_patch_release_of_its_torch_will_do(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    _build_check.check_build()


def test_an_extension_that_was_never_built_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    find: Any = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "fastddp._C" else find(name))
    with pytest.raises(ImportError, match=r"fastddp\._C has not been built"):
        _build_check.check_build()
