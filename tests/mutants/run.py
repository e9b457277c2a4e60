"""Whether the tests notice mutations: ``make mutants``, in the background, for hours.

Each is applied to a copy of the committed tree in ``build/mutants/``, which is built there, and tried: first the tests
of its folder, then those of the tier (``--tier quick``, or ``all``), up to the first that fails twice. What is found
goes to ``build/mutants/found-TIER-COMMIT.json`` after each; those that are in it are not tried again, so a run may be
cut short.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDER = ROOT / "build" / "mutants"
LIMIT = 7200.0  # seconds for a run of tests, which then has failed
# Whose tests are in a folder of another name.
FOLDERS = {
    "bindings": ["reducer"],
    "autograd": ["reducer", "window"],
    "audit": ["watch"],
    "pages": ["watch"],
    "kernels": ["pack", "codec", "transport", "gpu"],
    "fastddp": ["module", "torch_compat", "package"],
    "csrc": ["device"],
}


class Copy:
    """The committed tree, in a folder of its own, with its build."""

    def __init__(self, commit: str) -> None:
        self.tree = FOLDER / "tree"
        self._packages = FOLDER / "packages"
        if not self.tree.exists():
            subprocess.run(["git", "worktree", "add", "--detach", self.tree, commit], cwd=ROOT, check=True)
            shutil.rmtree(self._packages, ignore_errors=True)
            self._packages.mkdir(parents=True)
            for name in ("fastddp", "fastddp_command.py"):
                (self._packages / name).symlink_to(self.tree / name)
            (self.tree / "fastddp" / "kernels").symlink_to(self.tree / "kernels")
        self.restore()
        self._run(["git", "checkout", "--quiet", "--detach", commit], check=True)

    def restore(self) -> None:
        """As it was committed; files that are compiled stay."""
        self._run(["git", "checkout", "--quiet", "--", "."], check=True)

    def mutate(self, mutant: dict[str, Any]) -> None:
        """Another line in place of that one of its file; ``occurrence``: which of those that are equal, from 0."""
        path = self.tree / mutant["file"]
        lines = path.read_text().split("\n")
        places = [number for number, line in enumerate(lines) if line == mutant["line"]]
        lines[places[mutant["occurrence"]]] = mutant["mutated"]
        path.write_text("\n".join(lines))

    def build(self) -> bool:
        """Compile what has changed; whether it compiles."""
        return self._run([sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]).returncode == 0

    def failing_test(self, tests: list[str]) -> str | None:
        """The first test that fails, and fails again by itself; or how the run ended otherwise. None: all pass."""
        outlived: list[str] = []
        while True:
            left_out = [f"--deselect={name}" for name in outlived]
            status, output = self._pytest([*tests, *left_out, "-x"])
            names = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
            if status in (0, 5):
                return None
            if not names:
                return f"the run ended with {status}"
            if self._pytest([names[0]])[0] != 0:
                return names[0]
            outlived.append(names[0])

    def _pytest(self, arguments: list[str]) -> tuple[int, str]:
        command = [str(Path(sys.executable).with_name("pytest")), "-q", "-p", "no:cacheprovider", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(self._packages), "OMP_NUM_THREADS": "1"}
        try:
            done = self._run(command, env=environment, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return 124, ""
        return done.returncode, done.stdout

    def _run(self, command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=self.tree, capture_output=True, text=True, **options)  # type: ignore[call-overload,no-any-return]


def folders_of(file: str, tests: Path) -> list[str]:
    """Where the tests of a source lie."""
    parts = [part for part in Path(file).parts if part != "tools"]
    part = parts[1] if parts[0] != "kernels" and len(parts) > 2 else parts[0]
    return [f"tests/{name}" for name in FOLDERS.get(part, [part]) if (tests / name).is_dir()]


def try_mutant(copy: Copy, mutant: dict[str, Any], tier: str) -> str | None:
    """What notices it; None: nothing does."""
    copy.restore()
    copy.mutate(mutant)
    if mutant["file"].startswith("csrc") and not copy.build():
        return "the compiler"
    # The list's own test would notice each mutation.
    chosen = ["--numprocesses=3", "--dist=worksteal", f"--tier={tier}", "--ignore=tests/mutants"]
    folders = folders_of(mutant["file"], copy.tree / "tests")
    return copy.failing_test([*folders, *chosen]) or copy.failing_test(chosen)


def main() -> None:
    """Try what has not been tried."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", choices=["quick", "all"], default="quick")
    parser.add_argument("--commit", default="HEAD", help="whose sources and tests (default: %(default)s)")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of mutations, from 0")
    options = parser.parse_args()
    mutants = json.loads((HERE / "mutants.json").read_text())
    name = ["git", "rev-parse", "--short", options.commit]
    commit = subprocess.check_output(name, cwd=ROOT, text=True).strip()
    copy = Copy(commit)
    if not copy.build():
        sys.exit("the commit does not compile")
    results = FOLDER / f"found-{options.tier}-{commit}.json"
    found = json.loads(results.read_text()) if results.exists() else {}
    for number in options.only or range(len(mutants)):
        if str(number) in found:
            continue
        begin = time.monotonic()
        noticed = try_mutant(copy, mutants[number], options.tier)
        found[str(number)] = {"noticed by": noticed, "seconds": round(time.monotonic() - begin)}
        results.write_text(json.dumps(found, indent=1) + "\n")
        file, mutated = mutants[number]["file"], mutants[number]["mutated"].strip()
        print(f"{number}: {file}: {mutated}: {noticed or 'SURVIVES'}", flush=True)
    copy.restore()
    survivors = [number for number, of in found.items() if of["noticed by"] is None]
    print(f"{len(survivors)} of {len(found)} survive: {', '.join(survivors)}")


if __name__ == "__main__":
    main()
