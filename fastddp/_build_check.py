"""One clear sentence when the compiled part of fastddp does not fit the torch that is imported."""

import importlib.util

import torch

_REBUILD = "Run `pip install --no-build-isolation --force-reinstall --no-deps .` in fastddp's source folder to build it"


def check_build() -> None:
    """Raise unless ``fastddp._C`` was built, and for the minor version of the torch that is imported.

    c10d's C++ interface changes with every minor version of torch, so one build serves one minor version.

    Raises:
        ImportError: names both versions and the command that rebuilds.
    """
    if importlib.util.find_spec("fastddp._C") is None or importlib.util.find_spec("fastddp._build_info") is None:
        raise ImportError(f"fastddp's extension fastddp._C has not been built. {_REBUILD}.")
    from fastddp._build_info import torch_version

    if _minor(torch_version) != _minor(torch.__version__):
        raise ImportError(
            f"fastddp was built for torch {torch_version}, but torch {torch.__version__} is imported. "
            f"{_REBUILD} for this torch."
        )


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]
