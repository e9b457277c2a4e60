"""What fastddp finds out about a process group, whatever its name, and which groups it makes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
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
from fastddp import comm_hooks
from fastddp.exchange import groups, hierarchy, lanes, wire_memory
from fastddp.exchange.averages import divides_first
from ranks import RankPool

DEVICE = fake_cuda.DEVICE
LAYERS = 4
HOOKS = ["", "wide sum", "PowerSGD"]


def register(model: fastddp.DistributedDataParallel, hook: str) -> None:
    if hook == "wide sum":
        model.register_comm_hook(comm_hooks.CompressState(accumulate="fp32"), comm_hooks.bf16_compress_hook)
    if hook == "PowerSGD":
        state = comm_hooks.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=1)
        model.register_comm_hook(state, comm_hooks.powerSGD_hook)


class Held:
    """A model of a bucket for each parameter, whose gradients are held, so that each bucket is unpacked."""

    def __init__(self, hook: str = "", **options: bool) -> None:
        module = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(LAYERS))).to(DEVICE)
        self.model = fastddp.DistributedDataParallel(module, bucket_cap_mb=0, **options)
        register(self.model, hook)
        self.held: dict[nn.Parameter, Tensor] = {}
        self.waits_of_the_host: list[int] = []
        held, waits = self.held, self.waits_of_the_host  # not self: a hook would keep the model alive for ever

        def hold(parameter: nn.Parameter) -> None:
            held[parameter] = parameter.grad
            waits.append(len(fake_cuda.host_waits()))

        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(hold)

    def step(self, set_to_none: bool = True) -> None:
        self.model.zero_grad(set_to_none)
        loss = self.model(torch.ones(2, 8, device=DEVICE)).sum()
        fake_cuda.synchronize()
        fake_cuda.reset_records()
        self.waits_of_the_host.clear()
        loss.backward()


def order_of_launches(rank: int) -> list[str]:
    fake_cuda.schedule("lazy")
    held = Held()
    for _ in range(4):
        held.step()
    return [name.split("_")[1] for name in fake_cuda.launches()]


def test_where_a_stream_waits_unpack_follows_its_collective_at_once(simulated_ranks: RankPool) -> None:
    # The backend's name is not that of any that torch knows.
    assert simulated_ranks.run(order_of_launches, 2) == [["pack", "unpack"] * LAYERS] * 2


def waits_during_backward(rank: int, hook: str) -> list[int]:
    """How often the host has waited when the last gradient comes, in each of some steps."""
    fake_cuda.schedule("lazy")
    assert dist.get_backend() == fake_cuda.BLOCKING
    held = Held(hook)
    waits = []
    for _ in range(5):
        held.step()
        waits.append(held.waits_of_the_host[-1])
    return waits


def test_where_the_host_waits_it_does_so_when_backward_has_ended(simulated_ranks: RankPool) -> None:
    # The backend has NCCL's name: the class that has it differs between releases, and what it does between settings.
    assert simulated_ranks.run(waits_during_backward, 2, "", backend=fake_cuda.BLOCKING) == [[0] * 5] * 2


def gradients(rank: int, hook: str, view: bool) -> list[Tensor]:
    fake_cuda.schedule("random", 3)
    torch.manual_seed(0)
    held = Held(hook, gradient_as_bucket_view=view)
    for step in range(4):
        held.model.zero_grad(set_to_none=step % 2 == 0)
        held.model(torch.full((2, 8), rank + step + 1.0, device=DEVICE)).square().sum().backward()
    return [parameter.grad.cpu() for parameter in held.model.parameters()]


@pytest.mark.parametrize("view", [False, True], ids=["default", "view"])
@pytest.mark.parametrize("hook", HOOKS)
def test_gradients_are_the_same_whoever_waits(simulated_ranks: RankPool, hook: str, view: bool) -> None:
    stream = simulated_ranks.run(gradients, 2, hook, view)
    host = simulated_ranks.run(gradients, 2, hook, view, backend=fake_cuda.BLOCKING)
    for ours, theirs in zip(stream[0] + stream[1], host[0] + host[1], strict=True):
        assert torch.equal(ours, theirs)


# ------------------------------------------------------------------------------------------------------- the average


def asked(rank: int, device: str) -> bool:
    return divides_first(dist.group.WORLD, torch.device(device))


def test_an_average_that_adds_first_is_not_taken(ranks: RankPool, simulated_ranks: RankPool) -> None:
    assert ranks.run(asked, 2, "cpu") == [False, False]  # gloo's
    assert simulated_ranks.run(asked, 2, DEVICE) == [True, True]
    assert simulated_ranks.run(asked, 2, DEVICE, backend=fake_cuda.BLOCKING) == [True, True]


def without_an_average(rank: int) -> bool:
    def refuse(*arguments: object, **options: object) -> None:
        raise RuntimeError("no such operation")

    original, dist.all_reduce = dist.all_reduce, refuse
    try:
        return asked(rank, "cpu")
    finally:
        dist.all_reduce = original


def test_a_backend_may_have_none(ranks: RankPool) -> None:
    assert ranks.run(without_an_average, 2) == [False, False]


def collectives_of_a_step(rank: int, view: bool) -> set[str]:
    fake_cuda.schedule("lazy")
    held = Held(gradient_as_bucket_view=view)
    for _ in range(4):
        held.step(set_to_none=False)
    fake_cuda.synchronize()
    # Of more than one rank the last collective is the status of the window, the greatest of some bytes.
    named = [name for name in fake_cuda.history() if name in ("ALLREDUCE", "AVERAGE")]
    return set(named[: -1 if dist.get_world_size() > 1 else None])


@pytest.mark.parametrize(("ranks_in_all", "collective"), [(1, "ALLREDUCE"), (2, "AVERAGE")])
def test_one_rank_has_nothing_to_divide(simulated_ranks: RankPool, ranks_in_all: int, collective: str) -> None:
    # NCCL launches a kernel for the average over one rank, and none for the sum.
    assert simulated_ranks.run(collectives_of_a_step, ranks_in_all, True) == [{collective}] * ranks_in_all


# ------------------------------------------------------------------------------------------- groups that fastddp makes

CUDA = torch.device("cuda", 0)
MODEL = [4, 5, 6, 7]
"""The ranks of the model's group, of a job of eight."""
Made = tuple[str, Any, Any, dict[str, Any]]


