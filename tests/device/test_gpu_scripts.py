"""What is run on a machine with a GPU, as far as it goes without one."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
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
from package_copy import import_library
from ranks import RankPool
from repository import ROOT, TESTS

sys.path.append(str(ROOT))  # only while bench is imported: see test_bench_gpu.py

from bench.cases import Batch, Case
from bench.gpu import block8, emulation, facts, hooks, kernels, networks, results, step, sum_shards
from bench.gpu.alone import measure_alone

sys.path.pop()

SCRIPT = TESTS / "gpu" / "small_step.py"


def module_at(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def small_step() -> ModuleType:
    return module_at(SCRIPT)


@pytest.mark.tier("nightly")
def test_small_steps_launch_every_kernel() -> None:
    fake_cuda.build()
    ended = subprocess.run([sys.executable, str(SCRIPT), "--device", fake_cuda.DEVICE], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    *launches, verdict = ended.stdout.splitlines()
    # compute-sanitizer and ncu are told to look for these names.
    assert set(launches) == {f"fastddp_{name}" for mode in small_step().modes() for name in mode.kernels}
    assert verdict == "the gradients of 3 steps in 7 modes are right"


def kernels_without_time(rank: int, path: Path) -> list[str]:
    """What a section prints whose time is over before it begins."""
    run = results.Run(
        torch.device(fake_cuda.DEVICE, 0), results.Results(path, "kernels"), quick=True, deadline=time.monotonic()
    )
    kernels.measure(run)
    return [row["result"] for row in results.read(path)]


@pytest.mark.tier("nightly")
def test_one_bucket_is_measured_however_little_time_there_is(simulated_ranks: RankPool, tmp_path: Path) -> None:
    # Compiling kernels may take all the time that a profiler gives.
    (found,) = simulated_ranks.run(kernels_without_time, 1, tmp_path / "gpu.json")
    assert found == ["right"] * 10


def block8_without_time(rank: int, path: Path) -> list[tuple[str, str, str]]:
    run = results.Run(
        torch.device(fake_cuda.DEVICE, 0), results.Results(path, "block8"), quick=True, deadline=time.monotonic()
    )

    # Without operators: the host takes so long to issue them that the device would be kept busy for minutes.
    def fastddp_alone(number: str, device: torch.device) -> dict[str, _C.Block8Kernels]:
        return {"fastddp": _C.Block8Kernels(number, 128, device)}

    with mock.patch("bench.block8.contestants", fastddp_alone):
        block8.measure(run)
    rows = [row for row in results.read(path) if row["kind"] == "block8 kernel"]
    return [(row["operation"], row["contestant"], row["result"]) for row in rows]


def small_case(device: torch.device) -> tuple[nn.Module, Callable[[int, int], Batch]]:
    torch.manual_seed(0)
    return hooks._Small().to(device), lambda rank, step: (torch.ones(8, 64, device=device) * (step + 2),)


class Ended(Exception):
    """In place of a section's end by the clock."""


def hooks_until_ended(rank: int, path: Path) -> tuple[list[tuple[str, str]], list[str], bool]:
    """Rows of a section that ends in the second group; what was loaded before anything was measured; the deadline."""
    dist.destroy_process_group()
    fake_cuda.schedule("in_order")
    device = torch.device(fake_cuda.DEVICE, 0)
    deadline = time.monotonic() + 3600
    run = results.Run(device, results.Results(path, "hooks"), quick=True, deadline=deadline)
    loaded: list[str] = []
    groups = 0

    def measured(*arguments: Any) -> dict[str, Any]:
        nonlocal groups
        groups += 1
        loaded[:] = loaded or [name for name in KERNELS_OF_HOOKS if _C.has_kernel(device, f"fastddp_{name}")]
        if groups == 3:
            raise Ended
        return measure_alone(*arguments)

    modes = [mode for mode in hooks.hook_modes() if mode.hook is None or mode.hook.name in ("fp16", "int8")]
    with (
        mock.patch.object(hooks, "cases", return_value=[Case("small", "small", small_case)]),
        mock.patch.object(hooks, "hook_modes", return_value=modes),
        mock.patch.object(step, "measure_alone", measured),
        suppress(Ended),
    ):
        hooks.measure(run)
    rows = [row for row in results.read(path) if row["kind"] == "step with hooks"]
    return [(row["contestant"], row["result"]) for row in rows], loaded, run.deadline > deadline


