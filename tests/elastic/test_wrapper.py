"""What ``fastddp.elastic`` refuses by name, and what it reads of torchft."""

from __future__ import annotations

import gc
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fastddp
from fastddp import elastic
from fastddp.elastic.quorum import _MANY, Lighthouse, Quorum, group_of_one
from fastddp.engine import Engine
from fastddp.module.replicas import RanksDiffer
from fastddp.ranks.together import together
from fastddp.regrouping import tell
from on_ranks import on_ranks

CPU = torch.device("cpu")


class Manager:
    """As much of torchft's as the wrapper asks for, alone in its quorum."""

    def __init__(self, *, is_asynchronous: bool = False, mode: str = "DYNAMIC") -> None:
        self._use_async_quorum = is_asynchronous
        self._replica_world_size_mode = SimpleNamespace(name=mode)
        self._pg: Any = None
        self.reported: list[BaseException] = []
        self.reconfigured: list[int] = []

    def _reconfigure_pg(self, communicator_id: int, handles: list[str]) -> None:
        self.reconfigured.append(communicator_id)

    def report_error(self, error: BaseException) -> None:
        self.reported.append(error)


def wrapped(**options: Any) -> tuple[Manager, elastic.DistributedDataParallel]:
    manager = Manager()
    return manager, elastic.DistributedDataParallel(manager, nn.Linear(4, 4), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("manager", "options", "named"),
    [
        (Manager(is_asynchronous=True), {}, "use_async_quorum=False"),
        (Manager(mode="FIXED_WITH_SPARES"), {}, "FIXED_WITH_SPARES"),
        (Manager(), {"process_group": None}, "process_group"),
        (Manager(), {"hierarchy": "node"}, "hierarchy"),
    ],
)
def test_other_agreements_are_refused_by_name(manager: Any, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=rf"{named}.*FD054"):
        elastic.DistributedDataParallel(manager, nn.Linear(2, 2), **options)


def test_a_sharded_optimizer_is_refused_by_name() -> None:
    _, model = wrapped()
    with pytest.raises(ValueError, match=r"fastddp\.elastic: a lost replica takes its part along.*FD042"):
        fastddp.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)


def test_a_quorum_of_the_same_object_is_another_one() -> None:
    """As with torch's own ``reconfigure``."""
    manager, model = wrapped()
    manager._pg = group_of_one(CPU)
    for number in (1, 2):
        manager._reconfigure_pg(number, [])
        model(torch.ones(1, 4)).sum().backward()
        assert model.process_group is manager._pg
        assert model._number.generation == number
    assert manager.reconfigured == [1, 2]
    model.module.weight.grad = None
    model(torch.ones(1, 4)).sum().backward()
    assert model._number.generation == 2
    assert torch.equal(model.module.weight.grad, torch.ones(4, 4))


def test_a_model_that_comes_after_the_first_quorum_joins_it() -> None:
    manager = Manager()
    manager._pg, manager._quorum_id = group_of_one(CPU), 3  # type: ignore[attr-defined]
    model = elastic.DistributedDataParallel(manager, nn.Linear(4, 4))  # type: ignore[arg-type]
    model(torch.ones(1, 4)).sum().backward()
    assert model.process_group is manager._pg


def test_where_there_is_no_group_the_loop_goes_on_and_the_manager_hears() -> None:
    manager, model = wrapped()
    manager._reconfigure_pg(1, [])  # and it could not make one
    model(torch.ones(1, 4)).sum().backward()
    assert "no process group" in str(manager.reported[0])
    manager._pg = group_of_one(CPU)
    model(torch.ones(1, 4)).sum().backward()
    assert model._number.generation == 1


@on_ranks(2)
def test_a_replica_that_is_silent_while_the_others_meet_is_waited_for_no_longer(rank: int) -> None:
    group = dist.new_group([0, 1])
    if rank == 0:
        manager, model = wrapped(lighthouse="http://localhost:0")
        manager._pg = group
        manager._reconfigure_pg(1, [])
        with patch.object(Lighthouse, "silent", lambda *_: ["1:bb"]):
            model(torch.ones(1, 4)).sum().backward()
        assert "has not heard of replica 1" in str(manager.reported[0])
        manager._pg = group_of_one(CPU)
        manager._reconfigure_pg(2, [])
        model(torch.ones(1, 4)).sum().backward()
        assert len(manager.reported) == 1


GLOO = "[/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"


