"""What fastddp finds out about a process group, whatever its name, and which groups it makes."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fake_cuda
import fastddp
from fastddp.ranks import groups, hierarchy, lanes, wire_memory
from fastddp.ranks.agreement import divides_first
from fastddp.ranks.living import Living
from fastddp.window.step_check import _ALL_STEPS
from on_ranks import on_ranks
from ranks import RankPool

DEVICE = fake_cuda.DEVICE
LAYERS = 4


class Held:
    """A model of a bucket for each parameter, whose gradients are held, so that each bucket is unpacked."""

    def __init__(self, **options: bool) -> None:
        module = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(LAYERS))).to(DEVICE)
        self.model = fastddp.DistributedDataParallel(module, bucket_cap_mb=0, **options)
        self.waits_of_the_host: list[int] = []  # up to each gradient of a step
        held: dict[nn.Parameter, Tensor] = {}
        waits = self.waits_of_the_host  # not self: a hook would keep the model alive for ever

        def hold(parameter: nn.Parameter) -> None:
            held[parameter] = parameter.grad
            waits.append(len(fake_cuda.host_waits()))

        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(hold)

    def step(self, rank: int, set_to_none: bool = True) -> None:
        self.model.zero_grad(set_to_none)
        loss = self.model(torch.full((2, 8), rank + 1.0, device=DEVICE)).sum()
        fake_cuda.synchronize()
        fake_cuda.reset_records()
        loss.backward()


@on_ranks(2, pool="simulated_ranks")
def test_where_a_stream_waits_unpack_follows_its_collective_at_once(rank: int) -> None:
    """The backend's name is not that of any that torch knows."""
    fake_cuda.schedule("lazy")
    held = Held()
    for _ in range(4):
        held.step(rank)
    assert [name.split("_")[1] for name in fake_cuda.launches()] == ["pack", "unpack"] * LAYERS


@on_ranks(2, pool="simulated_ranks", backend=fake_cuda.BLOCKING)
def test_where_the_host_waits_it_does_so_when_backward_has_ended(rank: int) -> None:
    """The backend has NCCL's name: which class has that differs between releases, and what it does between settings."""
    fake_cuda.schedule("lazy")
    held = Held()
    weights = [parameter.detach().cpu() for parameter in held.model.parameters()]
    for _ in range(5):
        held.step(rank)
    assert held.waits_of_the_host == [0] * 5 * LAYERS
    hidden = 3 * torch.ones(8)  # over both ranks' mean input, and two rows of it
    for weight in weights[:-1]:
        hidden = weight @ hidden
    torch.testing.assert_close(held.model.module[-1].weight.grad.cpu(), hidden.expand(8, 8))


def divides(rank: int, device: str) -> bool:
    return divides_first(dist.group.WORLD, torch.device(device))


def test_an_average_is_taken_that_divides_first(ranks: RankPool, simulated_ranks: RankPool) -> None:
    assert ranks.run(divides, 2, "cpu") == [False] * 2  # gloo's adds first
    assert simulated_ranks.run(divides, 2, DEVICE) == [True] * 2
    assert simulated_ranks.run(divides, 2, DEVICE, backend=fake_cuda.BLOCKING) == [True] * 2


@on_ranks(2)
def test_a_backend_may_have_none(rank: int) -> None:
    with mock.patch.object(dist, "all_reduce", side_effect=RuntimeError("no such operation")):
        assert not divides(rank, "cpu")


@pytest.mark.parametrize(("count", "name"), [(1, "ALLREDUCE"), (2, "AVERAGE")])
def test_one_rank_has_nothing_to_divide(simulated_ranks: RankPool, count: int, name: str) -> None:
    """NCCL launches a kernel for the average over one rank, and none for the sum."""
    for collectives in simulated_ranks.run(collectives_of_a_step, count):
        # Of more than one rank the last collective is the status of the window, the greatest of some bytes.
        assert set(collectives[: -1 if count > 1 else None]) == {name}


def collectives_of_a_step(rank: int) -> list[str]:
    fake_cuda.schedule("lazy")
    held = Held(gradient_as_bucket_view=True)
    for _ in range(4):
        held.step(rank, set_to_none=False)
    fake_cuda.synchronize()
    return [name for name in fake_cuda.history() if name in ("ALLREDUCE", "AVERAGE")]


@on_ranks(3)
def test_the_process_group_can_be_replaced(rank: int) -> None:
    """Optimizers' steps are checked once all the same."""
    model = fastddp.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    hooks = len(_ALL_STEPS)
    pair = dist.new_group([0, 2])
    for group in (dist.group.WORLD, pair):
        model._update_process_group(group)
        assert len(_ALL_STEPS) == hooks
        for _ in range(2 if group is not pair or rank != 1 else 0):
            model.zero_grad()
            model(torch.full((1, 1), rank + 1.0)).sum().backward()
            assert model.module.weight.grad.item() == 2.0


