"""Runs tests with a fastddp._C and a simulated device that were compiled with sanitizers.

    python tests/support/sanitized.py memory      # AddressSanitizer and UBSan, over the tests below
    python tests/support/sanitized.py threads     # ThreadSanitizer, over others
    python tests/support/sanitized.py threads tests/window/test_windows.py -k checkpoint   # or whatever pytest takes

What is compiled goes to build/sanitized-*. The sanitizers of all processes, ranks too, write to files there, and every
report in them is a failure, whether or not a test noticed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from torch.utils import cpp_extension

from package_copy import link_package
from repository import ROOT

sys.path.append(str(ROOT / "tests"))  # where fake_cuda is

from fake_cuda import building

HERE = Path(__file__).resolve().parent
Options: TypeAlias = dict[str, object]

# What reaches each part of csrc/, on the CPU and on the simulated device.
OF_MEMORY = [
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
# What has several threads: of watches, of the engine, of gloo, and users' own.
OF_THREADS = ["tests/watch", "tests/elastic", "tests/sharding", "tests/window", "tests/transport/test_interruption.py"]
# Tests wait for a call of a rank for a minute, and pytest for a test for five; here a test takes some times as long.
PATIENCE = ["--override-ini=timeout=900"]

FLAGS = [
    *("-std=c++20", "-O1", "-g1", "-fPIC", "-fvisibility=hidden", "-w", "-D_GLIBCXX_ASSERTIONS"),
    "-fno-omit-frame-pointer",
]
ASAN: Options = {
    # CPython and torch keep what they allocate once until the process ends, and ranks are killed.
    "detect_leaks": 0,
    # A std::vector may be filled by torch, which is not compiled so, and read here: its spare room is never announced.
    "detect_container_overflow": 0,
    "detect_stack_use_after_return": 1,
    # What was freed is kept apart for this many MB, in each of up to five processes.
    "quarantine_size_mb": 128,
}
TSAN: Options = {
    "suppressions": HERE / "thread_sanitizer.txt",
    # Only our extension and libstdc++'s templates in it are compiled so. What torch, gloo and Python do with memory is
    # not looked at; their locks are.
    "ignore_noninstrumented_modules": 1,
    "history_size": 5,  # of each thread, so that both sides of a race have their calls
    # A process whose threads race goes on to its end: what its test says counts, too.
    "exitcode": 0,
    # Ranks that are forked from one with threads start threads of their own.
    "die_after_fork": 0,
    # Python's handlers of signals only take notes, and faulthandler's write what they have to.
    "report_signal_unsafe": 0,
}


@dataclass(frozen=True)
class Sanitizer:
    """Sanitizers that go together, and the tests that are worth their time."""

    folder: Path
    flags: tuple[str, ...]
    libraries: tuple[str, ...]
    options: dict[str, Options]  # by the variable that has them
    tests: list[str]
    by: tuple[str, ...] = ()  # the command that starts such a process

    @property
    def packages(self) -> Path:
        return self.folder / "packages"

    @property
    def reports(self) -> Path:
        return self.folder / "reports"


SANITIZERS = {
    "memory": Sanitizer(
        building.SANITIZED_FOLDERS["__asan_init"],
        # vptr compares type information of torch's classes, which torch's libraries do not all export.
        ("-fsanitize=address,undefined", "-fno-sanitize=vptr"),
        ("libasan.so", "libubsan.so"),
        {"ASAN_OPTIONS": ASAN, "UBSAN_OPTIONS": {"print_stacktrace": 1}},
        OF_MEMORY,
    ),
    "threads": Sanitizer(
        building.SANITIZED_FOLDERS["__tsan_init"],
        ("-fsanitize=thread",),
        ("libtsan.so",),
        {"TSAN_OPTIONS": TSAN},
        OF_THREADS,
        by=("setarch", "-R"),  # it has places of its own in memory, which a kernel may give to others at random
    ),
}


def build(sanitizer: Sanitizer) -> None:
    """Compile what has changed: both libraries, and a package around the extension."""
    sanitizer.folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(sanitizer.packages, ignore_errors=True)
    extension = link_package(sanitizer.packages)
    (sanitizer.folder / "build.ninja").write_text(_recipe(sanitizer))
    subprocess.run([sys.executable, "-m", "ninja", "-C", str(sanitizer.folder), "--quiet"], check=True)
    extension.symlink_to(sanitizer.folder / "_C.so")


def _recipe(sanitizer: Sanitizer) -> str:
    """The file for ninja."""
    includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    includes = [f"-I{ROOT / 'csrc'}", *(f"-isystem {path}" for path in includes)]
    flags = [*FLAGS, *sanitizer.flags, "-DTORCH_API_INCLUDE_EXTENSION_H", *includes]
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


def environment(sanitizer: Sanitizer) -> dict[str, str]:
    """That of a process that has the sanitizers, and finds the package that was compiled with them."""
    # libstdc++ too, or the sanitizer finds no function that throws: Python itself does not need that library.
    preloaded = [_library_of_compiler(name) for name in (*sanitizer.libraries, "libstdc++.so")]
    options = {
        variable: {**options, "log_path": sanitizer.reports / variable.partition("_")[0].lower()}
        for variable, options in sanitizer.options.items()
    }
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(preloaded),
        **{name: ":".join(f"{key}={value}" for key, value in these.items()) for name, these in options.items()},
        "PYTHONPATH": os.pathsep.join([str(sanitizer.packages), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        # Python's own allocator hides from the sanitizer what it hands out.
        "PYTHONMALLOC": "malloc",
    }


def _library_of_compiler(name: str) -> str:
    command = ["g++", f"-print-file-name={name}"]
    return str(Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()).resolve())


def main(name: str, arguments: list[str]) -> int:
    """Build, run and judge; the exit status."""
    sanitizer = SANITIZERS[name]
    build(sanitizer)
    return run(sanitizer, arguments)


def run(sanitizer: Sanitizer, arguments: list[str]) -> int:
    """With what is compiled; the exit status."""
    shutil.rmtree(sanitizer.reports, ignore_errors=True)
    sanitizer.reports.mkdir()
    pytest = str(Path(sys.executable).with_name("pytest"))
    command = [*sanitizer.by, pytest, "-p", "no:cacheprovider", *PATIENCE, *(arguments or sanitizer.tests)]
    status = subprocess.run(command, cwd=ROOT, env=environment(sanitizer)).returncode
    found = [path.read_text(errors="replace") for path in sorted(sanitizer.reports.iterdir())]
    print(*found, sep="\n")
    where = f"reports of the sanitizers, in {sanitizer.reports}"
    print(f"{len(found)} {where}" if found else "The sanitizers have found nothing.")
    return 1 if found else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
