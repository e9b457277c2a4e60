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


def check(folder: Path, names: set[str]) -> None:
    wheel = folder / "fastddp-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    packaging_check.check_wheel(wheel)


def test_a_whole_wheel_passes_and_one_with_a_file_less_or_more_does_not(tmp_path: Path) -> None:
    check(tmp_path, WHEEL | {"fastddp-1.dist-info/METADATA"})
    for name in ("fastddp/py.typed", "fastddp/tools/trace/page.js", "fastddp/_build_info.py", "fastddp_command.py"):
        with pytest.raises(SystemExit, match=name):
            check(tmp_path, WHEEL - {name})
    with pytest.raises(SystemExit, match=r"holds \['fastddp/gone\.py'\]"):
        check(tmp_path, WHEEL | {"fastddp/gone.py"})
