"""What `bench.network` measures on: two network namespaces and the cable between them; and its command line."""

from __future__ import annotations

import doctest
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from repository import ROOT

# Only while bench is imported: with the root there for good, kernels/ could shadow the package of that name on PyPI.
sys.path.append(str(ROOT))

from bench import harness, netns, network

sys.path.pop()

from fastddp.exchange import placement

_FOLDER = Path("/run/netns")


@pytest.fixture(scope="module", autouse=True)
def leftovers() -> None:
    """Not of this run."""
    if os.geteuid() == 0:
        netns.remove_leftovers()


@pytest.fixture(scope="module")
def _possible() -> None:
    reason = netns.unavailable()
    if reason is not None:
        pytest.skip(reason)


needs_namespaces = pytest.mark.usefixtures("_possible")


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(netns).failed == doctest.testmod(network).failed == 0


@pytest.mark.parametrize("rate", ["fast", "1", "0gbit", "1gbps", "-1mbit", "1gbit "])
def test_what_is_no_rate_is_refused(rate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="is not a rate"):
        netns.bits_per_second(rate)
    monkeypatch.setattr(sys, "argv", ["bench.network", f"--rate={rate}"])
    with pytest.raises(SystemExit, match="2"):
        network.main()


def test_without_root_it_says_so_and_all_is_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["bench.network", "--json", str(tmp_path / "not_written.json")])
    network.main()
    assert capsys.readouterr() == ("bench.network was skipped: network namespaces take root.\n", "")
    assert not list(tmp_path.iterdir())


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    assert netns.unavailable() == "there is no ip and no tc (iproute2) on this machine"


def test_what_a_container_may_not_do_is_a_reason_and_an_error_of_ours_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(netns.shutil, "which", lambda tool: tool)
    for message, is_reason in (("mount: Operation not permitted", True), ("Error: inet prefix is expected", False)):

        def refuse(rate: str, message: str = message) -> None:
            raise netns.NetworkError(message)

        monkeypatch.setattr(netns, "pair", refuse)
        if is_reason:
            assert netns.unavailable() == message
        else:
            with pytest.raises(netns.NetworkError):
                netns.unavailable()


# --------------------------------------------------------------------------------------------------------- the cable


@needs_namespaces
def test_bytes_arrive_in_both_directions_and_nothing_of_it_is_seen_outside() -> None:
    with netns.pair("1gbit") as ends:
        for server, client in (ends, ends[::-1]):
            with server.socket() as listening, client.socket() as calling:
                listening.bind((server.address, 0))
                listening.listen()
                calling.connect(listening.getsockname())
                answering, (caller, _) = listening.accept()
                assert caller == client.address
                with answering:
                    calling.sendall(b"ping")
                    assert answering.recv(4) == b"ping"
        outside = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
        assert f" {netns.DEVICE}@" not in outside


@needs_namespaces
def test_the_rate_is_kept() -> None:
    with netns.pair("100mbit") as (left, right):
        for sender, receiver in ((left, right), (right, left)):
            transfer = netns.send(sender, receiver, 4_000_000)
            assert 0.31 < transfer.seconds < 1.5  # 0.32 s of bytes, of which the first 25 kB come at once, and headers
            assert transfer.congestion_control in netns._AVAILABLE.read_text().split()


@needs_namespaces
def test_a_process_that_enters_takes_its_threads_along() -> None:
    with netns.pair("1gbit") as (left, _):
        script = "\n".join(
            [
                "import socket, threading",
                "from bench import netns",
                f"netns.End({left.name!r}, {left.address!r}).enter()",
                "threading.Thread(target=lambda: print([name for _, name in socket.if_nameindex()])).start()",
            ]
        )
        assert f"'{netns.DEVICE}'" in _python(script).communicate(timeout=20)[0]


@needs_namespaces
def test_the_two_ends_count_as_two_machines() -> None:
    found: list[bytes] = []
    with netns.pair("1gbit") as ends:
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
        while str(inside.pid) not in _pids_in(ends[0].name):
            time.sleep(0.01)
    assert _gone(*ends)
    assert inside.wait(timeout=10) == -signal.SIGKILL
    with pytest.raises(ZeroDivisionError), netns.pair("1gbit") as ends:
        1 / 0
    assert _gone(*ends)


