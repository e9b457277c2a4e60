"""What is run on a machine with a GPU, as far as it goes without one."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fake_cuda
from repository import ROOT, TESTS

sys.path.append(str(ROOT))  # only while bench is imported: see test_bench_gpu.py

from bench.gpu import first_run, results

sys.path.pop()

SCRIPT = TESTS / "gpu" / "small_step.py"


@pytest.mark.tier("nightly")
def test_small_steps_launch_every_kernel() -> None:
    fake_cuda.build()
    ended = subprocess.run([sys.executable, str(SCRIPT), "--device", fake_cuda.DEVICE], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    *launches, verdict = ended.stdout.splitlines()
    # compute-sanitizer and ncu are told to look for these names.
    modes = runpy.run_path(str(SCRIPT), run_name=SCRIPT.stem)["modes"]()
    assert set(launches) == {f"fastddp_{name}" for mode in modes for name in mode.kernels}
    assert verdict == "the gradients of 3 steps in 7 modes are right"


FIRST = ["facts", "small steps", "tests", "graph", "four ranks", "memcheck", "overlap"]
SECTIONS = {
    ("first", "second"): {"facts", "overlap", "low_rank", "block8", "kernels", "memory", "compiled"},
    ("later",): {"step_rows", "addresses", "proofs", "hooks", "host", "sum_shards"},
}


@pytest.mark.tier("slow")
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "lists", [("first", "second"), pytest.param(("later",), marks=pytest.mark.tier("nightly"))], ids="-".join
)
def test_the_first_run_on_a_gpu_goes_through_on_the_simulated_device(tmp_path: Path, lists: tuple[str, ...]) -> None:
    """In its smallest cases: so it is not the list itself that fails where minutes are few."""
    # Beside many other processes it takes ten times as long.
    how = ["--lists", *lists, "--seconds", "2900", "--patience", "10"]
    command = [sys.executable, "-m", "bench.gpu.first_run", "--device", fake_cuda.DEVICE, "--out", str(tmp_path)]
    ended = subprocess.run([*command, *how], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr
    outcomes = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [outcome["step"] for outcome in outcomes][: len(FIRST)] == FIRST or "first" not in lists
    assert {(outcome["status"], outcome["wrong"]) for outcome in outcomes} == {(0, 0)}
    sections = {row["section"] for row in results.read(tmp_path / "gpu.json")}
    assert sections == {outcome["step"] for outcome in outcomes if outcome["rows"] > 0}
    assert sections >= SECTIONS[lists]


@pytest.mark.parametrize("name", first_run.LISTS)
def test_a_list_has_the_time_for_its_steps(tmp_path: Path, name: str) -> None:
    made, seconds = first_run.LISTS[name]
    groups = made(first_run.Plan(first_run.CUDA, tmp_path))
    assert sum(max(step.limit for step in group) for group in groups) <= seconds


def sleeper(seconds: float) -> first_run.Step:
    return first_run.Step("sleeper", seconds, ("-c", "print('begun', flush=True); import time; time.sleep(600)"))


@pytest.mark.tier("slow")
def test_a_step_that_hangs_is_ended_and_costs_the_others_nothing(tmp_path: Path) -> None:
    plan = first_run.Plan(fake_cuda.DEVICE, tmp_path)
    steps = [sleeper(6.0), first_run.Step("next", 60.0, ("-c", "print('here')")), sleeper(100.0)]
    absent = first_run.Step("absent", 60.0, (), program="no-such-program")
    outcomes = first_run.run_all([(steps[0], absent), (steps[1],)], plan, end=time.monotonic() + 120)
    assert [(one.step, one.status, one.passed) for one in outcomes] == [
        ("sleeper", None, False),
        ("absent", None, False),
        ("next", 0, True),
    ]
    assert "begun" in outcomes[0].says
    (late,) = first_run.run_all([(steps[2],)], plan, end=time.monotonic())
    assert late.says == "no time was left for it"
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 4
