"""The version says which torch a build fits, and an sdist holds every file that a build reads."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

import fastddp
import packaging_check
from fastddp import _build_info


def test_the_version_carries_the_torch_that_the_extension_was_built_for() -> None:
    release = ".".join(_build_info.torch_version.split(".")[:2])
    assert fastddp.__version__.partition("+")[2] == f"torch{release}"
    assert importlib.metadata.version("fastddp") == fastddp.__version__


@pytest.mark.tier("nightly")
def test_an_sdist_holds_every_source_and_fits_any_torch(tmp_path: Path) -> None:
    sdist = packaging_check.build_sdist(packaging_check.ROOT, tmp_path)
    packaging_check.check_sdist(sdist)
    assert sdist.name == f"fastddp-{fastddp.__version__.partition('+')[0]}.tar.gz"
