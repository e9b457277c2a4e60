"""The order of work on streams: right as it is, and wrong as soon as any of its waits is taken out.

What `stream_checks.py` checks is run on the simulated device, once as it is, and once for each line of csrc/ that makes
a stream wait, or says for how long one uses memory: with that line deleted, compiled anew, some check has to fail. So
each edge is needed, and no check passes by luck.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from package_copy import CSRC, compiled_objects, link_package
from repository import TESTS

pytestmark = pytest.mark.usefixtures("simulated_device")
CHECKS = TESTS / "support" / "stream_checks.py"

WAIT = re.compile(
    r"^\s+(?:for \(.*\) |if \(.*\) |const auto \w+ = )?(?:[\w.>()-]*"
    r"(?:keep_for_current_stream|kept\.\w+|current_streams?_waits?|make_current|synchronize|wait_for_(?!hook)\w+|who_waits_\.wait_for|producers\.note)|"
    r"wait_for)\((?!reduce_over_ranks|works\)).*\);$"
)


@dataclass(frozen=True)
class Mutant:
    """A line of csrc/ to take out."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}: {self.text}"


# Where a window is given up or abandoned, works are waited for that block the host (gloo's); those of a process group
# that orders streams have been waited for by then.
FOR_BLOCKING_WORKS = ("try {", "{")
# The status of a window is on the side stream so that its memory leaves gradients where they are: test_gpu_path.py.
FOR_STATUS = ("// Orders no gradients.",)
# Without it backward's stream would wait for collectives, and what it computes is the same.
FOR_OVERLAP = ("// So that backward goes on.",)
# What is sent in place of gradients of a failed window, and what they leave in memory, is void: nothing shows.
FOR_FAILURES = ("// Of a window that failed.",)


def waits() -> list[Mutant]:
    """Every call that orders streams, outside of streams.cpp, which defines them."""
    found = []
    for path in sorted(set(CSRC.rglob("*.cpp")) - {CSRC / "device" / "streams.cpp"}):
        before = ""
        for number, text in enumerate(path.read_text().splitlines()):
            if WAIT.match(text) and before.strip() not in FOR_BLOCKING_WORKS + FOR_STATUS + FOR_OVERLAP + FOR_FAILURES:
                found.append(Mutant(str(path.relative_to(CSRC)), number, text.strip()))
            before = text
    return found


def run_checks(package_folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`stream_checks.py` in a process of its own, which imports fastddp from ``package_folder`` if there is one."""
    environment = {**os.environ, "PYTHONPATH": str(package_folder or "")}
    command = [sys.executable, "-W", "ignore", str(CHECKS)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)


def build_without(mutant: Mutant, folder: Path) -> None:
    """A package `fastddp` in ``folder`` whose extension was compiled without that line."""
    source = folder / "csrc" / mutant.file
    source.parent.mkdir(parents=True)
    lines = (CSRC / mutant.file).read_text().splitlines()
    lines[mutant.line] = ""
    source.write_text("\n".join(lines))
    extension = link_package(folder)
    # Units include their sources by these paths: the mutant's comes before the one of csrc/.
    includes = [str(folder / "csrc"), str(CSRC), *cpp_extension.include_paths(), sysconfig.get_path("include")]
    objects = compiled_objects()
    (unit,) = [unit for unit in objects if f'#include "{mutant.file}"' in unit.read_text()]
    others = [str(path) for other, path in objects.items() if other != unit]
    libraries = [flag for path in cpp_extension.library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    subprocess.run(
        [
            *("g++", "-std=c++20", "-O0", "-fPIC", "-shared", "-fvisibility=hidden", "-w"),
            *("-DTORCH_EXTENSION_NAME=_C", "-DTORCH_API_INCLUDE_EXTENSION_H"),
            *(f"-I{path}" for path in includes),
            *(str(unit), *others, "-o", str(extension)),
            *(*libraries, "-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"),
        ],
        check=True,
    )


@pytest.fixture(scope="module")
def packages(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Mutant, Future[Path]]]:
    """Folders with a package for each mutant that is asked for, compiled ahead on all cores."""
    asked = [item.callspec.params["mutant"] for item in request.session.items if "packages" in item.fixturenames]  # type: ignore[attr-defined]
    compilers = ThreadPoolExecutor(os.cpu_count())

    def build(mutant: Mutant) -> Path:
        folder = tmp_path_factory.mktemp("package")
        build_without(mutant, folder)
        return folder

    yield {mutant: compilers.submit(build, mutant) for mutant in asked}
    compilers.shutdown(cancel_futures=True)


def test_the_order_of_streams_is_right() -> None:
    result = run_checks()
    assert result.returncode == 0, result.stdout + result.stderr


def test_mutants_are_found() -> None:
    files = {mutant.file for mutant in waits()}
    assert files == {
        "device/device_table.cpp",
        "bucket/bucket.cpp",
        "bucket/gradient_memory.cpp",
        "codec/block8.cpp",
        "codec/low_rank.cpp",
        "pipeline/pipeline.cpp",
        "reducer/reduction.cpp",
        "reducer/ticks.cpp",
    }


@pytest.mark.slow
def test_mutants_are_what_is_checked(tmp_path: Path) -> None:
    shown = "import fastddp; print(fastddp.__file__)"
    build_without(waits()[0], tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", shown], capture_output=True, text=True, env=environment, cwd=tmp_path, check=True
    )
    assert result.stdout.strip() == str(tmp_path / "fastddp" / "__init__.py")


@pytest.mark.slow
@pytest.mark.parametrize("mutant", waits(), ids=str)
def test_every_wait_is_needed(mutant: Mutant, packages: dict[Mutant, Future[Path]]) -> None:
    result = run_checks(packages[mutant].result())
    assert result.returncode == 1, f"nothing fails without it\n{result.stdout}{result.stderr[-2000:]}"
    assert "Traceback" not in result.stderr
