"""`fastddp doctor` as users start it: alone, and under torchrun with two ranks on the CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fastddp.tools.commands import app
from fastddp.tools.doctor import exchange
from fastddp.tools.doctor.exchange import Timing
from fastddp.tools.doctor.together import seat
from repository import TESTS

BIN = Path(sys.executable).parent
SCRIPT = TESTS / "support" / "doctor_script.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
pytestmark = pytest.mark.timeout(300)
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="what is said of a machine without a GPU")


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    mine = {name: value for name, value in os.environ.items() if name != "RANK"} | environment
    return subprocess.run(command, capture_output=True, text=True, check=False, env=mine, timeout=280)


def under_torchrun(trouble: str, limit: float = 60) -> tuple[int, str]:
    rank = [sys.executable, str(SCRIPT), trouble, "doctor", "--time-limit", str(limit)]
    ended = run([*TORCHRUN, *rank], GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    return ended.returncode, " ".join(ended.stdout.split())


@no_gpu
def test_alone_it_says_what_is_there(tmp_path: Path) -> None:
    file = tmp_path / "doctor.json"
    ended = run([str(BIN / "fastddp"), "doctor", "--json", str(file)])
    assert (ended.returncode, ended.stderr) == (0, "")
    out = " ".join(ended.stdout.split())
    for told in (
        f"torch │ {torch.__version__}",
        "fastddp._C │ compiled for torch 2.",
        "no NVIDIA driver",
        "nvidia-smi topo -m",
        "nccl-tests",
        "cpu │ pack and unpack │ C++ │ right",
        "cpu │ PowerSGD │ C++ │ right",
        "Nothing is wrong",
    ):
        assert told in out
    row = json.loads(file.read_text())
    assert (row["status"], row["ranks"], row["exchange"]) == (0, None, None)
    assert row["software"]["torch"] == torch.__version__
    assert row["kernels"][0]["check"]["made_of"] == "C++"


@no_gpu
@pytest.mark.tier("nightly")
def test_under_torchrun_ranks_exchange_and_rank_0_says_how_fast(tmp_path: Path) -> None:
    file = tmp_path / "doctor.json"
    command = [*TORCHRUN, str(BIN / "fastddp"), "doctor", "--json", str(file)]
    ended = run(command, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("Software") == 1
    assert "Allreduce of 25 MiB over gloo, 2 ranks, interface lo: " in ended.stdout
    assert re.findall(r"(rank \d, \w+) +│ (\w+)", ended.stdout) == [
        ("rank 0, cpu", "pack"),
        ("rank 0, cpu", "PowerSGD"),
        ("rank 0, cpu", "8"),
        ("rank 0, cpu", "sums"),
    ]
    row = json.loads(file.read_text())
    assert row["ranks"] == 2
    measured = row["exchange"]
    assert measured["bus_gb_per_s"] == pytest.approx(25 * 2**20 / measured["seconds"] / 1e9)  # 2 (n - 1) / n is 1
    assert f"{1e3 * measured['seconds']:.3g} ms" in ended.stdout
    assert "wrong" not in [finding["level"] for finding in row["findings"]]


OF_TWO = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("arguments", "environment", "complaint"),
    [
        *[(f"--time-limit {seconds}", {}, "--time-limit") for seconds in ("0", "nan", "1e300")],
        ("--json /nowhere/doctor.json", {}, "there is no folder"),
        ("", {"RANK": "3", **OF_TWO}, "RANK is '3', WORLD_SIZE is '2'"),
    ],
)
def test_wrong_usage_has_status_2(arguments: str, environment: dict[str, str], complaint: str) -> None:
    refused = CliRunner(env=environment).invoke(app, ["doctor", *arguments.split()])
    assert refused.exit_code == 2
    assert complaint in " ".join(re.sub("[│╭╮╰╯─]", "", refused.output).split())


FAILED, SILENT = (
    r"WRONG rank 1: It failed: RuntimeError: what a rank may raise\.",
    r"WRONG rank 1: It did not answer within 20 s\.",
)
DIED = r"WRONG rank 1: The launcher ended the run before an answer: a rank has died\."
TROUBLES: dict[str, tuple[float, int, list[str]]] = {  # the time limit, how much is wrong, and what is said
    "other versions": (
        60,
        2,
        [
            r"WRONG torch: Ranks differ: 2\.12\.1, [^;]* on rank 1; \S+, [^;]* on rank 0\.",
            r"WRONG NCCL: Ranks differ: 2\.20\.5 on rank 1;",
            "Allreduce of 1 MiB over gloo",
        ],
    ),
    "wrong sums": (60, 1, [r"WRONG allreduce: Sums are wrong on rank 1\."]),
    "fail in examination": (250, 1, [FAILED, "remark allreduce: Nothing was measured: not all ranks came that far"]),
    "hang in examination": (20, 1, [f"{SILENT} Last seen at: initialising CUDA and loading fastddp"]),
    "hang in allreduce 2": (20, 1, [SILENT, "Others wait for it, at: allreduce 2"]),
    "die in examination": (250, 1, [DIED]),
}


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("trouble", TROUBLES)
def test_the_rank_with_a_trouble_is_named_within_the_time_limit(trouble: str) -> None:
    limit, wrong, said = TROUBLES[trouble]
    begin = time.monotonic()
    status, out = under_torchrun(trouble, limit)
    assert (status, out.count("WRONG")) == (1, wrong)
    assert all(re.search(words, out) for words in said)
    assert "rank 0:" not in out
    assert time.monotonic() - begin < 240


OWN = {0: "a GPU-1", 1: "a GPU-2", 2: "b GPU-1"}
SHARED, NONE = OWN | {3: "a GPU-1"}, {0: None, 1: None}


def test_nccl_is_used_where_each_rank_has_a_gpu_to_itself_and_gloo_beside_gpus_is_explained() -> None:
    chosen = [exchange.choose_backend([*gpus.values()], has_nccl=True) for gpus in (OWN, SHARED, NONE)]
    assert [*chosen, exchange.choose_backend([*OWN.values()], has_nccl=False)] == ["nccl", "gloo", "gloo", "gloo"]
    (finding,) = exchange.findings("gloo", SHARED, {})
    assert (finding.level, "ranks 0, 3 share some" in finding.what) == ("wrong", True)
    (finding,) = exchange.findings("gloo", OWN | {3: None}, {})
    assert finding.level == "remark"
    assert exchange.findings("gloo", NONE, {}) == exchange.findings("nccl", OWN, {}) == []


def test_the_bus_carries_what_a_ring_does_in_the_time_of_the_slowest_rank() -> None:
    two = exchange.put_together("gloo", {0: Timing(0.5, True), 1: Timing(1.0, True)})
    eight = exchange.put_together("nccl", dict.fromkeys(range(8), Timing(1.0, True)))
    assert (two.seconds, two.bus_gb_per_s) == (1.0, pytest.approx(25 * 2**20 / 1e9))
    assert eight.bus_gb_per_s == pytest.approx(1.75 * 25 * 2**20 / 1e9)


OF_A_LAUNCHER = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "node", "MASTER_PORT": "29500", "LOCAL_RANK": "1"}


def test_seats_are_those_of_the_launcher() -> None:
    assert seat({}) is None
    place = seat(OF_A_LAUNCHER)
    assert place is not None
    assert (place.rank, place.size, place.local_rank, place.port, place.has_agent) == (3, 8, 1, 29500, False)
    with pytest.raises(ValueError, match="MASTER_ADDR is 'not set', MASTER_PORT is 'not set'"):
        seat({"RANK": "3", "WORLD_SIZE": "8"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "8"),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", 5000 * "9"),
        ("LOCAL_RANK", "one"),
        ("MASTER_PORT", "99998"),
        ("MASTER_ADDR", ""),
    ],
)
def test_what_no_launcher_would_set_is_refused(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is '{value[:20]}'"):
        seat(OF_A_LAUNCHER | {name: value})
