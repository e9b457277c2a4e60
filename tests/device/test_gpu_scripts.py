"""What is run on a machine with a GPU, as far as it goes without one."""

from __future__ import annotations

import itertools
import json
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fake_cuda
from fastddp import _C
from on_ranks import on_ranks
from repository import ROOT, TESTS

sys.path.append(str(ROOT))  # only while bench is imported: see test_bench_gpu.py

from bench.cases import Batch, Case
from bench.gpu import block8, facts, first_run, hooks, kernels, results, step, sum_shards
from bench.gpu.alone import measure_alone

sys.path.pop()

SCRIPT = TESTS / "gpu" / "small_step.py"


def run_of(path: Path, section: str, deadline: float | None = None) -> results.Run:
    """A run of a section; without a deadline its time is over before it begins."""
    fake_cuda.schedule("in_order")
    device = torch.device(fake_cuda.DEVICE, 0)
    return results.Run(device, results.Results(path, section), quick=True, deadline=deadline or time.monotonic())


def rows_of(path: Path, kind: str, *columns: str) -> list[tuple[Any, ...]]:
    return [tuple(map(row.__getitem__, columns)) for row in results.read(path) if row["kind"] == kind]


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


@pytest.mark.tier("nightly")
@pytest.mark.parametrize(("section", "number"), [("kernels", 10), ("block8", 2)])  # a bucket; an operation of block8
@on_ranks(1, pool="simulated_ranks")
def test_something_is_measured_however_little_time_there_is(
    rank: int, section: str, number: int, tmp_path: Path
) -> None:
    # Compiling kernels may take all the time that a profiler gives.
    {"kernels": kernels, "block8": block8}[section].measure(run_of(tmp_path / "gpu.json", section))
    found = [row["result"] for row in results.read(tmp_path / "gpu.json") if row["kind"].endswith("kernel")]
    assert found == ["right"] * number


def small_case(device: torch.device) -> tuple[nn.Module, Callable[[int, int], Batch]]:
    torch.manual_seed(0)
    return hooks._Small().to(device), lambda rank, step: (torch.ones(8, 64, device=device) * (step + 2),)


class Ended(Exception):
    """In place of a section's end by the clock."""


KERNELS_OF_HOOKS = ["pack_fp32_to_fp16", "unpack_fp16_to_fp32", "block8_encode_fp32_int8_256"]


@on_ranks(1, pool="simulated_ranks")
def test_rows_of_hooks_are_there_when_the_section_is_ended(rank: int, tmp_path: Path) -> None:
    """And kernels are loaded before anything is measured, in time that does not count."""
    dist.destroy_process_group()
    deadline = time.monotonic() + 3600
    run = run_of(tmp_path / "gpu.json", "hooks", deadline)
    groups = itertools.count()

    def measured(*arguments: Any) -> dict[str, Any]:
        assert all(_C.has_kernel(run.device, f"fastddp_{name}") for name in KERNELS_OF_HOOKS)
        if next(groups) == 2:
            raise Ended
        return measure_alone(*arguments)

    modes = hooks.hook_modes(("fp16", "int8"))
    with (
        mock.patch.object(hooks, "cases", return_value=[Case("small", "small", small_case)]),
        mock.patch.object(hooks, "hook_modes", return_value=modes),
        mock.patch.object(step, "measure_alone", measured),
        pytest.raises(Ended),
    ):
        hooks.measure(run)
    rows = dict(rows_of(tmp_path / "gpu.json", "step with hooks", "contestant", "result"))
    assert list(rows) == ["plain", "torch", "torch-again", "fastddp", "torch+fp16", "fastddp+fp16"]
    assert "WRONG" not in rows.values()
    assert run.deadline > deadline


@on_ranks(1, pool="simulated_ranks")
def test_facts_say_what_the_backend_offers_and_what_the_first_wrapper_takes(rank: int, tmp_path: Path) -> None:
    dist.destroy_process_group()
    path = tmp_path / "gpu.json"
    facts.measure(run_of(path, "facts"))
    sum_shards.measure(run_of(path, "sum_shards"))
    (row,) = [row for row in results.read(path) if row["kind"] == "facts"]
    assert row["supports_tensor_alloc"] is False
    assert row["model_mib"] == pytest.approx(8.0, rel=0.01)
    # Nobody counts it on the simulated device.
    assert {row[f"used_{when}_mib"] for when in ("before", "after_wrap", "after_step")} == {None}
    sums = rows_of(path, "shards kernel", "contestant", "result")
    assert sums == [("copy_", "right"), ("operators", "right"), ("fastddp", "right")]


STEPS = ["facts", "small steps", "proofs", "kernels", "step", "hooks", "host", "tests", "graph", "two ranks over gloo"]


@pytest.mark.tier("slow")
@pytest.mark.timeout(900)
def test_the_first_run_on_a_gpu_goes_through_on_the_simulated_device(tmp_path: Path) -> None:
    """In its smallest cases: so it is not the list itself that fails where minutes are few."""
    seconds = ["--seconds", "800", "--patience", "10"]  # other tests run on this machine
    command = [sys.executable, "-m", "bench.gpu.first_run", "--device", fake_cuda.DEVICE, "--out", str(tmp_path)]
    ended = subprocess.run([*command, *seconds], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr
    outcomes = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [outcome["step"] for outcome in outcomes][: len(STEPS)] == STEPS
    assert {(outcome["status"], outcome["wrong"]) for outcome in outcomes} == {(0, 0)}
    sections = {row["section"] for row in results.read(tmp_path / "gpu.json")}
    assert sections == {outcome["step"] for outcome in outcomes if outcome["rows"] > 0}
    assert {"proofs", "kernels", "step", "hooks", "host"} <= sections


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
