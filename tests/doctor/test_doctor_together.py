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
from fastddp.tools.doctor.exchange import Exchange, Timing
from fastddp.tools.doctor.seat import seat
from repository import TESTS

BIN = Path(sys.executable).parent
SCRIPT = TESTS / "support" / "doctor_script.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
pytestmark = pytest.mark.timeout(300)
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="what is said of a machine without a GPU")


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    mine = {name: value for name, value in os.environ.items() if name != "RANK"} | environment
    return subprocess.run(command, capture_output=True, text=True, check=False, env=mine, timeout=280)


def unframed(text: str) -> str:
    """Without frames and the ends of lines."""
    return " ".join(re.sub("[│╭╮╰╯─]", "", text).split())


def under_torchrun(trouble: str, limit: float = 60) -> tuple[int, str]:
    """Exit status of torchrun and what rank 0 printed."""
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
        "fastddp._C │ built for torch 2.",
        "no NVIDIA driver",
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
    assert "Allreduce over gloo, 2 ranks" in ended.stdout
    assert re.findall(r"(rank \d, \w+) +│ (\w+)", ended.stdout) == [
        ("rank 0, cpu", "pack"),
        ("rank 0, cpu", "PowerSGD"),
        ("rank 0, cpu", "8"),
        ("rank 0, cpu", "sums"),
    ]
    row = json.loads(file.read_text())
    assert row["ranks"] == 2
    measured = row["exchange"]["all_reduces"]
    assert [one["bytes"] for one in measured] == [8, 2**20, 25 * 2**20, 100 * 2**20]
    for one in measured:
        assert one["seconds"] > 0
        assert one["bus_gb_per_s"] == pytest.approx(one["bytes"] / one["seconds"] / 1e9)  # 2 (n - 1) / n is 1
        bandwidth = f"{one['bus_gb_per_s']:.3g}" if one["bytes"] > 8 else ""
        assert re.search(rf"{1e6 * one['seconds']:,.0f} +│ +{bandwidth} ", ended.stdout)
    assert measured[0]["seconds"] < measured[3]["seconds"]
    assert [finding["level"] for finding in row["findings"] if finding["level"] == "wrong"] == []


@pytest.mark.tier("nightly")
def test_wrong_usage_has_status_2(tmp_path: Path) -> None:
    command = [str(BIN / "fastddp"), "doctor"]
    assert run([*command, "--unknown"]).returncode == 2
    assert run([*command, "--time-limit", "0"]).returncode == 2
    no_folder = run([*command, "--json", str(tmp_path / "none" / "doctor.json")])
    assert no_folder.returncode == 2
    assert "there is no folder" in " ".join(no_folder.stderr.split())
    half = run(command, RANK="0")
    assert half.returncode == 2
    assert "WORLD_SIZE" in half.stderr
    beyond = run(command, RANK="3", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="29500")
    assert beyond.returncode == 2
    assert "RANK is '3', not a whole number from 0 to 1 (WORLD_SIZE is 2)" in unframed(beyond.stderr)


@pytest.mark.parametrize("seconds", ["inf", "nan", "1e300"])
def test_a_time_limit_is_a_number_of_seconds(seconds: str) -> None:
    refused = CliRunner().invoke(app, ["doctor", "--time-limit", seconds])
    assert refused.exit_code == 2
    assert "--time-limit" in refused.output


@pytest.mark.tier("nightly")
@no_gpu
def test_a_file_that_cannot_be_written_is_named_after_all_has_been_printed() -> None:
    ended = run([str(BIN / "fastddp"), "doctor", "--json", "/dev/full"])
    assert ended.returncode == 2
    assert "Nothing is wrong" in ended.stdout
    assert ended.stderr == (
        "fastddp doctor: /dev/full cannot be written: No space left on device. Name another file.\n"
    )


@pytest.mark.tier("nightly")
def test_ranks_with_other_versions_are_named() -> None:
    status, out = under_torchrun("other versions")
    assert status == 1
    assert re.search(r"WRONG torch: Ranks differ: 2\.12\.1, [^;]* on rank 1; \S+, [^;]* on rank 0\.", out)
    assert re.search(r"WRONG NCCL: Ranks differ: 2\.20\.5 on rank 1;", out)
    assert "Allreduce over gloo" in out


@pytest.mark.tier("nightly")
def test_a_rank_with_wrong_sums_is_named() -> None:
    status, out = under_torchrun("wrong sums")
    assert status == 1
    assert "WRONG allreduce: Sums are wrong on rank 1." in out


@pytest.mark.tier("nightly")
def test_a_rank_that_fails_is_named_at_once() -> None:
    begin = time.monotonic()
    status, out = under_torchrun("fail in examination", limit=250)
    assert status == 1
    assert "WRONG rank 1: It failed: RuntimeError: what a rank may raise." in out
    assert "remark allreduce: Nothing was measured: not all ranks came that far." in out
    assert "rank 0:" not in out
    status, out = under_torchrun("fail in exchange", limit=250)
    assert status == 1
    assert "WRONG rank 1: It failed: RuntimeError: what a rank may raise." in out
    assert "rank 0:" not in out
    assert time.monotonic() - begin < 240