KERNELS_OF_HOOKS = ["pack_fp32_to_fp16", "unpack_fp16_to_fp32", "block8_encode_fp32_int8_256"]


def test_rows_of_hooks_are_there_when_the_section_is_ended(simulated_ranks: RankPool, tmp_path: Path) -> None:
    """And kernels are loaded before anything is measured, in time that does not count."""
    (found,) = simulated_ranks.run(hooks_until_ended, 1, tmp_path / "gpu.json")
    rows, loaded, has_later_deadline = found
    assert [name for name, _ in rows] == ["plain", "torch", "torch-again", "fastddp", "torch+fp16", "fastddp+fp16"]
    assert "WRONG" not in {result for _, result in rows}
    assert loaded == KERNELS_OF_HOOKS
    assert has_later_deadline


def facts_and_sums(rank: int, folder: Path) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    dist.destroy_process_group()
    fake_cuda.schedule("in_order")
    device = torch.device(fake_cuda.DEVICE, 0)
    for section in (facts, sum_shards):
        name = section.__name__.rpartition(".")[2]
        section.measure(results.Run(device, results.Results(folder / "gpu.json", name), quick=True, deadline=0.0))
    rows = results.read(folder / "gpu.json")
    sums = [(row["contestant"], row["result"]) for row in rows if row["kind"] == "shards kernel"]
    return [row for row in rows if row["kind"] == "facts"], sums


def test_facts_say_what_the_backend_offers_and_what_the_first_wrapper_takes(
    simulated_ranks: RankPool, tmp_path: Path
) -> None:
    (((row,), sums),) = simulated_ranks.run(facts_and_sums, 1, tmp_path)
    assert row["supports_tensor_alloc"] is False
    assert row["model_mib"] == pytest.approx(8.0, rel=0.01)
    # Nobody counts it on the simulated device.
    assert {row[f"used_{when}_mib"] for when in ("before", "after_wrap", "after_step")} == {None}
    assert sums == [("copy_", "right"), ("operators", "right"), ("fastddp", "right")]


@pytest.mark.tier("nightly")
def test_one_operation_of_block8_is_measured_however_little_time_there_is(
    simulated_ranks: RankPool, tmp_path: Path
) -> None:
    (found,) = simulated_ranks.run(block8_without_time, 1, tmp_path / "gpu.json")
    assert found == [("encode", "copy_", "right"), ("encode", "fastddp", "right")]


def steps_over_the_emulated_wire(rank: int, library: Path) -> list[int]:
    """Collectives of each step: of three buckets, and of the window's status."""
    dist.destroy_process_group()
    device = torch.device(fake_cuda.DEVICE)
    fake_cuda.schedule("in_order")
    seen = []
    extension = import_library(library)
    with (
        mock.patch.object(emulation, "load_extension", return_value=extension),
        emulation.emulated_group(networks.INSTANT, 4, device) as group,
    ):
        layers = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3))).to(device)
        model = fastddp.DistributedDataParallel(layers, bucket_cap_mb=0)
        for _ in range(4):
            before, _, _ = group.counts()
            model.zero_grad()
            model(torch.ones(2, 4, device=device)).sum().backward()
            fake_cuda.synchronize()
            seen.append(group.counts()[0] - before)
        del model
    return seen[2:]


@pytest.mark.tier("nightly")
def test_the_emulated_wire_carries_whole_steps(simulated_ranks: RankPool, tmp_path: Path) -> None:
    folder = ROOT / "bench" / "gpu"
    cpp_extension.load(
        "fastddp_emulated_wire",
        [str(folder / "emulated_wire.cpp"), str(TESTS / "support" / "emulated_wire_stub.cpp")],
        extra_include_paths=[str(folder)],
        extra_cflags=["-O0", "-g0"],
        build_directory=str(tmp_path),
        is_python_module=False,
    )
    assert simulated_ranks.run(steps_over_the_emulated_wire, 1, tmp_path / "fastddp_emulated_wire.so") == [[4, 4]]
