"""Runs tests with a fastddp._C and a simulated device that were compiled with AddressSanitizer and UBSan.

    python tests/support/sanitized.py                         # the tests below
    python tests/support/sanitized.py tests/window/test_windows.py -k checkpoint   # or whatever pytest takes

What is compiled goes to build/sanitized-*. The sanitizers of all processes, ranks too, write to files there, and every
report in them is a failure, whether or not a test noticed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from torch.utils import cpp_extension

from package_copy import link_package
from repository import ROOT

sys.path.append(str(ROOT / "tests"))  # where fake_cuda is

from fake_cuda import building

# What reaches each part of csrc/, on the CPU and on the simulated device.
TESTS = [
    "tests/window/test_windows.py",
    "tests/window/test_failures.py",
    "tests/window/test_joining.py",
    "tests/trip/test_started_collectives.py",
    "tests/exchange/test_comm_hooks.py",
    "tests/codec/test_native_hooks.py",
    "tests/codec/test_power_sgd.py",
    "tests/codec/test_void_steps.py",
    "tests/reducer/test_several_wrappers.py",
    "tests/window/test_unused_parameters.py",
    "tests/transport/test_sparse_gradients.py",
    "tests/transport/test_two_levels.py",
    "tests/transport/test_lanes.py",
    "tests/pack/test_pack.py",
    "tests/observe/test_step_report.py",
    "tests/watch/test_slow_ranks.py",
    "tests/elastic/test_regroup.py",
    "tests/device/test_gpu_path.py",
    "tests/device/test_graphs.py",
]
# Tests wait for a call of a rank for a minute, and pytest for a test for five; here a test takes some times as long.
PATIENCE = ["--override-ini=timeout=900"]

FOLDER = building.SANITIZED_FOLDER
PACKAGES = FOLDER / "packages"
REPORTS = FOLDER / "reports"

FLAGS = [
    *("-std=c++20", "-O1", "-g1", "-fPIC", "-fvisibility=hidden", "-w", "-D_GLIBCXX_ASSERTIONS"),
    *("-fsanitize=address,undefined", "-fno-omit-frame-pointer"),
    # It compares type information of torch's classes, which torch's libraries do not all export.
    "-fno-sanitize=vptr",
]
ASAN = {
    # CPython and torch keep what they allocate once until the process ends, and ranks are killed.
    "detect_leaks": 0,
    # A std::vector may be filled by torch, which is not compiled so, and read here: its spare room is never announced.
    "detect_container_overflow": 0,
    "detect_stack_use_after_return": 1,
    # What was freed is kept apart for this many MB, in each of up to five processes.
    "quarantine_size_mb": 128,
    "log_path": REPORTS / "asan",
}
UBSAN = {"print_stacktrace": 1, "log_path": REPORTS / "ubsan"}


def build() -> None:
    """Compile what has changed: both libraries, and a package around the extension."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(PACKAGES, ignore_errors=True)
    extension = link_package(PACKAGES)
    (FOLDER / "build.ninja").write_text(_recipe())
    subprocess.run([sys.executable, "-m", "ninja", "-C", str(FOLDER), "--quiet"], check=True)
    extension.symlink_to(FOLDER / "_C.so")


def _recipe() -> str:
    """The file for ninja."""
    includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    includes = [f"-I{ROOT / 'csrc'}", *(f"-isystem {path}" for path in includes)]
    flags = [*FLAGS, "-DTORCH_API_INCLUDE_EXTENSION_H", *includes]
    libraries = [flag for path in cpp_extension.library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    lines = [
        f"flags = {' '.join(flags)}",
        f"libraries = {' '.join(libraries)} -lc10 -ltorch -ltorch_cpu -ltorch_python",
        "rule compile",
        "  command = g++ $flags -DTORCH_EXTENSION_NAME=$name -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "rule link",
        "  command = g++ $flags -shared $in -o $out $libraries",
    ]
    fake = sorted(building.HERE.glob("*.cpp"))
    pages = ROOT / "csrc" / "bindings" / "page_bindings.cpp"  # of fastddp._pages, which is taken as it is
    lines += _library("_C", sorted({*(ROOT / "csrc").rglob("*.cpp")} - {pages}))
    lines += _library(building.NAME, [*fake, *building.TWIN])
    return "\n".join([*lines, ""])


def _library(name: str, sources: list[Path]) -> list[str]:
    lines, objects = [], []
    for source in sources:
        # Each by itself, not in units: so every file includes what it needs.
        objects.append(f"{name}-objects/{source.parent.name}-{source.stem}.o")
        lines += [f"build {objects[-1]}: compile {source}", f"  name = {name}"]
    return [*lines, f"build {name}.so: link {' '.join(objects)}"]


def environment() -> dict[str, str]:
    """That of a process that has the sanitizers, and finds the package that was compiled with them."""
    # libstdc++ too, or the sanitizer finds no function that throws: Python itself does not need that library.
    preloaded = [_library_of_compiler(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so")]
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(preloaded),
        "ASAN_OPTIONS": ":".join(f"{key}={value}" for key, value in ASAN.items()),
        "UBSAN_OPTIONS": ":".join(f"{key}={value}" for key, value in UBSAN.items()),
        "PYTHONPATH": os.pathsep.join([str(PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        # Python's own allocator hides from the sanitizer what it hands out.
        "PYTHONMALLOC": "malloc",
    }


def _library_of_compiler(name: str) -> str:
    command = ["g++", f"-print-file-name={name}"]
    return str(Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()).resolve())


def main(arguments: list[str]) -> int:
    """Build, run and judge; the exit status."""
    build()
    shutil.rmtree(REPORTS, ignore_errors=True)
    REPORTS.mkdir()
    pytest = str(Path(sys.executable).with_name("pytest"))
    command = [pytest, "-p", "no:cacheprovider", *PATIENCE, *(arguments or TESTS)]
    status = subprocess.run(command, cwd=ROOT, env=environment()).returncode
    found = [path.read_text(errors="replace") for path in sorted(REPORTS.iterdir())]
    print(*found, sep="\n")
    print(f"{len(found)} reports of the sanitizers, in {REPORTS}" if found else "The sanitizers have found nothing.")
    return 1 if found else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
