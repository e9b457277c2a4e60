"""Replicas under torchft, as real processes, of which one is lost in the middle of something, and comes back."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch import Tensor

from elastic_job import Job, Replica, job

pytest.importorskip("torchft")
pytestmark = [pytest.mark.tier("slow"), pytest.mark.timeout(240)]

STEPS = 40
DIES_AT = 12
PAUSE = "--pause=0.03"


def ended(*replicas: Replica) -> None:
    for replica in replicas:
        replica.wait_for(lambda replica=replica: bool(replica.of("done")), "has not ended", 150)  # type: ignore[misc]


def run_with_a_loss(running: Job, *arguments: object, where: str, how: str = "SIGKILL") -> list[Replica]:
    """Three replicas, of which number 1 is lost at a step and started again."""
    given = ["--steps", STEPS, PAUSE, *arguments]
    fault = ["--die-at", DIES_AT, "--where", where, "--how", how]
    replicas = [running.start(number, *given, *(fault if number == 1 else [])) for number in range(3)]
    lost = replicas[1]
    lost.wait_for(lambda: bool(lost.of("dies")), "does not die")
    if how == "SIGKILL":
        lost.process.wait()
    else:  # it stands still until the others have gone on without it
        others = replicas[0]
        others.wait_for(lambda: max(others.committed, default=0) > DIES_AT + 3, "others do not go on")
    if how == "SIGSTOP":
        lost.end()
    replicas.append(running.start(1, *given))
    ended(replicas[0], replicas[2], replicas[3])
    return replicas


def check_replicas(running: Job) -> None:
    """After each step that any replica has committed, all that have committed it had the same bits."""
    digests = running.digests()
    assert sorted(digests) == list(range(STEPS))
    assert {step: found for step, found in digests.items() if len(found) > 1} == {}


def check_lost_steps(replicas: list[Replica], most: int = 1) -> None:
    """How many steps the replica that was always there has computed in vain."""
    vain = [said["step"] for said in replicas[0].of("step") if not said["committed"]]
    assert len(vain) <= most, vain


def replayed(running: Job) -> list[Tensor]:
    """The parameters that SGD ends with, in one process, from the inputs of those who took part in each step."""
    from elastic_replica import inputs_of, module_of

    module = module_of()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        committed = [said for one in running.replicas for said in one.of("step") if said["committed"]]
        (quorum,) = {said["quorum"] for said in committed if said["step"] == step}
        took_part = [
            one.number
            for one in running.replicas
            for said in one.of("averaged")
            if (said["step"], said["quorum"]) == (step, quorum)
        ]
        optimizer.zero_grad()
        for replica in took_part:
            (module(inputs_of(step, replica)).square().mean() / len(took_part)).backward()
        optimizer.step()
    return [parameter.detach() for parameter in module.parameters()]


@pytest.mark.parametrize("where", ["forward", "bucket", "commit"])
def test_a_replica_is_killed(where: str) -> None:
    with job() as running:
        replicas = run_with_a_loss(running, where=where)
        check_replicas(running)
        check_lost_steps(replicas)
        mine = torch.tensor(replicas[0].of("done")[0]["sums"])
        sums = torch.tensor([parameter.double().sum().item() for parameter in replayed(running)])
        torch.testing.assert_close(mine, sums, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("hook", ["int8", "powersgd", "fp16"])
def test_a_replica_is_killed_with_compressed_legs_in_flight(hook: str) -> None:
    with job() as running:
        replicas = run_with_a_loss(running, "--hook", hook, where="bucket")
        check_replicas(running)
        check_lost_steps(replicas)


def test_a_replica_stands_still() -> None:
    with job() as running:
        replicas = run_with_a_loss(running, where="bucket", how="SIGSTOP")
        check_replicas(running)
        check_lost_steps(replicas)
        assert any("has not heard of replica 1" in line for line in replicas[0].errors)


def test_a_joiner_with_another_model_is_named_and_the_others_go_on() -> None:
    with job() as running:
        given = ["--steps", STEPS, "--pause=0.1"]
        replicas = [running.start(number, *given) for number in range(2)]
        replicas[0].wait_for(lambda: len(replicas[0].committed) > 5, "does not train")
        other = running.start(2, *given, "--layers", 5)
        ended(*replicas)
        other.process.wait(60)
        assert other.process.returncode != 0
        assert any("do not hold the same model" in line for line in other.errors)
        check_replicas(running)


def test_many_kills_leave_nothing_behind() -> None:
    """The replica that is always there has as many threads and descriptors after eight losses as after two."""
    with job() as running:
        stays = running.start(0, "--steps", 100_000, PAUSE)
        counts = []
        for _ in range(8):
            comes = running.start(1, "--steps", 100_000, PAUSE)
            comes.wait_for(lambda comes=comes: len(comes.committed) > 5, "does not join")  # type: ignore[misc]
            folder = f"/proc/{stays.process.pid}"
            counts.append([len(os.listdir(f"{folder}/task")), len(os.listdir(f"{folder}/fd"))])
            os.kill(comes.process.pid, signal.SIGKILL)
            comes.process.wait()
        assert max(counts[4:]) <= [count + 2 for count in max(counts[1:4])], counts