def done(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future


class Failing:
    """Hooks that fail by an error of this kind."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def at_once(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        raise self.error

    def later(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return done(bucket.buffer()).then(lambda of: self.at_once(state, bucket))  # type: ignore[return-value]

    def by_itself(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_exception(self.error)
        return future


OWN = [ValueError("too long"), torch.OutOfMemoryError("none left"), RuntimeError("CUDA error: device-side assert")]


@pytest.mark.parametrize("when", ["at_once", "later", "by_itself"])
@pytest.mark.parametrize("error", OWN, ids=repr)
def test_what_a_users_hook_raises_is_no_other_replicas_fault(error: BaseException, when: str) -> None:
    manager, model = wrapped()
    model.register_comm_hook(None, getattr(Failing(error), when))
    manager._pg = group_of_one(CPU)
    manager._reconfigure_pg(1, [])
    with pytest.raises((RuntimeError, TypeError, ValueError), match=str(error) if when != "by_itself" else "FD034"):
        model(torch.ones(1, 4)).sum().backward()
    assert manager.reported == []


@pytest.mark.parametrize("when", ["at_once", "later"])
def test_a_hook_that_passes_on_the_error_of_its_own_collective_has_lost_a_connection(when: str) -> None:
    manager, model = wrapped()
    model.register_comm_hook(None, getattr(Failing(RuntimeError(GLOO)), when))
    manager._pg = group_of_one(CPU)
    manager._reconfigure_pg(1, [])
    model(torch.ones(1, 4)).sum().backward()
    assert "Connection closed by peer" in str(manager.reported[0])


@pytest.mark.parametrize("where", ["rebuild_buckets", "begin_window"])
@pytest.mark.parametrize("error", [*OWN, MemoryError()], ids=repr)
def test_what_fails_here_before_a_forward_is_no_other_replicas_fault(error: BaseException, where: str) -> None:
    manager, model = wrapped()
    manager._pg = group_of_one(CPU)
    manager._reconfigure_pg(1, [])
    model(torch.ones(1, 4)).sum().backward()
    with patch.object(Engine, where, side_effect=error), pytest.raises(type(error)):
        model(torch.ones(1, 4))
    assert manager.reported == []


@pytest.mark.parametrize(
    "error", [dist.DistBackendError("reset"), RuntimeError("Gloo connectFullMesh failed")], ids=repr
)
def test_a_connection_that_is_lost_while_a_forward_begins_or_ends_ends_its_step(error: Exception) -> None:
    manager, model = wrapped()
    manager._pg = group_of_one(CPU)
    for number, where in enumerate(("rebuild_buckets", "arm")):
        manager._reconfigure_pg(number + 1, [])

        def lose(*_: object) -> None:
            together(fail, group=model.process_group)

        def fail(*_: object, **__: object) -> None:
            raise error

        with patch.object(Engine, where, lose):
            model(torch.ones(1, 4))
        assert str(error) in str(manager.reported[number])


@pytest.mark.parametrize("hook", ["none", "python"])
@on_ranks(2)
def test_a_replica_that_is_gone_is_told_of(hook: str, rank: int) -> None:
    """Its connections are closed, by the end of its process or by the end of its group."""
    group = dist.new_group([0, 1])
    model = fastddp.DistributedDataParallel(nn.Linear(64, 64, bias=False), process_group=group)
    if hook == "python":
        model.register_comm_hook(group, in_python)
    told: list[Any] = []
    model.on_lost(told.append)
    for _ in range(2):
        model(torch.ones(1, 64)).sum().backward()
    if rank == 1:
        dist.destroy_process_group(group)
        del model, group
        gc.collect()
    dist.barrier()
    if rank == 0:
        model(torch.ones(1, 64)).sum().backward()
        assert len(told) == 1
        with pytest.raises(dist.DistBackendError, match="FD052"):
            model(torch.ones(1, 64))


def in_python(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])  # type: ignore[no-any-return]


@pytest.mark.parametrize("differing", [0, 1])
def test_the_replica_that_differs_raises_and_the_others_go_on(differing: int) -> None:
    manager, model = wrapped()
    manager.participating_rank = lambda: 0  # type: ignore[attr-defined]
    manager._pg = group_of_one(CPU)
    manager._reconfigure_pg(1, [])
    raises = pytest.raises(RanksDiffer) if differing == 0 else nullcontext()
    with patch.object(model, "regroup", side_effect=RanksDiffer("not the same", [differing])), raises:
        model(torch.ones(1, 4))
    assert len(manager.reported) == differing


def test_errors_of_the_loop_stay_errors() -> None:
    manager, model = wrapped()
    manager._pg = group_of_one(CPU)
    manager._reconfigure_pg(1, [])
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 5))
    model.module.weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(RuntimeError, match="FD"):
        model(torch.ones(1, 4))
    assert manager.reported == []


def test_groups_are_forgotten_with_their_model() -> None:
    gc.collect()  # models of other tests
    known = len(dist.distributed_c10d._world.pg_map)
    manager, model = wrapped()
    manager._pg = group_of_one(CPU)
    manager._reconfigure_pg(1, [])
    model(torch.ones(1, 4)).sum().backward()
    assert len(dist.distributed_c10d._world.pg_map) == known + 1
    del model
    assert len(dist.distributed_c10d._world.pg_map) == known


PAGE = """HTTP/1.0 200 OK

<div class='member'><b>0:aa</b> <br/> Step: 3 <b>1:b&amp;b c</b></div><b>bold</b>
<li class="heartbeat"> 0:aa: seen 0.013242782s ago </li>
<li id=1
    class=old> 1:b&#38;b c: seen 7.2s ago </LI>
<li class="heartbeat old"> 1:older: seen 900.1s ago </li>
"""
ODD = {
    "nothing": b"",
    "no HTTP": b"hello\r\n",
    "a short page": b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n<b>0:aa</b>",
    "other letters": b"HTTP/1.0 200 OK\r\n\r\n\xff\xfe",
    "another page": b"HTTP/1.0 200 OK\r\n\r\n<b>it works</b>",
    "no number": b"HTTP/1.0 200 OK\r\n\r\n<b>0:aa</b><li>0:aa: seen longs ago</li>",
    "elsewhere": b"HTTP/1.0 301 Moved\r\nLocation: http://nowhere.invalid/\r\n\r\n",
}


@contextmanager
def answering(*answers: bytes) -> Iterator[str]:
    """The address of a server that gives these answers, one after the other, and then none."""
    with socket.create_server(("localhost", 0)) as server:

        def serve() -> None:
            for answer in answers:
                connection = server.accept()[0]
                with connection:
                    connection.recv(4096)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://localhost:{server.getsockname()[1]}/"
        thread.join()


def test_the_lighthouse_says_of_which_members_it_hears_nothing() -> None:
    with answering(PAGE.encode(), PAGE.encode()) as address:
        lighthouse = Lighthouse(address)
        assert lighthouse.silent(5.0) == ["1:b&b c"]
        assert lighthouse.silent(8.0) == []


@pytest.mark.parametrize("odd", ODD)
def test_after_an_odd_answer_the_lighthouse_is_asked_again_and_one_line_says_so(
    odd: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = PAGE.encode()
    with answering(*[ODD[odd]] * (_MANY - 1), good, *[ODD[odd]] * (_MANY + 1), good) as address:
        lighthouse = Lighthouse(address)
        assert [lighthouse.silent(5.0) for _ in range(_MANY)] == [[]] * (_MANY - 1) + [["1:b&b c"]]
        assert caplog.messages == []  # it has come to itself
        assert [lighthouse.silent(5.0) for _ in range(_MANY + 2)] == [[]] * (_MANY + 1) + [["1:b&b c"]]
        [said] = caplog.messages
        assert address in said


@pytest.mark.parametrize("address", ["host:29510", "localhost", "//host:29510", "http://", "http:host:1", "/status"])
@pytest.mark.parametrize("is_given", [True, False])
def test_what_torchft_takes_for_no_address_is_refused(
    address: str, is_given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://localhost:1" if is_given else address)
    with pytest.raises(ValueError, match=r"http://host:port.*FD054"):
        wrapped(lighthouse=address if is_given else None)


def test_replicas_are_named_by_their_numbers() -> None:
    quorum = Quorum(Manager(), CPU)  # type: ignore[arg-type]
    quorum._handles = [json.dumps({"store": "host:1", "global_rank": number}) for number in (0, 4, 7)]
    assert quorum.names()([1]) == "replica 4"
    quorum._handles = ["torch's own"]
    assert quorum.names()([0, 1]) == "replicas 0, 1"


def test_a_report_says_who_left_why_and_when(caplog: pytest.LogCaptureFixture) -> None:
    what = "[/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:80. This is typical."
    lost: Any = SimpleNamespace(window=39, bucket=3, what=what)
    before, now = (
        SimpleNamespace(members=(1, 2, 3), generation=6),
        SimpleNamespace(members=(1, 3), generation=7),
    )

    def name(ranks: list[int]) -> str:
        return f"replica {ranks[0]}"

    tell(before, now, lost, (name, name))  # type: ignore[arg-type]
    said = "replica 1 left (Connection closed by peer) in step 40, bucket 3; 3 → 2 ranks, generation 7."
    assert caplog.messages == [said]