@pytest.mark.tier("nightly")
@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ("hang in the beginning", "It did not answer within 20 s. Last seen at: nowhere: it has not come."),
        ("hang in examination", "It did not answer within 20 s. Last seen at: asking for versions."),
        ("hang in exchange", "Others wait for it, at: joining the process group (gloo)."),
        ("hang in round 2", "Others wait for it, at: allreduces of 8 B, round 2."),
    ],
)
def test_a_rank_that_hangs_is_named_within_the_time_limit(trouble: str, said: str) -> None:
    status, out = under_torchrun(trouble, limit=20)
    assert status == 1
    assert "WRONG rank 1: It did not answer within 20 s." in out
    assert said in out
    assert out.count("WRONG") == 1


@pytest.mark.tier("nightly")
def test_a_rank_that_dies_is_named_when_torchrun_ends_the_others() -> None:
    status, out = under_torchrun("die in examination", limit=250)
    assert status == 1
    assert "WRONG rank 1: The launcher ended the run before an answer: a rank has died." in out
    assert out.count("WRONG") == 1


# ---------------------------------------------------------------------------------------- what no CPU can show


def test_nccl_is_used_where_each_rank_has_a_gpu_to_itself() -> None:
    own = {0: ("a", "GPU-1"), 1: ("a", "GPU-2"), 2: ("b", "GPU-1")}
    assert exchange.choose_backend(own, has_nccl=True) == "nccl"
    assert exchange.choose_backend(own, has_nccl=False) == "gloo"
    assert exchange.choose_backend(own | {3: ("a", "GPU-1")}, has_nccl=True) == "gloo"
    assert exchange.choose_backend({0: None, 1: None}, has_nccl=True) == "gloo"


def test_gloo_on_a_machine_with_gpus_is_explained() -> None:
    shared = {0: ("a", "GPU-1"), 1: ("a", "GPU-1")}
    (finding,) = exchange.backend_findings("gloo", shared, has_gpus=True)
    assert (finding.level, "ranks 0, 1 share one" in finding.what) == ("wrong", True)
    (finding,) = exchange.backend_findings("gloo", {0: None, 1: None}, has_gpus=True)
    assert finding.level == "remark"
    assert exchange.backend_findings("gloo", {0: None, 1: None}, has_gpus=False) == []
    assert exchange.backend_findings("nccl", {0: ("a", "GPU-1")}, has_gpus=True) == []


def timed(seconds: float) -> Exchange:
    return exchange.put_together("nccl", {rank: [Timing(100 * 2**20, seconds, True)] for rank in range(8)})


def test_the_bus_carries_what_a_ring_does() -> None:
    two = exchange.put_together("gloo", {0: [Timing(10**9, 0.5, True)], 1: [Timing(10**9, 1.0, True)]})
    assert two.all_reduces[0].seconds == 1.0  # the slowest rank's
    assert two.all_reduces[0].bus_gb_per_s == pytest.approx(1.0)
    assert timed(1e-3).all_reduces[0].bus_gb_per_s == pytest.approx(1.75 * 104.8576)


def test_an_exchange_much_slower_than_the_nvlinks_is_a_remark() -> None:
    right = {0: [Timing(100 * 2**20, 1.0, True)]}
    assert exchange.findings(timed(0.5e-3), right, nvlink_gb_per_s=478.0) == []
    assert exchange.findings(timed(10e-3), right, nvlink_gb_per_s=None) == []
    (finding,) = exchange.findings(timed(10e-3), right, nvlink_gb_per_s=478.0)
    assert (finding.level, "went at 18 GB/s" in finding.what) == ("remark", True)


def test_seats_are_those_of_the_launcher() -> None:
    assert seat({}) is None
    given = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "node", "MASTER_PORT": "29500", "LOCAL_RANK": "1"}
    place = seat(given)
    assert place is not None
    assert (place.rank, place.size, place.local_rank, place.port, place.has_agent) == (3, 8, 1, 29500, False)
    with pytest.raises(ValueError, match="MASTER_ADDR, MASTER_PORT"):
        seat({"RANK": "3", "WORLD_SIZE": "8"})


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("RANK", "8", "RANK is '8', not a whole number from 0 to 7 (WORLD_SIZE is 8): set it right, or"),
        ("RANK", "-1", "RANK is '-1', not a whole number from 0 to 7"),
        ("RANK", "first", "RANK is 'first', not a whole number"),
        ("WORLD_SIZE", "0", "WORLD_SIZE is '0', not a whole number from 1"),
        ("WORLD_SIZE", 5000 * "9", "not a whole number from 1"),
        ("WORLD_SIZE", "", "WORLD_SIZE is not"),
        ("LOCAL_RANK", "one", "LOCAL_RANK is 'one', not a whole number from 0"),
        ("MASTER_PORT", "99998", "MASTER_PORT is '99998', not a whole number from 1 to 65535"),
        ("MASTER_PORT", "0", "MASTER_PORT is '0', not a whole number from 1 to 65535"),
        ("MASTER_ADDR", "", "MASTER_ADDR is not"),
    ],
)
def test_what_no_launcher_would_set_is_refused(name: str, value: str, complaint: str) -> None:
    given = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "node", "MASTER_PORT": "29500", "LOCAL_RANK": "1"}
    with pytest.raises(ValueError, match=re.escape(complaint)):
        seat(given | {name: value})
