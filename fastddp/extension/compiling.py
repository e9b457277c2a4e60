"""Compiles ``fastddp._C`` and ``fastddp._pages`` for one torch, with ninja and the compiler of this machine.

Of Python's own library alone, and without importing torch: ``setup.py`` takes this file by its path.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import NamedTuple

OLDEST = (2, 11)
"""The first release of torch with everything that the sources use."""

_PACKAGE = Path(__file__).parents[1]
SOURCES = next(
    (folder for folder in (_PACKAGE / "csrc", _PACKAGE.parent / "csrc") if folder.is_dir()), _PACKAGE / "csrc"
)
"""Where the C++ lies: installed with the package, or beside it in a clone."""

_SUFFIX = EXTENSION_SUFFIXES[0]  # as in .cpython-311-x86_64-linux-gnu.so
# -g0: Python's own flags bring -g, which doubles the time to compile and makes objects 30 times as large.
_FLAGS = "-std=c++20 -O3 -g0 -DNDEBUG -fPIC -fwrapv -fvisibility=hidden -Wall -Wextra -Wno-unused-parameter"
_SAME_BITS = "-ffp-contract=off"  # on each processor
# torch's headers call this function, which GCC links, from 12 on, in a version that the libstdc++ of RHEL 9 lacks.
_BEFORE = """\
__asm__(".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE, "
        "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
"""
# By folder of the sources: the folder that it is compiled with. They need the same of torch's headers.
_TOGETHER = {
    "pages": "device",
    "observe": "device",
    "audit": "device",
    "block8": "codec",
    "low_rank": "codec",
    "autograd": "reducer",
    "window": "reducer",
    "watch": "reducer",
}
# fastddp._pages does without torch; pybind11 comes with torch's headers.
_PAGE_BINDINGS = "bindings/page_bindings.cpp"
_PAGES = ("pages/shared_page.cpp", "pages/snapshot.cpp", "window/window.cpp", _PAGE_BINDINGS)
_LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")
_SECONDS_OF_ONE_CORE = 330  # 165 and 460 were measured
_BUILD_INFO = '''"""Written when ``fastddp._C`` was compiled."""

torch_version = "{torch.version}"
nvtx_headers = {nvtx}  # where they were found; empty: the extension tells NVTX nothing
'''


class Torch(NamedTuple):
    """A torch whose files lie in ``folder``."""

    folder: Path
    version: str  # as in 2.13.0+cu130
    commit: str

    @property
    def release(self) -> str | None:
        """Its minor version, as in 2.13, which the C++ interface does not change within.

        None: it is a nightly, a vendor's or somebody's own build, which may be of any commit.
        """
        found = re.fullmatch(r"(\d+\.\d+)\.\d+(\+(cpu|cu\d+|rocm[\d.]+|xpu))?", self.version)
        return None if found is None else found[1]

    @property
    def folder_name(self) -> str:
        """The folder of what is compiled for it and this Python."""
        return f"torch-{self.release or self.version}-{_SUFFIX.split('.')[1]}"


class CannotCompile(Exception):
    """What is missing, or what the compiler said."""


def torch_in(folder: Path) -> Torch:
    """The torch in a folder that is called ``torch``."""
    said = runpy.run_path(str(folder / "version.py"))
    return Torch(folder, str(said["__version__"]), str(said.get("git_version")))


def find_torch() -> Torch | None:
    """The torch that this Python imports; None: it has none."""
    spec = importlib.util.find_spec("torch")
    return None if spec is None or spec.origin is None else torch_in(Path(spec.origin).parent)


def digest(torch: Torch) -> str:
    """Stands for all that a result depends on: what was compiled with another digest is not what is needed."""
    found = hashlib.sha256(
        " ".join([*torch[1:], *platform.libc_ver(), sys.version, Path(__file__).read_text()]).encode()
    )
    for path in sorted(SOURCES.rglob("*.[ch]*")):
        found.update(path.relative_to(SOURCES).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:16]


def jobs() -> int:
    """How many compilers run at once; each takes up to 2 GB. MAX_JOBS limits them, as in torch's own builds."""
    return int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))


def expected_time() -> str:
    """How long it takes here."""
    minutes = max(1, round(_SECONDS_OF_ONE_CORE / 60 / min(jobs(), 5)))
    return f"about {minutes} minute{'s' * (minutes > 1)} on {jobs()} core{'s' * (jobs() > 1)}"


def compile_for(torch: Torch, work: Path, made: Path, keep_open: tuple[int, ...] = ()) -> None:
    """Compile what has changed since the last time in ``work``, and copy it to ``made``. ``check`` first.

    ``keep_open``: descriptors that ninja keeps open, so that locks on them last as long as it and its compilers do.

    Raises:
        CannotCompile: with the last lines of the compiler.
        OSError: a folder cannot be written.
    """
    nvtx = _nvtx_headers()
    work.mkdir(parents=True, exist_ok=True)
    _write(work / "before.h", _BEFORE)
    _write(work / "build.ninja", _recipe(torch, _units(work), nvtx))
    command = [sys.executable, "-m", "ninja", "-C", str(work), "-j", str(jobs())]
    # To a file and not through a pipe: ninja goes on where this process is killed.
    with (work / "log.txt").open("w") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, pass_fds=keep_open)
    if done.returncode != 0:
        last = "\n".join((work / "log.txt").read_text(errors="replace").splitlines()[-15:])
        raise CannotCompile(f"the compiler ended with:\n\n{last}\n\nThe command was: {shlex.join(command)}")
    made.mkdir(parents=True, exist_ok=True)
    (made / "_build_info.py").write_text(_BUILD_INFO.format(torch=torch, nvtx=nvtx))
    for name in ("_pages", "_C"):
        # Under another name first: a process may have the one that was there.
        shutil.copy2(work / f"{name}{_SUFFIX}", made / f"{name}.new")
        (made / f"{name}.new").replace(made / f"{name}{_SUFFIX}")


