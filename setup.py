"""Names the packages, and compiles the C++ part into them where there is a torch to compile it for.

    pip install .                        # pip's own environment has none: a second. The first import compiles
    pip install --no-build-isolation .   # for the torch of this environment
    python setup.py bdist_wheel build_ext --torches=FOLDER:FOLDER   # for those in these folders (make wheels)

Everything else is in ``pyproject.toml``.
"""

import logging
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent

# Without the package around it, which needs torch.
sys.path.append(str(ROOT / "fastddp" / "extension"))
import compiling  # noqa: E402

TORCH = compiling.find_torch()

# setuptools names each file that it copies: what is wrong would stand below hundreds of lines.
logging.disable(logging.INFO)


class BuildPython(build_py):
    """Copies Python files into a folder without those of earlier builds."""

    def run(self) -> None:
        """Empty the folder, which stays from build to build: a module that is gone would be installed again."""
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class Build(build_ext):
    """Compiles into the package, a folder for each torch; objects stay in ``build/`` for the next time."""

    user_options: ClassVar = [*build_ext.user_options, ("torches=", None, "folders of several, separated by ':'")]

    def initialize_options(self) -> None:
        """Without the option: the torch of this environment."""
        super().initialize_options()
        self.torches = ""

    def run(self) -> None:
        """Compile, or end with a line about what is missing."""
        package = (ROOT if self.inplace else Path(self.build_lib)) / "fastddp"
        for torch in [compiling.torch_in(Path(folder)) for folder in self.torches.split(":") if folder] or [TORCH]:
            name = torch.folder_name
            try:
                compiling.check(torch)
                _say(f"compiling its C++ part for torch {torch.version}. It takes {compiling.expected_time()}.")
                compiling.compile_for(torch, ROOT / "build" / f"{name}-{torch.version}", package / "extension" / name)
            except compiling.CannotCompile as error:
                raise SystemExit(f"fastddp cannot be compiled: {error}") from None

    def get_outputs(self) -> list[str]:
        """None that setuptools would have to copy."""
        return []

    def get_output_mapping(self) -> dict[str, str]:
        """None that setuptools would have to link."""
        return {}


def _say(text: str) -> None:
    """To whoever sits there: pip keeps what a build prints to itself."""
    with suppress(OSError), Path("/dev/tty").open("w") as terminal:
        print(f"\nfastddp: {text}", file=terminal)


setup(
    # A top-level package called `kernels` would clash with the one of that name on PyPI: ours lives inside fastddp. So
    # do the sources.
    packages=[*find_packages(include=["fastddp", "fastddp.*"]), "fastddp.kernels", "fastddp.csrc"],
    package_dir={"fastddp.kernels": "kernels", "fastddp.csrc": "csrc"},
    py_modules=["fastddp_command"],
    ext_modules=[] if TORCH is None else [Extension("fastddp._C", [])],
    cmdclass={"build_ext": Build, "build_py": BuildPython},
)
