"""Which folder has fastddp's C++ part for the torch that is there: one of the package's, or one of the user's cache."""

from __future__ import annotations

import os
import runpy
from collections.abc import Iterator
from pathlib import Path

from fastddp.extension.compiling import Torch, digest

PACKAGED = Path(__file__).parent
"""Has the folders that came with fastddp, or that were compiled beside it for all users."""


def candidates(torch: Torch) -> Iterator[Path]:
    """The folders that fit, the best one first.

    Raises:
        OSError: the user has no home.
    """
    for folder in (of_package, of_cache):
        if (found := folder(torch)).is_dir():
            yield found


def of_package(torch: Torch) -> Path:
    """Where the package has it, if it has it. Trusted by its name: it came with this fastddp."""
    return PACKAGED / torch.folder_name


def of_cache(torch: Torch) -> Path:
    """Where it is kept if it was compiled here: for this torch and Python, these sources and this libc."""
    return cache() / f"{torch.folder_name}-{digest(torch)}"


def cache() -> Path:
    """The folder in the user's cache.

    Raises:
        OSError: the user has no home.
    """
    named = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(named) if named else Path("~/.cache").expanduser()) / "fastddp"
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from None


def torch_of(folder: Path) -> str:
    """The version of torch that it was compiled for."""
    return str(runpy.run_path(str(folder / "_build_info.py"))["torch_version"])


def releases() -> str:
    """Those of torch that the package has it for, in words."""
    names = sorted({folder.name.split("-")[1] for folder in PACKAGED.glob("torch-*")})
    return f"torch {', '.join(names)} alone" if names else "none"
