"""The package in a folder of its own, with another extension; and extensions that are linked with its objects."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

from fastddp import _C
from repository import ROOT

CSRC = ROOT / "csrc"


def compiled_objects() -> dict[Path, Path]:
    """By unit (setup.py), a file that includes sources of csrc/: the object that the build in place has made of it."""
    objects = ROOT / "build" / f"objects-torch-{torch.__version__}-{sysconfig.get_config_var('SOABI')}"
    units = {*(ROOT / "build" / "units").glob("*.cpp")} - {ROOT / "build" / "units" / "pages.cpp"}  # of another library
    return {unit: objects / "build" / "units" / f"{unit.stem}.o" for unit in units}


def load_with_fastddp(source: Path, folder: Path) -> Path:
    """Compile ``source``, a Python extension, into ``folder``, and return its library.

    It is linked with the objects of fastddp._C, whose functions that library keeps to itself.
    """
    objects = [path for unit, path in compiled_objects().items() if unit.stem != "bindings"]
    cpp_extension.load(
        source.stem,
        [str(source)],
        extra_include_paths=[str(CSRC)],
        extra_cflags=["-std=c++20", "-O0", "-g0"],
        extra_ldflags=[str(path) for path in objects],
        build_directory=str(folder),
        is_python_module=False,
    )
    return folder / f"{source.stem}.so"


def import_library(library: Path) -> Any:
    name = library.stem
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def link_package(folder: Path) -> Path:
    """Make ``folder/fastddp``, without its extension; returns where that one belongs."""
    package = folder / "fastddp"
    package.mkdir(parents=True)
    installed = Path(_C.__file__).parent  # with the record of the torch that it was built for
    for path in installed.iterdir():
        is_package = (path / "__init__.py").exists() and path.name != "kernels"
        if path.suffix == ".py" or path.name.startswith("_pages.") or is_package:
            (package / path.name).symlink_to(path)
    (package / "kernels").symlink_to(ROOT / "kernels")
    return package / Path(_C.__file__).name
