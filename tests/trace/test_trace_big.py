"""Traces of hundreds of megabytes: read in memory that a laptop has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trace_files import NCCL, NCCL_STREAM, ChromeTrace, bucket

BYTES = 200_000_000
STEP_MS = 100.0
READ = """
import resource, sys
from pathlib import Path
from fastddp.trace import chrome
from fastddp.trace.analysis import analyse

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

chrome.read(Path(sys.argv[1]))
before = peak()
report = analyse([chrome.read(Path(sys.argv[2]))], "big")
split = report.split
print(peak() - before, len(report.ranks[0].step_ms), split.compute, split.overlapped, split.exposed, split.idle)
"""


def one_step() -> ChromeTrace:
    """2000 operators and kernels of 0.02 ms, one after the other, and a collective from 30 to 60: half hidden."""
    trace = ChromeTrace(base_ms=0)
    trace.moment(0, "fastddp.step")
    trace.range(29, 31, bucket("collective", 0, of=1))
    trace.call(30, 0)
    trace.kernel(30, 60, 0, NCCL, NCCL_STREAM)
    for i in range(1, 2001):
        start = 0.02 * i + 4.98  # 5 to 45
        trace.operator(start, start + 0.02, "aten::convolution_backward_with_a_name_of_some_length")
        trace.call(start / 10, i)
        trace.kernel(start, start + 0.02, i, f"void some_namespace::a_kernel_with_many_arguments<float, {i % 50}>")
    return trace


def write_steps(path: Path, size: int) -> int:
    """The same step, later each time; returns how many."""
    events = one_step().events
    steps = 0
    with path.open("w") as file:
        file.write('{"schemaVersion": 1, "host_name": "machine", "traceEvents": [\n')
        while file.tell() < size:
            for event in events:
                event["ts"] += STEP_MS * 1e3 * (steps > 0)
                if "correlation" in event["args"]:
                    event["args"]["correlation"] += 2001 * (steps > 0)
                file.write(json.dumps(event) + ",\n")
            steps += 1
        file.write("{}]}")
    return steps


@pytest.mark.tier("nightly")
@pytest.mark.timeout(600)
def test_a_trace_of_200_mb_takes_less_than_half_of_that_in_memory(tmp_path: Path) -> None:
    small, big = tmp_path / "small.json", tmp_path / "big.json"
    write_steps(small, 100_000)
    steps = write_steps(big, BYTES)
    assert big.stat().st_size > BYTES
    command = [sys.executable, "-W", "ignore", "-c", READ, small, big]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    memory, counted, *split = map(float, done.stdout.split())
    assert memory < BYTES / 2
    assert counted == steps - 1
    assert split == pytest.approx([25, 15, 15, 45], abs=0.01)