def check(torch: Torch) -> None:
    """Raise CannotCompile where something that compiling takes is missing."""
    if tuple(map(int, torch.version.split(".")[:2])) < OLDEST:
        raise CannotCompile(f"torch {torch.version} is too old: fastddp needs {'.'.join(map(str, OLDEST))} or newer.")
    if shutil.which(compiler := shlex.split(_compiler())[0]) is None:
        raise CannotCompile(
            f"there is no C++ compiler ({compiler}). Install one (Debian and Ubuntu: apt install g++; Fedora: dnf "
            "install gcc-c++; conda: conda install gxx), or name it by CXX."
        )
    if not (header := Path(sysconfig.get_path("include"), "Python.h")).is_file():
        raise CannotCompile(
            f"there are no headers of Python ({header}). Install them (Debian and Ubuntu: apt install python3-dev; "
            "Fedora: dnf install python3-devel) or use another Python."
        )
    if not (headers := torch.folder / "include" / "torch").is_dir():
        raise CannotCompile(f"this torch comes without its headers ({headers}). Install another build of it.")
    if importlib.util.find_spec("ninja") is None:
        raise CannotCompile("there is no ninja. Run: pip install ninja")


def _compiler() -> str:
    return os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), "c++")


def _threads() -> str:
    """For at::parallel_for, by torch's OpenMP: so it is not for linking. Clang needs functions that GCC's lacks."""
    names = [Path(shutil.which(word) or word).resolve().name for word in shlex.split(_compiler())]
    return "" if "clang" in " ".join(names) else "-fopenmp"


def _units(work: Path) -> list[str]:
    """Write files that include the sources of one folder or more: what is compiled.

    One of these takes not much longer than one of the sources, most of which is torch's headers.
    """
    contents = {"pages": "".join(f'#include "{name}"\n' for name in _PAGES)}
    for path in sorted(SOURCES.rglob("*.cpp")):
        source = path.relative_to(SOURCES)
        if source.as_posix() != _PAGE_BINDINGS:
            unit = f"unit_{_TOGETHER.get(source.parts[0], source.parts[0])}"
            contents[unit] = contents.get(unit, "") + f'#include "{source.as_posix()}"\n'
    for name, content in contents.items():
        _write(work / f"{name}.cpp", content)
    for gone in {path.stem for path in work.glob("unit_*.cpp")} - contents.keys():
        (work / f"{gone}.cpp").unlink()
    return [name for name in contents if name != "pages"]


def _write(path: Path, content: str) -> None:
    """A file that is written is compiled again."""
    if not path.is_file() or path.read_text() != content:
        path.write_text(content)


def _recipe(torch: Torch, units: list[str], nvtx: list[str]) -> str:
    """The file for ninja, whose paths are relative to its folder."""
    headers = torch.folder / "include"
    others: list[Path | str] = [
        headers,
        headers / "torch" / "csrc" / "api" / "include",
        sysconfig.get_path("include"),
        *nvtx,
    ]
    includes = " ".join([f"-I{_quoted(SOURCES)}", *(f"-isystem {_quoted(path)}" for path in others)])
    libraries = " ".join([f"-L{_quoted(torch.folder / 'lib')}", *(f"-l{name}" for name in _LIBRARIES)])
    of_torch = f"{_SAME_BITS} {_threads()} -DTORCH_API_INCLUDE_EXTENSION_H -DTORCH_EXTENSION_NAME=_C -include before.h"
    lines = [
        f"compiler = {_compiler().replace('$', '$$')}",
        f"flags = {_FLAGS} {includes}",
        "rule compile",
        "  command = $compiler -MMD -MF $out.d $flags $own -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        "  command = $compiler -shared $in -o $out $libraries",
        "build pages.o: compile pages.cpp",
        f"build _pages{_SUFFIX}: link pages.o",
    ]
    for unit in units:
        lines += [f"build {unit}.o: compile {unit}.cpp", f"  own = {of_torch}"]
    lines += [f"build _C{_SUFFIX}: link {' '.join(f'{unit}.o' for unit in units)}", f"  libraries = {libraries}"]
    return "\n".join([*lines, ""])


def _quoted(path: Path | str) -> str:
    """For a shell, in a file of ninja's."""
    return shlex.quote(str(path)).replace("$", "$$")


def _nvtx_headers() -> list[str]:
    """The folder that holds ``nvtx3/``, of CUDA's toolkit or of NVIDIA's packages for pip; none: build without NVTX."""
    compiler = shutil.which("nvcc")
    toolkits = [os.environ.get("CUDA_HOME"), compiler and Path(compiler).resolve().parents[1], "/usr/local/cuda"]
    packages = Path(sysconfig.get_path("purelib")) / "nvidia"
    for folder in [
        *(Path(toolkit) / "include" for toolkit in toolkits if toolkit),
        *sorted(packages.glob("*/include")),
    ]:
        if (folder / "nvtx3" / "nvToolsExt.h").is_file():
            return [str(folder)]
    return []
