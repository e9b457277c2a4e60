"""The order of work on streams: right as it is, and wrong as soon as any of its waits is taken out.

What `stream_checks.py` checks is run on the simulated device, once as it is, and once for each line of csrc/ that makes
a stream wait, or says for how long one uses memory: with that line taken out, some check has to fail. So each edge is
needed, and no check passes by luck.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from package_copy import CSRC, compiled_objects, link_package
from repository import TESTS

pytestmark = pytest.mark.usefixtures("simulated_device")
CHECKS = TESTS / "support" / "stream_checks.py"
TAKEN_OUT = "FASTDDP_TEST_TAKEN_OUT"
"""The environment's variable that names the line to take out, by its number in `waits()`."""
Checked = Future[subprocess.CompletedProcess[str]]

WAIT = re.compile(
    r"^\s+(?:for \(.*\) |if \(.*\) |const auto \w+ = )?(?:[\w.>()-]*"
    r"(?:keep_for_current_stream|kept\.(?:add|release_after_join|let_go)|current_streams?_waits?|make_current|synchronize|wait_for_(?!hook)\w+|who_waits_\.wait_for|producers\.note)|"
    r"wait_for)\((?!reduce_over_ranks|works\)).*\);$"
)


@dataclass(frozen=True)
class Mutant:
    """A line of csrc/ to take out."""

    number: int
    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}: {self.text}"


# Behind these lines nothing shows that a wait is missing.
NOT_NEEDED_FOR_VALUES = (
    *("try {", "{"),  # of a window that is given up: for works that block the host (gloo's)
    "// Orders no gradients.",  # the status is on the side stream for the sake of memory: test_gpu_path.py
    "// So that backward goes on.",  # and does not wait for collectives
    "// Of a window that failed.",  # what is sent in place of its gradients is void
)


def waits() -> list[Mutant]:
    """Every call that orders streams, outside of streams.cpp, which defines them."""
    found = []
    for path in sorted(set(CSRC.rglob("*.cpp")) - {CSRC / "device" / "streams.cpp"}):
        before = ""
        for number, text in enumerate(path.read_text().splitlines()):
            if WAIT.match(text) and before.strip() not in NOT_NEEDED_FOR_VALUES:
                found.append(Mutant(len(found), str(path.relative_to(CSRC)), number, text.strip()))
            before = text
    return found


def switchable(line: str, number: int) -> str:
    """The same line, left out where the process was told so.

    >>> switchable("  bucket.kept.let_go();", 3)
    '  if (!taken_out(3)) bucket.kept.let_go();'
    """
    made = re.fullmatch(r"(\s+const auto \w+ = )(.*make_current\(\));", line)
    if made is not None:
        return f"{made[1]}taken_out({number}) ? c10::MultiStreamGuard(c10::ArrayRef<c10::Stream>()) : {made[2]};"
    return re.sub(r"^\s+", rf"\g<0>if (!taken_out({number})) ", line)


SWITCH = f"""
#include <c10/core/StreamGuard.h>
#include <cstdlib>
inline bool taken_out(int number) {{
  static const char* chosen = std::getenv("{TAKEN_OUT}");
  return chosen != nullptr && std::atoi(chosen) == number;
}}
"""


def compile_unit(unit: Path, mutants: list[Mutant], folder: Path) -> Path:
    """The object of a unit in which those lines can be taken out."""
    csrc = folder / "csrc"
    for file in {mutant.file for mutant in mutants}:
        lines = (CSRC / file).read_text().splitlines()
        for mutant in mutants:
            if mutant.file == file:
                lines[mutant.line] = switchable(lines[mutant.line], mutant.number)
        (csrc / file).parent.mkdir(parents=True, exist_ok=True)
        (csrc / file).write_text("\n".join(lines))
    # Units include their sources by these paths: the copies come before those of csrc/.
    includes = [str(csrc), str(CSRC), *cpp_extension.include_paths(), sysconfig.get_path("include")]
    made = folder / f"{unit.stem}.o"
    subprocess.run(
        [
            *("g++", "-std=c++20", "-O0", "-fPIC", "-c", "-fvisibility=hidden", "-w"),
            *("-DTORCH_EXTENSION_NAME=_C", "-DTORCH_API_INCLUDE_EXTENSION_H", "-include", str(folder / "switch.h")),
            *(f"-I{path}" for path in includes),
            *(str(unit), "-o", str(made)),
        ],
        check=True,
    )
    return made


