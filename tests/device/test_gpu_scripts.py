"""What is run on a machine with a GPU, as far as it goes without one."""

from __future__ import annotations

import itertools
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
from torch.utils import cpp_extension

import fake_cuda
import fastddp
from fastddp import _C
from on_ranks import on_ranks
from package_copy import import_library
from repository import ROOT, TESTS

sys.path.append(str(ROOT))  # only while bench is imported: see test_bench_gpu.py

from bench.cases import Batch, Case
from bench.gpu import block8, emulation, facts, hooks, kernels, networks, results, step, sum_shards
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
@on_ranks(1, pool="simulated_ranks")
def test_one_bucket_is_measured_however_little_time_there_is(rank: int, tmp_path: Path) -> None:
    # Compiling kernels may take all the time that a profiler gives.
    run = run_of(tmp_path / "gpu.json", "kernels")
    kernels.measure(run)
    assert [row["result"] for row in results.read(tmp_path / "gpu.json")] == ["right"] * 10


@pytest.mark.tier("nightly")
@on_ranks(1, pool="simulated_ranks")
def test_one_operation_of_block8_is_measured_however_little_time_there_is(rank: int, tmp_path: Path) -> None:
    # Without operators: the host takes so long to issue them that the device would be kept busy for minutes.
    def fastddp_alone(number: str, device: torch.device) -> dict[str, _C.Block8Kernels]:
        return {"fastddp": _C.Block8Kernels(number, 128, device)}

    with mock.patch("bench.block8.contestants", fastddp_alone):
        block8.measure(run_of(tmp_path / "gpu.json", "block8"))
    found = rows_of(tmp_path / "gpu.json", "block8 kernel", "operation", "contestant", "result")
    assert found == [("encode", "copy_", "right"), ("encode", "fastddp", "right")]


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

    modes = [mode for mode in hooks.hook_modes() if mode.hook is None or mode.hook.name in ("fp16", "int8")]
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


@pytest.fixture
def emulated_wire(tmp_path: Path) -> Path:
    """The library of bench/gpu, without its kernel."""
    folder = ROOT / "bench" / "gpu"
    cpp_extension.load(
        "fastddp_emulated_wire",
        [str(folder / "emulated_wire.cpp"), str(TESTS / "support" / "emulated_wire_stub.cpp")],
        extra_include_paths=[str(folder)],
        extra_cflags=["-O0", "-g0"],
        build_directory=str(tmp_path),
        is_python_module=False,
    )
    return tmp_path / "fastddp_emulated_wire.so"


@pytest.mark.tier("nightly")
@on_ranks(1, pool="simulated_ranks")
def test_the_emulated_wire_carries_whole_steps(rank: int, emulated_wire: Path) -> None:
    dist.destroy_process_group()
    device = torch.device(fake_cuda.DEVICE)
    fake_cuda.schedule("in_order")
    extension = import_library(emulated_wire)
    with (
        mock.patch.object(emulation, "load_extension", return_value=extension),
        emulation.emulated_group(networks.INSTANT, 4, device) as group,
    ):
        layers = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3))).to(device)
        model = fastddp.DistributedDataParallel(layers, bucket_cap_mb=0)
        seen = []
        for _ in range(4):
            before, _, _ = group.counts()
            model.zero_grad()
            model(torch.ones(2, 4, device=device)).sum().backward()
            fake_cuda.synchronize()
            seen.append(group.counts()[0] - before)
        assert seen[2:] == [4, 4]  # of three buckets, and of the window's status
        del model
