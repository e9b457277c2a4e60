"""A package ``fastddp`` in a folder of its own: the Python files that are installed, with another extension."""

from __future__ import annotations

from pathlib import Path

from fastddp import _C

ROOT = Path(__file__).resolve().parent.parent


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
