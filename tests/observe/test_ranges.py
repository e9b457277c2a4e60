"""What profilers are told: the names of a step, in their order, and to whom."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from fastddp._build_info import nvtx_headers
from torch import nn

import fastddp
from hooks_by_name import register
from on_ranks import on_ranks
from repository import TESTS


def names_of_a_step(hook: str) -> list[str]:
    """In the order of their beginnings, after buckets have been rebuilt."""
    layers = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    ddp = fastddp.DistributedDataParallel(layers, bucket_cap_mb=1e-6)
    register(ddp, hook)
    for _ in range(3):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            ddp(torch.ones(2, 8)).sum().backward()
        ddp.zero_grad()
    ranges = [event for event in profile.events() if event.name.startswith(("fastddp.", "DistributedDataParallel"))]
    return [event.name for event in sorted(ranges, key=lambda event: (event.time_range.start, -event.time_range.end))]


@on_ranks(2)
def test_a_step_has_a_name_for_each_thing_that_happens_to_a_bucket(rank: int) -> None:
    names = names_of_a_step("none")
    assert names[:2] == ["DistributedDataParallel.forward", "fastddp.step"]
    for bucket, weight in ((0, "1.weight"), (1, "0.weight")):  # on the CPU a gradient is packed when it comes
        text = f"bucket={bucket} of=2 collective=0 tick={bucket} bytes=256 wire=float32 first={weight} last={weight}"
        found = [name for name in names if name.endswith(text)]
        assert found == [f"fastddp.{what} {text}" for what in ("pack", "ready", "collective", "wait")]
    assert [name for name in names if name.startswith("fastddp.gradient")] == [
        "fastddp.gradient parameter=1.weight bucket=0",
        "fastddp.gradient parameter=0.weight bucket=1",
    ]
    assert names.count("fastddp.window") == 1


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        # two collectives a bucket: parts to those who add them up, and sums to all
        ("bf16", {("collective", "0"): 2, ("collective", "1"): 2, ("wait", "1"): 2, ("unpack", "0"): 2}),
        ("python", {("collective", "0"): 2, ("wait", "0"): 2}),
        # P of a bucket and Q of the one before travel together: one more collective than buckets
        ("PowerSGD of rank 1", {("collective", ""): 3, ("project", "1"): 2, ("wait", "0"): 2, ("wait", "1"): 2}),
    ],
)
@on_ranks(2)
def test_hooks_have_names_for_what_they_do(rank: int, hook: str, expected: dict[tuple[str, str], int]) -> None:
    kinds = [re.match(r"fastddp\.(\w+)(?:.* collective=(\d))?", name) for name in names_of_a_step(hook)]
    found = Counter((kind[1], kind[2] or "") for kind in kinds if kind)
    assert {key: found[key] for key in expected} == expected
    assert found["pack", "0"] == 2


@on_ranks(2)
def test_parameters_that_ranks_have_stepped_have_names_when_they_leave_and_when_they_are_waited_for(rank: int) -> None:
    layers = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    ddp = fastddp.DistributedDataParallel(layers, bucket_cap_mb=1e-6)
    optimizer = fastddp.ShardedOptimizer(ddp, torch.optim.SGD, lr=0.1)
    ddp(torch.ones(2, 8)).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    ranges = sorted((event.time_range.start, event.name) for event in profile.events())
    sizes = [bucket.flat.nbytes for bucket in optimizer.parts.shards.buckets]
    assert [name for _, name in ranges if name.startswith("fastddp.")] == [
        *(f"fastddp.gather bucket={bucket} bytes={sizes[bucket]} wire=float32" for bucket in (1, 0)),
        *(f"fastddp.await bucket={bucket}" for bucket in (1, 0)),
    ]


TRAIN = """
import torch, torch.distributed as dist, fastddp
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ddp = fastddp.DistributedDataParallel(torch.nn.Linear(8, 8, bias=False))
for _ in range(2):
    ddp(torch.ones(2, 8)).sum().backward()
dist.destroy_process_group()
"""


@pytest.mark.tier("nightly")
@pytest.mark.skipif(not nvtx_headers, reason="the extension was compiled without NVTX's headers")
def test_a_tool_that_listens_to_nvtx_hears_the_same_names(tmp_path: Path) -> None:
    tool, log = tmp_path / "tool.so", tmp_path / "log"
    headers = [f"-I{folder}" for folder in nvtx_headers]
    subprocess.run(["g++", "-shared", "-fPIC", *headers, "-o", tool, TESTS / "support" / "nvtx_tool.cpp"], check=True)
    environment = {**os.environ, "NVTX_INJECTION64_PATH": str(tool), "FASTDDP_NVTX_LOG": str(log)}
    subprocess.run([sys.executable, "-W", "ignore", "-c", TRAIN], check=True, env=environment)
    lines = log.read_text().splitlines()
    assert lines.count("push DistributedDataParallel.forward") == 2
    assert lines.count("start fastddp.step") == lines.count("start fastddp.window") == 2
    assert sum(line.startswith("end ") for line in lines) == 4
    bucket = "bucket=0 of=1 collective=0 tick=0 bytes=256 wire=float32 first=weight last=weight"
    for what in ("pack", "ready", "collective", "wait"):
        assert lines.count(f"push fastddp.{what} {bucket}") == 2
    assert sum(line.startswith("push ") for line in lines) == lines.count("pop ")
