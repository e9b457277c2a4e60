"""Replicas under torchft, as real processes, of which one is lost in the middle of something, and comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from elastic_job import Job, Replica, job
from repository import ROOT

sys.path.append(str(ROOT))  # only now: with the root there for good, kernels/ could shadow another package

from bench import netns

sys.path.pop()

pytest.importorskip("torchft")
pytestmark = pytest.mark.timeout(240)
SLOW, NIGHTLY = pytest.mark.tier("slow"), pytest.mark.tier("nightly")

DIES_AT = 12
MORE = 10  # steps that a replica trains with once it has come
PAUSE = "--pause=0.03"


def run_with_a_loss(running: Job, *arguments: object, where: str, how: str = "SIGKILL") -> list[Replica]:
    """Three replicas, of which number 1 is lost at a step and comes again. They run on."""
    fault = ["--die-at", DIES_AT, "--where", where, "--how", how]
    replicas = [running.start(number, PAUSE, *arguments, *(fault if number == 1 else [])) for number in range(3)]
    stays, lost = replicas[0], replicas[1]
    lost.wait_for(lambda: bool(lost.of("dies")), "does not die")
    if how == "SIGKILL":
        lost.process.wait()
    else:
        stays.wait_for(lambda: max(stays.committed, default=0) > lost.of("dies")[0]["step"] + 3, "does not go on")
        lost.end()
    comes = running.start(1, PAUSE, *arguments)
    replicas.append(comes)
    comes.wait_for(lambda: len(comes.committed) >= MORE, "does not come back")
    return replicas


def check_replicas(running: Job) -> None:
    """After each step that any replica has committed, all that have committed it had the same bits."""
    digests = running.digests()
    assert len(digests) > DIES_AT + MORE
    assert sorted(digests) == list(range(len(digests)))
    assert {step: found for step, found in digests.items() if len(found) > 1} == {}


def check_lost_steps(replicas: list[Replica], most: int = 1) -> None:
    """How many steps the replica that was always there has computed in vain."""
    vain = [said["step"] for said in replicas[0].of("step") if not said["committed"]]
    assert len(vain) <= most, vain


def check_replay(running: Job, last: int) -> None:
    """SGD in one process, with the inputs of those who took part in each step, comes to the same parameters."""
    from elastic_replica import inputs_of, module_of

    module = module_of()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    committed = [said for one in running.replicas for said in one.of("step") if said["committed"]]
    for step in range(last + 1):
        (quorum,) = {said["quorum"] for said in committed if said["step"] == step}
        took_part = [
            one.number
            for one in running.replicas
            for said in one.of("averaged")
            if (said["step"], said["quorum"]) == (step, quorum)
        ]
        assert {said["ranks"] for said in committed if said["step"] == step} == {len(took_part)}
        optimizer.zero_grad()
        for replica in took_part:
            (module(inputs_of(step, replica)).square().mean() / len(took_part)).backward()
        optimizer.step()
    sums = [parameter.double().sum().item() for parameter in module.parameters()]
    torch.testing.assert_close(sums, running.replicas[0].committed[last]["sums"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "where",
    [pytest.param(where, marks=SLOW if where == "commit" else NIGHTLY) for where in ("forward", "bucket", "commit")],
)
def test_a_replica_is_killed(where: str) -> None:
    with job() as running:
        replicas = run_with_a_loss(running, where=where)
        check_replicas(running)
        check_lost_steps(replicas)
        check_replay(running, min(max(one.committed) for one in (replicas[0], replicas[3])))


@SLOW
@pytest.mark.skipif(not hasattr(dist.ProcessGroup, "reconfigure"), reason="this torch makes a group for each quorum")
@pytest.mark.parametrize("where", ["bucket", "commit"])
def test_a_replica_of_a_group_that_torch_gives_other_ranks_is_killed(where: str) -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with job() as running:
        replicas = run_with_a_loss(running, "--native", store.port, where=where)
        check_replicas(running)
        check_lost_steps(replicas)


@pytest.mark.parametrize(
    "hook", [pytest.param(hook, marks=SLOW if hook == "int8" else NIGHTLY) for hook in ("int8", "powersgd", "fp16")]
)
def test_a_replica_is_killed_with_compressed_legs_in_flight(hook: str) -> None:
    with job() as running:
        replicas = run_with_a_loss(running, "--hook", hook, where="bucket")
        check_replicas(running)
        check_lost_steps(replicas)


@SLOW
def test_a_replica_stands_still() -> None:
    with job() as running:
        replicas = run_with_a_loss(running, where="bucket", how="SIGSTOP")
        check_replicas(running)
        check_lost_steps(replicas)
        assert any("has not heard of replica 1" in line for line in replicas[0].errors)


@NIGHTLY
@pytest.mark.skipif(bool(netns.unavailable()), reason=str(netns.unavailable()))
def test_a_cable_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two replicas beside the lighthouse go on without the one behind the cable."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", netns.DEVICE)
    with netns.pair("1gbit") as (left, right), job(where=left.run, host=left.address) as running:
        ends = (left, left, right)
        replicas = [
            running.start(number, PAUSE, "--address", end.address, enter=end.enter) for number, end in enumerate(ends)
        ]
        stays = replicas[0]
        stays.wait_for(lambda: any(said["ranks"] == 3 for said in stays.of("step")[5:]), "does not train")
        subprocess.run(["ip", "-n", right.name, "link", "set", netns.DEVICE, "down"], check=True)
        stays.wait_for(lambda: len(stays.committed) > DIES_AT + MORE + 1, "does not go on")
        assert [said["ranks"] for said in stays.of("step")][-MORE:] == [2] * MORE
        check_replicas(running)
        check_lost_steps(replicas)


@SLOW
def test_a_joiner_with_another_model_is_named_and_the_others_go_on() -> None:
    with job() as running:
        stays, second = (running.start(number, PAUSE) for number in range(2))
        stays.wait_for(lambda: len(stays.committed) > 5, "does not train")
        other = running.start(2, PAUSE, "--frozen")
        assert other.process.wait(60) != 0
        assert any("do not hold the same model" in line for line in other.errors)
        went = len(stays.committed)
        stays.wait_for(lambda: len(stays.committed) > went + MORE, "does not go on")
        second.wait_for(lambda: len(second.committed) > went + MORE, "does not go on")
        check_replicas(running)


@NIGHTLY
def test_many_kills_leave_nothing_behind() -> None:
    """The replica that is always there has as many threads and descriptors after eight losses as after two."""
    with job() as running:
        stays = running.start(0, PAUSE)
        counts = []
        for _ in range(8):
            comes = running.start(1, PAUSE)
            comes.wait_for(lambda comes=comes: len(comes.committed) > 5, "does not join")  # type: ignore[misc]
            of_process = Path("/proc", str(stays.process.pid))
            counts.append([len([*(of_process / kind).iterdir()]) for kind in ("task", "fd")])
            os.kill(comes.process.pid, signal.SIGKILL)
            comes.process.wait()
        for of_kind in zip(*counts, strict=True):
            assert max(of_kind[4:]) <= max(of_kind[1:4]) + 1, counts