def build_switchable(mutants: Iterable[Mutant], folder: Path) -> None:
    """A package `fastddp` in ``folder``; a process can take one of those lines out of its extension, by TAKEN_OUT.

    So all mutants of a unit are compiled at once: a unit takes half a minute, most of it for torch's headers.
    """
    (folder / "switch.h").write_text(SWITCH)
    objects = compiled_objects()
    by_unit: dict[Path, list[Mutant]] = {}
    for mutant in mutants:
        (unit,) = [unit for unit in objects if f'#include "{mutant.file}"' in unit.read_text()]
        by_unit.setdefault(unit, []).append(mutant)
    with ThreadPoolExecutor(os.cpu_count()) as compilers:
        compiled = list(compilers.map(compile_unit, by_unit, by_unit.values(), repeat(folder)))
    others = [path for unit, path in objects.items() if unit not in by_unit]
    libraries = [flag for path in cpp_extension.library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    subprocess.run(
        [
            *("g++", "-shared", *map(str, [*compiled, *others]), "-o", str(link_package(folder))),
            *(*libraries, "-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"),
        ],
        check=True,
    )


def run_checks(package_folder: Path | None = None, taken_out: Mutant | None = None) -> subprocess.CompletedProcess[str]:
    """`stream_checks.py` on fastddp from that folder; with a line taken out it ends at the first check that fails."""
    paths = [str(package_folder or ""), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-W", "ignore", str(CHECKS)]
    if taken_out is not None:
        environment[TAKEN_OUT] = str(taken_out.number)
        command.append("--first")
    # Elsewhere than at the repository's root, where fastddp/ lies.
    return subprocess.run(
        command, capture_output=True, text=True, timeout=200, env=environment, cwd=package_folder or TESTS
    )


@pytest.fixture(scope="module")
def package(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a package in which every line that a test of this session asks for can be taken out."""
    folder = tmp_path_factory.mktemp("package")
    build_switchable(mutants_of(request.session) or waits()[:1], folder)
    return folder


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, package: Path) -> Iterator[dict[Mutant, Checked]]:
    """What the checks say without each line, run ahead on all cores."""
    runners = ThreadPoolExecutor(os.cpu_count())
    yield {mutant: runners.submit(run_checks, package, mutant) for mutant in mutants_of(request.session)}
    runners.shutdown(cancel_futures=True)


def mutants_of(session: pytest.Session) -> list[Mutant]:
    """Those that tests of this session ask for."""
    return [item.callspec.params["mutant"] for item in session.items if "results" in item.fixturenames]  # type: ignore[attr-defined]


@pytest.mark.tier("slow")
def test_the_order_of_streams_is_right() -> None:
    result = run_checks()
    assert result.returncode == 0, result.stdout + result.stderr


def test_mutants_are_found() -> None:
    assert len({mutant.file for mutant in waits()}) >= 9


@pytest.mark.tier("nightly")
def test_with_nothing_taken_out_they_are_right(package: Path) -> None:
    result = run_checks(package)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("mutant", waits(), ids=str)
def test_every_wait_is_needed(mutant: Mutant, results: dict[Mutant, Checked]) -> None:
    result = results[mutant].result()
    assert result.returncode == 1, f"nothing fails without it\n{result.stdout}{result.stderr[-2000:]}"
    assert "Traceback" not in result.stderr
