"""What ``fastddp.elastic`` refuses by name, and what it reads of torchft."""

from __future__ import annotations

import gc
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fastddp
from fastddp import elastic
from fastddp.elastic.quorum import Lighthouse, Quorum, group_of_one
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


PAGE = """
<b>0:aa</b> <br/> Step: 3 <b>1:bb</b>
<li class="heartbeat"> 0:aa: seen 0.013242782s ago </li>
<li class="heartbeat old"> 1:bb: seen 7.2s ago </li>
<li class="heartbeat old"> 1:older: seen 900.1s ago </li>
"""


def test_the_lighthouse_says_of_which_members_it_hears_nothing() -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(PAGE.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("localhost", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    lighthouse = Lighthouse(f"http://localhost:{server.server_port}/")
    assert lighthouse.silent(5.0) == ["1:bb"]
    assert lighthouse.silent(8.0) == []
    server.shutdown()
    server.server_close()


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
