"""What `bench.step --rate` and others measure on: two network namespaces and the cable between them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from repository import ROOT

# Only while bench is imported: with the root there for good, kernels/ could shadow the package of that name on PyPI.
sys.path.append(str(ROOT))

from bench import harness, netns

sys.path.pop()

from fastddp.ranks import placement

_FOLDER = Path("/run/netns")


@pytest.fixture(scope="module")
def _possible() -> None:
    if reason := netns.unavailable():
        pytest.skip(reason)


needs_namespaces = pytest.mark.usefixtures("_possible")


# --------------------------------------------------------------------------------------------------------- the cable


@needs_namespaces
def test_the_rate_is_kept_in_both_directions_between_what_counts_as_two_machines() -> None:
    found: list[bytes] = []
    with netns.pair("100mbit") as ends:
        for sender, receiver in (ends, ends[::-1]):
            transfer = netns.send(sender, receiver, 4_000_000)
            assert 0.31 < transfer.seconds < 1.5  # 0.32 s of bytes, of which the first 25 kB come at once, and headers
            assert transfer.congestion_control in netns._AVAILABLE.read_text().split()
        outside = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
        assert f" {netns.DEVICE}@" not in outside
        for end in (*ends, ends[0]):
            end.run(lambda: found.append(placement._this_machine()))
    assert found[0] == found[2] != found[1]
    assert placement._this_machine() not in found


# ------------------------------------------------------------------------------------------------------ and its removal


def _python(script: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", script], cwd=harness.ROOT, stdout=subprocess.PIPE, text=True)


def _gone(*ends: netns.End | str) -> bool:
    names = [end if isinstance(end, str) else end.name for end in ends]
    return not any((_FOLDER / name).exists() for name in names)


# Says the names of its namespaces and stays.
_HOLDS_A_PAIR = """
import time
from bench import netns
with netns.pair("1gbit") as (left, right):
    print(left.name, right.name, flush=True)
    time.sleep(60)
"""


@needs_namespaces
def test_everything_is_removed_at_the_end_and_after_an_exception() -> None:
    with netns.pair("1gbit") as ends:
        inside = subprocess.Popen(["ip", "netns", "exec", ends[0].name, "sleep", "60"])
        pids = ["ip", "netns", "pids", ends[0].name]
        while str(inside.pid) not in subprocess.run(pids, capture_output=True, text=True).stdout.split():
            time.sleep(0.01)
    assert _gone(*ends)
    assert inside.wait(timeout=10) == -signal.SIGKILL
    with pytest.raises(ZeroDivisionError), netns.pair("1gbit") as ends:
        1 / 0
    assert _gone(*ends)


@needs_namespaces
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_everything_is_removed_when_a_signal_ends_the_process(number: signal.Signals, status: int) -> None:
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("under nohup, children ignore it")
    child = _python(_HOLDS_A_PAIR)
    names = child.stdout.readline().split()
    assert len(names) == 2
    assert not _gone(*names)
    child.send_signal(number)
    assert child.wait(timeout=20) == status
    assert _gone(*names)