CUDA = torch.device("cuda", 0)
MODEL = [4, 5, 6, 7]
"""The ranks of the model's group, of a job of eight."""
Made = tuple[str, Any, Any, dict[str, Any]]


class Jobs:
    """A rank of a job over NCCL, as far as groups are made there: what is called, with what."""

    def __init__(self, rank: int, binds_a_device: bool, splits: bool = True, zero_cta: bool = True) -> None:
        config = SimpleNamespace(max_ctas=16, **({"cta_policy": 0} if zero_cta else {}))
        self.options = SimpleNamespace(_timeout=timedelta(seconds=7), is_high_priority_stream=False, config=config)
        backend = SimpleNamespace(options=self.options, supports_splitting=splits)
        self.group: Any = mock.Mock(spec=dist.ProcessGroup)
        self.group.configure_mock(
            **{"rank.return_value": rank, "size.return_value": 4, "_get_backend.return_value": backend}
        )
        self.world = SimpleNamespace(bound_device_id=CUDA if binds_a_device else None)
        self.nccl = SimpleNamespace(NCCL_CTA_POLICY_ZERO=2) if zero_cta else SimpleNamespace()
        self.made: list[Made] = []
        self.groups: list[object] = []
        self.sent_over: list[object] = []

    @contextlib.contextmanager
    def __call__(self, carrier: str = "nccl") -> Iterator[None]:
        def make(how: str, parent: object, ranks: object, options: dict[str, Any]) -> object:
            self.made.append((how, parent, ranks, options))
            self.groups.append(object())
            return self.groups[-1]

        with (
            mock.patch.object(dist, "split_group", lambda parent, parts, **given: make("split", parent, parts, given)),
            mock.patch.object(dist, "new_group", lambda ranks, **given: make("new", None, ranks, given)),
            mock.patch.object(groups, "_note"),
            mock.patch.object(groups, "greatest", lambda values, group, device: self.sent_over.append(group)),
            mock.patch.object(dist, "get_process_group_ranks", return_value=MODEL),
            mock.patch.object(dist, "ProcessGroupNCCL", self.nccl, create=True),
            mock.patch.object(dist.distributed_c10d, "_get_default_group", return_value=self.world),
            mock.patch.object(dist.distributed_c10d, "_world", SimpleNamespace(pg_map={self.group: None})),
            mock.patch.object(groups, "backend_of", return_value=carrier),
            mock.patch.object(lanes, "backend_of", return_value=carrier),
            mock.patch.object(groups, "ranks_name_groups_alike", return_value=True),
            mock.patch.object(lanes, "ranks_name_groups_alike", return_value=True),
            mock.patch.object(hierarchy, "ranks_name_groups_alike", return_value=True),
        ):
            yield


# By what makes them: how, and of which ranks.
PARTS: dict[str, tuple[Callable[[Any], object], list[Any]]] = {
    "lanes": (lambda group: lanes.lanes_for(group, CUDA, measured=True), [[[0, 1, 2, 3]]]),
    "hierarchy": (
        lambda group: hierarchy._of_nodes([[0, 3], [1, 2]], group, CUDA),
        [[[0, 3], [1, 2]], [[0, 1], [3, 2]]],
    ),
    "symmetric": (lambda group: [groups.symmetric_twin(group, CUDA) for _ in range(2)], [[[0, 1, 2, 3]]]),
}


