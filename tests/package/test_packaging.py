"""The version says which torch a build fits, and an sdist holds every file that a build reads."""

from __future__ import annotations

import importlib.metadata
import zipfile
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


WHEEL = {
    *(name.replace("kernels/", "fastddp/kernels/") for name in packaging_check.sources() if "csrc" not in name),
    *("fastddp/_build_info.py", "fastddp/_C.cpython-311.so"),
} - {*packaging_check.TOP}


def archived(folder: Path, names: set[str]) -> Path:
    wheel = folder / "fastddp-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return wheel


def test_a_whole_wheel_passes(tmp_path: Path) -> None:
    packaging_check.check_wheel(archived(tmp_path, WHEEL | {"fastddp-1.dist-info/METADATA"}))


@pytest.mark.parametrize(
    "name",
    [
        "fastddp/py.typed",
        "fastddp/_C.pyi",
        "fastddp/trace/page.css",
        "fastddp/trace/page.html",
        "fastddp/trace/page.js",
        "fastddp/kernels/pack_kernels.py",
        "fastddp/_build_info.py",
        "fastddp_command.py",
    ],
)
def test_a_wheel_without_a_file_does_not(tmp_path: Path, name: str) -> None:
    assert name in WHEEL
    with pytest.raises(SystemExit, match=name):
        packaging_check.check_wheel(archived(tmp_path, WHEEL - {name}))


def test_a_wheel_with_a_module_that_is_gone_does_not(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"holds \['fastddp/gone\.py'\]"):
        packaging_check.check_wheel(archived(tmp_path, WHEEL | {"fastddp/gone.py"}))
