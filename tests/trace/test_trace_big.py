"""Traces of hundreds of megabytes: read in memory that a laptop has."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from trace_files import ChromeTrace

pytestmark = [pytest.mark.tier("nightly"), pytest.mark.timeout(600)]

BYTES = 200_000_000
READ = """
import resource, sys
from pathlib import Path
from fastddp.tools.trace import chrome
from fastddp.tools.trace.analysis import analyse

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

chrome.read(Path(sys.argv[1]))
before = peak()
try:
    report = analyse([chrome.read(Path(sys.argv[2]))], "big")
    split = report.split
    said = (len(report.ranks[0].step_ms), split.compute, split.overlapped, split.exposed, split.idle, *report.warnings)
except chrome.TraceError as error:
    said = str(error)
print(peak() - before)
print(said)
"""


def memory_and_words(small: Path, path: Path) -> tuple[int, str]:
    """What reading a file takes, beyond what a small one does, and what is said of it."""
    command = [sys.executable, "-W", "ignore", "-c", READ, small, path]
    memory, said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n", 1)
    return int(memory), said


def write_steps(path: Path, size: int) -> int:
    """Steps of 100 ms; returns how many.

    2000 operators and kernels of 0.02 ms, one after the other, and a collective from 30 to 60: half hidden.
    """
    trace = ChromeTrace(base_ms=0).steps(0).nccl(30, 30, 60, 0)
    for i in range(1, 2001):
        start = 0.02 * i + 4.98  # 5 to 45
        trace.operator(start, start + 0.02, "aten::convolution_backward_with_a_name_of_some_length")
        name = f"void some_namespace::a_kernel_with_many_arguments<float, {i % 50}>"
        trace.launch(start / 10, start, start + 0.02, name)
    steps = 0
    with path.open("w") as file:
        file.write('{"schemaVersion": 1, "host_name": "machine", "traceEvents": [\n')
        while file.tell() < size:
            for event in trace.events:
                event["ts"] += 100e3 * (steps > 0)
                if "correlation" in event["args"]:
                    event["args"]["correlation"] += 2001 * (steps > 0)
                file.write(json.dumps(event) + ",\n")
            steps += 1
        file.write("{}]}")
    return steps


def test_a_trace_of_200_mb_takes_less_than_half_of_that_in_memory(tmp_path: Path) -> None:
    small, big = tmp_path / "small.json", tmp_path / "big.json"
    write_steps(small, 100_000)
    steps = write_steps(big, BYTES)
    memory, said = memory_and_words(small, big)
    assert memory < BYTES / 2
    counted, *split = map(float, said.strip("()\n").split(","))
    assert counted == steps - 1
    assert split == pytest.approx([25, 15, 15, 45], abs=0.01)


@pytest.mark.parametrize(
    ("before", "message"),
    [
        (f'{{"traceEvents": [{json.dumps(ChromeTrace().operator(0, 1).events[0])}, {{"name": "', "is damaged"),
        ('{"trace_id": "', "is no JSON that can be read (one of its values is longer than 16 Mi"),
    ],
)
def test_a_string_of_300_mb_in_a_small_file_takes_no_such_memory(tmp_path: Path, before: str, message: str) -> None:
    packer = zlib.compressobj(wbits=31)
    with (tmp_path / "string.json.gz").open("wb") as file:
        file.write(packer.compress(before.encode()))
        for _ in range(300):
            file.write(packer.compress(b"a" * 1_000_000))
        file.write(packer.flush())
    small = ChromeTrace().operator(0, 1).write(tmp_path / "small.json.gz")
    memory, said = memory_and_words(small, tmp_path / "string.json.gz")
    assert message in said
    assert memory < 150_000_000
