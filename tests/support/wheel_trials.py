"""Installs wheels of dist/ into environments that have torch, and trains there; the rows of docs/install.md's table.

    python tests/support/wheel_trials.py --json bench/results/wheels.json ENVIRONMENT/bin/python ...

No compiler is on the path, and the user has an empty cache. Two ranks take the step of one_step.py, whose gradients
must be those of torch's DDP. Environments are left without fastddp.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from repository import ROOT, TESTS

sys.path.append(str(ROOT))  # where bench is

from bench.harness import commit_of_this_copy, write_json

ABOUT = "import json, platform, torch; print(json.dumps([platform.python_version(), torch.__version__]))"
PIP = ("-m", "pip", "--disable-pip-version-check")
LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", TESTS / "support" / "one_step.py")


def run(folder: Path, python: Path, *arguments: str | Path) -> tuple[float, str]:
    """How long it took, and what it printed."""
    path = folder / "path"
    path.mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL", "CXX"))}
    own = {"PATH": str(path), "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    begin = time.monotonic()
    done = subprocess.run([python, *arguments], cwd=folder, env=kept | own, text=True, capture_output=True)
    if done.returncode != 0:
        sys.exit(f"{python} {' '.join(map(str, arguments))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return time.monotonic() - begin, done.stdout


def trial(python: Path, commit: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        of_python, torch = json.loads(run(folder, python, "-c", ABOUT)[1])
        tag = "cp" + "".join(of_python.split(".")[:2])
        wheel = next((ROOT / "dist").glob(f"fastddp-*-{tag}-*.whl"))
        installing, _ = run(folder, python, *PIP, "install", "--quiet", wheel)
        stepping, said = run(folder, python, *LAUNCH, wheel.name.split("-")[1])
        if len(re.findall("are those of torch's DDP", said)) != 2 or (folder / "cache" / "fastddp").exists():
            sys.exit(f"{python} has compiled something, or says: {said}")
        run(folder, python, *PIP, "uninstall", "--quiet", "--yes", "fastddp")
    return {
        "python": of_python,
        "torch": torch,
        "bitwise": True,
        "install_s": round(installing, 1),
        "first_step_s": round(installing + stepping, 1),  # of two ranks, from the start of `pip install`
        "wheel": wheel.name,
        "wheel_mib": round((ROOT / "dist" / wheel.name).stat().st_size / 2**20, 2),
        "commit": commit,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="written after each trial")
    parser.add_argument("pythons", metavar="PYTHON", type=Path, nargs="+", help="of an environment that has torch")
    arguments = parser.parse_args()
    commit, _ = commit_of_this_copy()
    rows: list[dict[str, Any]] = []
    for python in arguments.pythons:
        rows.append(trial(python.absolute(), commit))
        print(rows[-1], flush=True)
        write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