@pytest.mark.parametrize(("binds_a_device", "splits"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("what", PARTS)
def test_where_a_device_is_bound_all_split_the_models_communicator_and_elsewhere_members_make_groups(
    what: str, binds_a_device: bool, splits: bool
) -> None:
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL backends do not split, whether a device is bound or not.

    In either case groups are set up as the model's, with streams of high priority.
    """
    make, of_parts = PARTS[what]
    for rank in range(4):
        job = Jobs(rank, binds_a_device, splits)
        with job():
            make(job.group)
        if binds_a_device and splits:
            expected: list[Any] = [("split", job.group, parts) for parts in of_parts]
        else:
            mine = [[MODEL[other] for other in part] for parts in of_parts for part in parts if rank in part]
            expected = [("new", None, members) for members in mine]
        assert [(how, parent, parts) for how, parent, parts, _ in job.made] == expected
        for how, *_, given in job.made:
            assert how == "split" or (given["use_local_synchronization"] and given["backend"] == "nccl")
            assert given["timeout"] == timedelta(seconds=7)
            assert given["group_desc"].startswith("fastddp ")
            options = given["pg_options"]
            assert options.is_high_priority_stream
            assert options.config.max_ctas == 16
            assert options.config.cta_policy == (2 if what == "symmetric" else 0)
        assert not job.options.is_high_priority_stream  # the model's own are as they were
        assert job.sent_over == job.groups  # so that NCCL connects ranks here, and not in a backward


def test_what_lacks_for_the_zero_cta_policy_is_said() -> None:
    job = Jobs(0, binds_a_device=True, zero_cta=False)
    with job(), pytest.raises(RuntimeError, match=r"zero-CTA policy, which torch .* does not know here"):
        groups.symmetric_twin(job.group, CUDA)
    with job("ucc"), pytest.raises(ValueError, match="takes a process group over NCCL, and ucc carries tensors"):
        groups.symmetric_twin(job.group, CUDA)
    assert not job.made


class Pool:
    """As torch.cuda.MemPool, of which a test says whether its memory is held."""

    def __init__(self, allocator: object) -> None:
        self.allocator, self.state = allocator, "active_allocated"

    def snapshot(self) -> list[dict[str, Any]]:
        return [{"blocks": [{"state": self.state}]}]


def test_each_window_is_a_pool_of_its_own_and_pools_that_nobody_holds_go() -> None:
    """As torch has it from 2.11 on: what the backend's allocator gave is registered afterwards, by all ranks."""
    done = mock.MagicMock()
    group: Any = mock.Mock(spec=dist.ProcessGroup)
    device = torch.device("cpu")
    with (
        mock.patch.object(torch.cuda, "MemPool", Pool),
        mock.patch.object(torch.cuda, "use_mem_pool", done.use),
        mock.patch.object(torch.cuda, "device", contextlib.nullcontext),
        mock.patch.object(dist.distributed_c10d, "_world", SimpleNamespace(pg_map={group: None})),
    ):
        pools: list[Any] = []
        for state in ("active_allocated", "inactive", "active_pending_free"):
            done.reset_mock()
            assert wire_memory._in_a_window(group, done.backend, 512, device).nbytes == 512
            pools.append(wire_memory._pools_of(group)[-1])
            used, registered = mock.call.use(pools[-1], device), mock.call.backend.register_mem_pool(pools[-1], True)
            assert done.mock_calls == [used, used.__enter__(), used.__exit__(None, None, None), registered]
            assert pools[-1].allocator is done.backend.mem_allocator
            pools[-1].state = state
        assert len(set(pools)) == 3  # a window a call, whatever is held on this rank
        assert wire_memory._pools_of(group) == [pools[0], pools[2]]
        done.backend.register_mem_pool.side_effect = RuntimeError("NCCL 2.26 has no windows")
        with pytest.raises(RuntimeError, match=r"512 bytes on cpu: NCCL 2.26 has no windows.*Leave wire_memory"):
            wire_memory._in_a_window(group, done.backend, 512, device)


WITHOUT_A_DEFAULT = """
from datetime import timedelta
import torch
import torch.distributed as dist
import fastddp

make = dist.distributed_c10d._new_process_group_helper
group, _ = make(1, 0, [], "gloo", dist.HashStore(), group_name="mine", timeout=timedelta(seconds=60))
dist.distributed_c10d._world.pg_group_ranks[group] = {0: 0}
model = fastddp.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
for _ in range(2):
    model(torch.ones(1, 2)).sum().backward()
print(model.module.bias.grad.tolist())
"""


@pytest.mark.tier("slow")
def test_a_group_in_a_process_without_a_default_one_is_enough() -> None:
    ended = subprocess.run([sys.executable, "-c", WITHOUT_A_DEFAULT], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "[2.0, 2.0]\n"), ended.stderr


@on_ranks(1)
def test_groups_that_were_made_of_one_that_is_gone_are_destroyed_in_another_thread(rank: int) -> None:
    """Gloo's destructor waits for collectives, and one may be on its way that another rank never joins."""
    parent = dist.new_group([0])
    part = groups.make_group(parent, torch.device("cpu"), [[0]], "part")
    with mock.patch.object(groups, "bury") as bury:
        dist.destroy_process_group(parent)
        del parent
        gc.collect()
    bury.assert_called_once_with([part])


def test_what_lives_can_be_walked_while_others_are_added() -> None:
    """As one thread does while another makes a model."""
    living: Living[nn.Module, int] = Living()
    kept = [nn.Identity() for _ in range(3)]
    for number, one in enumerate(kept):
        living[one] = number
    for number, _one in enumerate(living):
        assert number < 3
        kept.append(nn.Identity())
        living[kept[-1]] = 0
    assert len(living) == 6
    del kept[:3], one, _one
    assert len(list(living)) == 3