def _pids_in(name: str) -> list[str]:
    return subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()


@needs_namespaces
def test_a_pair_that_cannot_be_finished_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    available = tmp_path / "available"
    available.write_text("such")
    monkeypatch.setattr(netns, "_AVAILABLE", available)
    monkeypatch.setattr(netns, "_CONGESTION_CONTROL", "such")
    before = sorted(_FOLDER.iterdir())
    with pytest.raises(netns.NetworkError, match="congctl such"), netns.pair("1gbit"):
        pass
    assert sorted(_FOLDER.iterdir()) == before


@needs_namespaces
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, -signal.SIGINT)]
)
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


@needs_namespaces
def test_a_signal_in_the_middle_of_the_removal_waits_for_its_end() -> None:
    child = _python(
        """
import signal
from bench import netns
remove = netns._remove
def interrupted(name):
    signal.raise_signal(signal.SIGTERM)
    remove(name)
with netns.pair("1gbit") as (left, right):
    print(left.name, right.name, flush=True)
    netns._remove = interrupted
"""
    )
    names = child.communicate(timeout=20)[0].split()
    assert child.returncode == -signal.SIGTERM
    assert len(names) == 2
    assert _gone(*names)


@needs_namespaces
def test_what_a_killed_run_left_is_removed_by_the_next_and_what_others_use_is_not() -> None:
    killed, living = _python(_HOLDS_A_PAIR), _python(_HOLDS_A_PAIR)
    try:
        left, used = killed.stdout.readline().split(), living.stdout.readline().split()
        killed.kill()
        killed.wait(timeout=20)
        assert not _gone(*left)
        with netns.pair("1gbit"):
            assert _gone(*left)
            assert all((_FOLDER / name).exists() for name in used)
    finally:
        living.terminate()
        assert living.wait(timeout=20) == 143


# ------------------------------------------------------------------------------------------------------- the bench


def test_the_first_ranks_sit_at_the_left_end(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []
    monkeypatch.setattr(netns.End, "enter", lambda end: entered.append(end.name))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    seat = network._Seat((netns.End("left", ""), netns.End("right", "")), 2)
    for rank in range(4):
        seat(rank)
    assert entered == ["left", "left", "right", "right"]


def test_ranks_are_those_of_both_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.network", "--ranks-per-node", "4"])
    assert network.parse_arguments().ranks == 8
    monkeypatch.setattr(sys, "argv", ["bench.network", "--ranks-per-node", "0"])
    with pytest.raises(SystemExit, match="2"):
        network.parse_arguments()


@pytest.mark.tier("slow")
@needs_namespaces
def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "network.json"
    command = "--rate 1gbit --case 500x32sq --contestants torch fastddp --hook none fp16 --rounds 2 --warmup 2"
    before = sorted(_FOLDER.iterdir())
    monkeypatch.setattr(sys, "argv", ["bench.network", *command.split(), "--json", str(path)])
    monkeypatch.setattr(sys, "path", [*sys.path, str(harness.ROOT)])  # the ranks inherit it
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the bench sets it
    network.main()
    assert "gloo at 1gbit" in capsys.readouterr().out
    rows = json.loads(path.read_text())
    assert [(row["contestant"], row["hook"], row["gradients"]) for row in rows] == [
        ("torch", "none", "equal"),
        ("fastddp", "none", "equal"),
        ("torch+fp16", "fp16", "within rounding"),
        ("fastddp+fp16", "fp16", "within rounding"),
    ]
    for row in rows:
        assert (row["rate"], row["rate_gbit_s"], row["rounds"]) == ("1gbit", 1.0, 2)
        assert 0.1 < row["tcp_gbit_s"] < 1.0
        bits_a_direction = 8 * row["elements"] * {"none": 4, "fp16": 2}[row["hook"]]
        assert row["median_ms"] > 1e3 * bits_a_direction / 1.1e9  # the gradients did travel over the cable
    assert rows[3]["held_against"] == "torch+fp16"
    assert sorted(_FOLDER.iterdir()) == before
