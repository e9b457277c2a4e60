"""A package ``fastddp`` in a folder of its own: the Python files that are installed, with another extension."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

from fastddp import _C
from repository import ROOT

CSRC = ROOT / "csrc"


def compiled_objects() -> dict[Path, Path]:
    """By unit (setup.py), a file that includes sources of csrc/: the object that the build in place has made of it."""
    objects = ROOT / "build" / f"objects-torch-{torch.__version__}-{sysconfig.get_config_var('SOABI')}"
    return {unit: objects / "build" / "units" / f"{unit.stem}.o" for unit in (ROOT / "build" / "units").glob("*.cpp")}


def link_package(folder: Path) -> Path:
    """Make ``folder/fastddp``, without its extension; returns where that one belongs."""
    package = folder / "fastddp"
    package.mkdir(parents=True)
    installed = Path(_C.__file__).parent  # with the record of the torch that it was built for
    for path in installed.iterdir():
        is_package = (path / "__init__.py").exists() and path.name != "kernels"
        if path.suffix == ".py" or is_package:
            (package / path.name).symlink_to(path)
    (package / "kernels").symlink_to(ROOT / "kernels")
    return package / Path(_C.__file__).name
