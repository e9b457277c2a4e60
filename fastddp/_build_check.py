"""A clear error if the compiled part of fastddp does not fit the torch that is imported."""

import importlib.util

import torch

from fastddp.errors import see

REBUILD = (
    "Run `pip install --no-build-isolation --force-reinstall --no-deps .` in fastddp's source folder to build it for "
    "this torch."
)


def misfit() -> str | None:
    """Why the imported torch cannot load ``fastddp._C``, in a sentence; None: it can.

    c10d's C++ interface changes with every minor version of torch, so one build serves one minor version.
    """
    if importlib.util.find_spec("fastddp._C") is None or importlib.util.find_spec("fastddp._build_info") is None:
        return "fastddp's extension fastddp._C has not been built."
    from fastddp._build_info import torch_version

    if _minor(torch_version) != _minor(torch.__version__):
        return f"fastddp was built for torch {torch_version}, but torch {torch.__version__} is imported."
    return None


def check_build() -> None:
    """Raise unless ``fastddp._C`` was built for the minor version of the torch that is imported.

    Raises:
        ImportError: it names both versions and the command that rebuilds.
    """
    what = misfit()
    if what is not None:
        raise ImportError(f"{what} {REBUILD}" + see("FD020"))


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]