class Jobs:
    """A rank of a job over NCCL, as far as groups are made there: what is called, with what."""

    def __init__(self, rank: int, binds_a_device: bool, zero_cta: bool = True, splits: bool = True) -> None:
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

    @contextlib.contextmanager
    def __call__(self, carrier: str = "nccl") -> Iterator[None]:
        def split_group(parent: object, parts: Sequence[Sequence[int]], **options: Any) -> object:
            self.made.append(("split", parent, parts, options))
            return object()

        def new_group(ranks: Sequence[int], **options: Any) -> object:
            self.made.append(("new", None, ranks, options))
            return object()

        with (
            mock.patch.object(dist, "split_group", split_group),
            mock.patch.object(dist, "new_group", new_group),
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


def groups_made(job: Jobs, what: str) -> list[Made]:
    with job():
        if what == "lanes":
            assert len(lanes.lanes_for(job.group, CUDA, measured=True)) == 2
        elif what == "hierarchy":
            hierarchy._of_nodes([[0, 3], [1, 2]], job.group, CUDA)
        else:
            groups.zero_cta_twin(job.group, CUDA)
            groups.zero_cta_twin(job.group, CUDA)
    return job.made


PARTS = {"lanes": [[[0, 1, 2, 3]]], "hierarchy": [[[0, 3], [1, 2]], [[0, 1], [3, 2]]], "zero CTA": [[[0, 1, 2, 3]]]}


@pytest.mark.parametrize("what", PARTS)
def test_where_a_device_is_bound_the_models_communicator_is_split_by_all_of_its_ranks(what: str) -> None:
    for rank in range(4):
        job = Jobs(rank, binds_a_device=True)
        made = groups_made(job, what)
        assert [(how, parent, parts) for how, parent, parts, _ in made] == [
            ("split", job.group, parts) for parts in PARTS[what]
        ]


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("what", PARTS)
def test_elsewhere_a_rank_makes_groups_with_those_that_are_in_them(what: str, splits: bool) -> None:
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL backends do not split, whether a device is bound or not."""
    for rank in range(4):
        made = groups_made(Jobs(rank, binds_a_device=not splits, splits=splits), what)
        mine = [[MODEL[other] for other in part] for parts in PARTS[what] for part in parts if rank in part]
        assert [(how, ranks) for how, _, ranks, _ in made] == [("new", ranks) for ranks in mine]
        for *_, options in made:
            assert options["use_local_synchronization"]
            assert options["backend"] == "nccl"


@pytest.mark.parametrize("binds_a_device", [False, True])
@pytest.mark.parametrize("what", PARTS)
def test_they_are_set_up_as_the_models_with_streams_of_high_priority(what: str, binds_a_device: bool) -> None:
    job = Jobs(0, binds_a_device)
    for *_, given in groups_made(job, what):
        assert given["timeout"] == timedelta(seconds=7)
        assert given["group_desc"].startswith("fastddp ")
        options = given["pg_options"]
        assert options.is_high_priority_stream
        assert options.config.max_ctas == 16
        assert options.config.cta_policy == (2 if what == "zero CTA" else 0)
    assert not job.options.is_high_priority_stream  # the model's own are as they were


def test_what_lacks_for_the_zero_cta_policy_is_said() -> None:
    job = Jobs(0, binds_a_device=True, zero_cta=False)
    with job(), pytest.raises(RuntimeError, match=r"zero-CTA policy, which torch .* does not know here"):
        groups.zero_cta_twin(job.group, CUDA)
    with job("ucc"), pytest.raises(ValueError, match="takes a process group over NCCL, and ucc carries tensors"):
        groups.zero_cta_twin(job.group, CUDA)
    assert not job.made


def test_a_window_is_made_of_what_is_in_the_pool_and_a_later_one_in_the_same_pool() -> None:
    """As torch has it from 2.11 on: what the backend's allocator gave is registered afterwards, by all ranks."""
    done: list[Any] = []

    def pool(allocator: object) -> object:
        done.append(("pool", allocator))
        return "the pool"

    @contextlib.contextmanager
    def use(pool: object, device: torch.device) -> Iterator[None]:
        done.append(("use", pool, device))
        yield
        done.append("used")

    backend = SimpleNamespace(
        mem_allocator="NCCL's", register_mem_pool=lambda *arguments: done.append(("register", *arguments))
    )
    group: Any = object()
    device = torch.device("cpu")
    with (
        mock.patch.object(torch.cuda, "MemPool", pool),
        mock.patch.object(torch.cuda, "use_mem_pool", use),
        mock.patch.object(torch.cuda, "device", contextlib.nullcontext),
        mock.patch.object(dist.distributed_c10d, "_world", SimpleNamespace(pg_map={group: None})),
        mock.patch.dict(wire_memory._pools),
    ):
        slabs = [wire_memory._in_a_window(group, backend, 512, device) for _ in range(2)]
        assert [slab.nbytes for slab in slabs] == [512, 512]
        window = [("use", "the pool", device), "used", ("register", "the pool", True)]
        assert done == [("pool", "NCCL's"), *window, *window]
        backend.register_mem_pool = mock.Mock(side_effect=RuntimeError("NCCL 2.26 has no windows"))
        with pytest.raises(RuntimeError, match=r"512 bytes on cpu: NCCL 2.26 has no windows.*Leave wire_memory"):
            wire_memory._in_a_window(group, backend, 512, device)
