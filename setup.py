"""Builds ``fastddp._C`` and ``fastddp._pages`` from ``csrc/``, records version and torch, and names the packages.

Everything else is in ``pyproject.toml``.
"""

import os
import shutil
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

try:
    import torch
    from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, include_paths
except ImportError as error:
    # torch is not among the build requirements on purpose: an isolated build would fetch the newest one, several GB of
    # it, and compile against that instead of against the torch that will be imported.
    raise SystemExit(
        "fastddp is compiled against the torch that you use. Install torch 2.11 or newer first, then run "
        f"`pip install --no-build-isolation .` in the same environment. ({error})"
    ) from None

ROOT = Path(__file__).parent
VERSION = "0.2.0"
# In the names of folders, so that what was made for one torch never gets into a package for another one, not even by
# two builds at a time.
FOR_THIS_TORCH = f"torch-{torch.__version__}-{sysconfig.get_config_var('SOABI')}"
BUILD_INFO = '''"""Written by setup.py when ``fastddp._C`` was built."""

version = "{version}"
torch_version = "{torch_version}"
nvtx_headers = {nvtx_headers}  # where they were found; empty: the extension tells NVTX nothing
'''


def version() -> str:
    """Says which torch a build fits, as in 0.2.0+torch2.13; not if it is built from an sdist, which fits any.

    An sdist's version is that of whatever is built from it: pip refuses another one.
    """
    if (ROOT / "PKG-INFO").is_file():
        return VERSION
    return f"{VERSION}+torch{'.'.join(torch.__version__.split('.')[:2])}"


# By folder of csrc/: the folder that it is compiled with. They need the same of torch's headers.
TOGETHER = {
    "pages": "device",
    "observe": "device",
    "audit": "device",
    "block8": "codec",
    "low_rank": "codec",
    "autograd": "reducer",
    "window": "reducer",
    "watch": "reducer",
}
# fastddp._pages, which does without torch.
PAGES = ["csrc/pages/shared_page.cpp", "csrc/pages/snapshot.cpp", "csrc/window/window.cpp"]
PAGE_BINDINGS = "csrc/bindings/page_bindings.cpp"


def csrc(pattern: str) -> list[str]:
    """The files of ``csrc/`` that match, relative to this folder as setuptools wants them."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob(pattern))


def units() -> list[str]:
    """Files that include the sources of one folder or more: what is compiled.

    One of these takes not much longer than one of the sources, most of which is torch's headers.
    """
    contents: dict[str, str] = {}
    for source in sorted({*csrc("*.cpp")} - {PAGE_BINDINGS}):
        path = Path(source).relative_to("csrc")
        name = f"build/units/{TOGETHER.get(path.parts[0], path.parts[0])}.cpp"
        contents[name] = contents.get(name, "") + f'#include "{path.as_posix()}"\n'
    contents["build/units/pages.cpp"] = "".join(f'#include "../../{path}"\n' for path in [*PAGES, PAGE_BINDINGS])
    folder = ROOT / "build" / "units"
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        # A file that is written is compiled again.
        if not (ROOT / name).is_file() or (ROOT / name).read_text() != content:
            (ROOT / name).write_text(content)
    for gone in set(folder.glob("*.cpp")) - {ROOT / name for name in contents}:
        gone.unlink()
    return list(contents)


def nvtx_headers() -> list[str]:
    """The folder that holds ``nvtx3/``, of CUDA's toolkit or of NVIDIA's packages for pip; none: build without NVTX."""
    packages = Path(sysconfig.get_path("purelib")) / "nvidia"
    toolkit = [Path(CUDA_HOME) / "include"] if CUDA_HOME else []
    for folder in [*toolkit, Path("/usr/local/cuda/include"), *sorted(packages.glob("*/include"))]:
        if (folder / "nvtx3" / "nvToolsExt.h").is_file():
            return [str(folder)]
    return []


class SourceDistribution(sdist):
    """An sdist of the plain version."""

    def finalize_options(self) -> None:
        """Take the torch of this environment out of the version."""
        super().finalize_options()
        self.distribution.metadata.version = VERSION


class BuildPython(build_py):
    """Copies Python files into a folder without those of earlier builds."""

    def run(self) -> None:
        """Empty the folder, which stays from build to build: a module that is gone would be installed again."""
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class Build(BuildExtension):
    """torch's ninja build, with objects that survive for the next build and a record of torch's version."""

    def finalize_options(self) -> None:
        """Choose where the objects go."""
        super().finalize_options()
        # pip builds in a temporary folder, which would compile every file again each time.
        self.build_temp = f"build/objects-{FOR_THIS_TORCH}"

    def run(self) -> None:
        """Compile, link and record."""
        if not Path(sysconfig.get_path("include"), "Python.h").is_file():
            raise SystemExit(
                f"fastddp is compiled, which needs Python's headers, and {sysconfig.get_path('include')}/Python.h is "
                "not there. Install them (Debian and Ubuntu: apt install python3-dev; Fedora: dnf install "
                "python3-devel) or use another Python."
            )
        # By default ninja starts two jobs more than there are cores; one job on torch's headers takes up to 2 GB.
        os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))
        # Only now: an sdist takes what is named below for a part of the project.
        *of_torch, pages = units()
        self.extensions[0].sources, self.extensions[1].sources = of_torch, [pages]
        super().run()
        # Beside the extension, wherever that went, and only now: the record speaks of what was really compiled.
        record = Path(self.get_ext_fullpath("fastddp._C")).with_name("_build_info.py")
        record.write_text(
            BUILD_INFO.format(
                version=self.distribution.get_version(), torch_version=torch.__version__, nvtx_headers=nvtx_headers()
            )
        )


# -std: torch 2.11 compiles extensions as C++17 unless told otherwise.
# -g0: Python's own flags bring -g, which doubles the time to compile and makes objects 30 times as large.
FLAGS = ["-std=c++20", "-O3", "-g0", "-Wall", "-Wextra", "-Wno-unused-parameter", "-fvisibility=hidden"]

setup(
    version=version(),
    # A top-level package called `kernels` would clash with the one of that name on PyPI: ours lives inside fastddp.
    packages=[*find_packages(include=["fastddp", "fastddp.*"]), "fastddp.kernels"],
    package_dir={"fastddp.kernels": "kernels"},
    py_modules=["fastddp_command"],
    ext_modules=[
        CppExtension(
            "fastddp._C",
            csrc("*.cpp"),
            depends=[*csrc("*.h"), *csrc("*.cpp")],
            include_dirs=[str(ROOT / "csrc"), *nvtx_headers()],
            extra_compile_args=[*FLAGS, "-ffp-contract=off"],  # the same bits on each processor
        ),
        # pybind11 comes with torch's headers, and is all that this takes of them.
        Extension(
            "fastddp._pages",
            [*PAGES, PAGE_BINDINGS],
            depends=[*csrc("*.h"), *PAGES, PAGE_BINDINGS],
            include_dirs=[str(ROOT / "csrc"), *include_paths()],
            extra_compile_args=FLAGS,
            language="c++",
        ),
    ],
    cmdclass={"build_ext": Build, "build_py": BuildPython, "sdist": SourceDistribution},
    options={"build": {"build_lib": f"build/lib-{FOR_THIS_TORCH}"}},
)
