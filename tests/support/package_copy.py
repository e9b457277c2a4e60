"""The package in a folder of its own, with another extension; and extensions that are linked with its objects."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from torch.utils import cpp_extension

import fastddp
from fastddp import _C
from fastddp.extension.compiling import find_torch
from repository import ROOT

CSRC = ROOT / "csrc"


def compiled_objects() -> dict[Path, Path]:
    """By unit, a file that includes sources of csrc/: the object that the build in place has made (compiling.py)."""
    torch = find_torch()
    assert torch is not None
    folder = ROOT / "build" / f"{torch.folder_name}-{torch.version}"
    return {unit: unit.with_suffix(".o") for unit in folder.glob("unit_*.cpp")}


def load_with_fastddp(source: Path, folder: Path) -> Path:
    """Compile ``source``, a Python extension, into ``folder``, and return its library.

    It is linked with the objects of fastddp._C, whose functions that library keeps to itself.
    """
    objects = [path for unit, path in compiled_objects().items() if unit.stem != "unit_bindings"]
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
    package, extension = folder / "fastddp", Path(_C.__file__)
    compiled = package / "extension" / extension.parent.name
    compiled.mkdir(parents=True)
    for path in Path(fastddp.__file__).parent.iterdir():
        if path.name not in ("extension", "kernels", "csrc", "__pycache__"):
            (package / path.name).symlink_to(path)
    for path in [*(Path(fastddp.__file__).parent / "extension").glob("*.py")]:
        (package / "extension" / path.name).symlink_to(path)
    for path in {*extension.parent.iterdir()} - {extension}:
        (compiled / path.name).symlink_to(path)
    for name in ("kernels", "csrc"):
        (package / name).symlink_to(ROOT / name)
    return compiled / extension.name
