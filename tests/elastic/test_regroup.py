"""A model that goes on with other ranks, in the same processes."""

from __future__ import annotations

import copy
import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastddp
from fastddp import comm_hooks
from fastddp.module.replicas import RanksDiffer
from fastddp.ranks.groups import once_a_group
from on_ranks import on_ranks

SIDE = 32

HOOKS: dict[str, Callable[[], tuple[object, Any] | None]] = {
    "plain": lambda: None,
    "fp16": lambda: (None, comm_hooks.fp16_compress_hook),
    "int8": lambda: (None, comm_hooks.int8_compress_hook),
    "drawn int8": lambda: (comm_hooks.BlockState(stochastic_rounding=True), comm_hooks.int8_compress_hook),
    "powersgd": lambda: (
        comm_hooks.PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=1),
        comm_hooks.powerSGD_hook,
    ),
}
SUMS_OF_16_BITS = comm_hooks.CompressState(accumulate="wire"), comm_hooks.fp16_compress_hook
SLOW = pytest.mark.tier("slow")
OF_HOOKS = pytest.mark.parametrize(
    "hook", [hook if hook in ("int8", "powersgd") else pytest.param(hook, marks=SLOW) for hook in HOOKS]
)


class Trained:
    """A model of three layers, an optimizer, and inputs that differ by rank and step."""

    def __init__(self, hook: Any = "plain", group: dist.ProcessGroup | None = None, **options: Any) -> None:
        torch.manual_seed(3)
        self.module = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(3)))
        self.model = fastddp.DistributedDataParallel(
            self.module, process_group=group, **{"bucket_cap_mb": 0.005, **options}
        )
        self.hook = HOOKS[hook]() if isinstance(hook, str) else hook
        if self.hook is not None:
            self.model.register_comm_hook(*self.hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.steps = 0

    @property
    def state(self) -> Any:
        return self.model.engine.remembers

    def backward(self) -> None:
        self.model.zero_grad()
        self.steps += 1
        generator = torch.Generator().manual_seed(100 * self.steps + dist.get_rank())
        self.model(torch.randn(4, SIDE, generator=generator)).square().mean().backward()

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.backward()
            self.optimizer.step()

    def fail(self) -> None:
        """This rank raises in the middle of its backward, which is void on the others too."""
        handle = self.module[1].weight.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            self.backward()
        handle.remove()
        self.model.reducer.repair_if_failed()  # its part in what the others wait for

    def load(self, other: Trained) -> None:
        self.module.load_state_dict(other.module.state_dict())

    def remembered(self) -> dict[str, Tensor]:
        errors = {} if self.state is None else self.state.errors
        qs = getattr(self.state, "qs", {})
        return {
            f"{name} {kind}": tensor.clone()
            for kind, known in (("error", errors), ("Q", qs))
            for name, tensor in known.items()
        }


def assert_alike(group: dist.ProcessGroup, tensors: dict[str, Tensor]) -> None:
    """All ranks of the group have the same bits."""
    for name, tensor in tensors.items():
        others = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(others, tensor.detach().contiguous(), group=group)
        for other in others:
            assert torch.equal(other, tensor), name


def alone() -> dist.ProcessGroup:
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


@OF_HOOKS
@on_ranks(3)
def test_two_of_three_ranks_go_on_and_the_third_comes_back(hook: str, rank: int) -> None:
    trained = Trained(hook)
    trained.train(4)
    pair = dist.new_group([0, 2])
    if rank != 1:
        trained.model.regroup(pair)
        trained.train(3)
        assert_alike(pair, dict(trained.module.named_parameters()))
        assert trained.model.reducer.windows() == 7
    for parameter in trained.module.parameters():
        dist.broadcast(parameter.detach(), 0)
    trained.model.regroup(dist.group.WORLD)
    trained.steps = 7
    trained.train(3)
    assert_alike(dist.group.WORLD, dict(trained.module.named_parameters()))
    assert trained.model.reducer.windows() == 10
    if hook == "powersgd":
        assert trained.state.iter == 10
        assert_alike(dist.group.WORLD, trained.state.qs)
    trained.model.zero_grad()
    if hook == "plain":
        trained.model(torch.full((1, SIDE), rank + 1.0)).sum().backward()
        found = trained.module[0].weight.grad
        whole = trained.module[2].weight.T @ torch.ones(SIDE)
        torch.testing.assert_close(found, (trained.module[1].weight.T @ whole)[:, None].expand(SIDE, SIDE) * 2.0)


@OF_HOOKS
@on_ranks(3)
def test_a_void_window_leaves_nothing_behind(hook: str, rank: int) -> None:
    """What compression remembers is as before the step, and so all that follows is as if it had never been."""
    trained, twin = Trained(hook), Trained(hook)
    pair = dist.new_group([0, 2])
    for each in (trained, twin):
        each.train(4)
    before = trained.remembered()
    if rank == 1:
        return trained.fail()
    with pytest.raises(RuntimeError, match="FD010"):
        trained.backward()
    trained.model.regroup(pair)
    assert all(parameter.grad is None for parameter in trained.module.parameters())
    if trained.hook is not None and hook != "fp16":
        assert before.keys() == trained.remembered().keys()
        for name, tensor in trained.remembered().items():
            assert torch.equal(tensor, before[name]), name
    twin.model.regroup(pair)
    for each in (trained, twin):
        each.steps = 5
    if "drawn" in hook:  # the draws of a step depend on its number
        return None
    trained.train(2)
    twin.train(2)
    for mine, other in zip(trained.module.parameters(), twin.module.parameters(), strict=True):
        assert torch.equal(mine, other)
    return None


@pytest.mark.parametrize("hook", ["int8", "powersgd"])
@on_ranks(2)
def test_a_step_that_was_skipped_is_forgotten(hook: str, rank: int) -> None:
    trained = Trained(hook)
    trained.train(4)
    before = trained.remembered()
    trained.backward()
    trained.model.zero_grad()
    trained.model.regroup(dist.new_group([0, 1]))
    for name, tensor in trained.remembered().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("steps", [3, pytest.param(0, marks=SLOW)])  # that it has trained alone
@OF_HOOKS
@on_ranks(3)
def test_a_rank_that_joins_gets_what_all_have_alike(hook: str, steps: int, rank: int) -> None:
    trio = dist.new_group([0, 1, 2])
    pair = dist.new_group([0, 1])
    trained = Trained(hook, pair if rank < 2 else alone())
    trained.train(5 if rank < 2 else steps)  # then it has errors of its own, which have to go
    if trained.state is not None and (steps or rank < 2):
        assert any(error.any() for error in trained.state.errors.values())
    for parameter in trained.module.parameters():
        dist.broadcast(parameter.detach(), 0)
    trained.model.regroup(trio)
    model = trained.model
    assert model.reducer.windows() == 5
    assert model._number.generation == 1
    plans: list[Any] = [None] * 3
    dist.all_gather_object(plans, model.bucket_plan())
    assert plans[0] == plans[1] == plans[2]
    if rank == 2 and trained.state is not None:
        assert not any(error.any() for error in trained.state.errors.values())
    assert_alike(trio, getattr(trained.state, "qs", {}))
    trained.steps = 5
    trained.train(3)
    assert_alike(trio, dict(trained.module.named_parameters()))


DIFFERENT: dict[str, Callable[[int, dist.ProcessGroup], Trained]] = {
    "model": lambda rank, group: Trained(group=group),
    "bucket_cap_mb": lambda rank, group: Trained(group=group, bucket_cap_mb=0.005 if rank < 2 else 1),
    "find_unused_parameters": lambda rank, group: Trained(group=group, find_unused_parameters=rank == 2),
    "gradient_average": lambda rank, group: Trained(group=group, gradient_average="mean" if rank < 2 else "sum"),
    "audit_every": lambda rank, group: Trained(group=group, watch=fastddp.Watch(audit_every=5 + rank // 2)),
    "accumulate": lambda rank, group: Trained("fp16" if rank < 2 else SUMS_OF_16_BITS, group),
    "int8_compress_hook": lambda rank, group: Trained("plain" if rank < 2 else "int8", group),
    "start_powerSGD_iter": lambda rank, group: Trained("powersgd", group),
}


QUICK = ("model", "bucket_cap_mb", "int8_compress_hook")


@pytest.mark.parametrize("what", [what if what in QUICK else pytest.param(what, marks=SLOW) for what in DIFFERENT])
@on_ranks(3)
def test_a_rank_that_differs_is_named_on_all_and_the_others_go_on(what: str, rank: int) -> None:
    trio, pair = dist.new_group([0, 1, 2]), dist.new_group([0, 1])
    trained = DIFFERENT[what](rank, pair if rank < 2 else alone())
    if rank < 2:
        trained.train(3)
    elif what == "model":
        trained.module[2].weight.requires_grad_(False)
    elif what == "start_powerSGD_iter":
        trained.state.start_powerSGD_iter = 7
    with pytest.raises(RanksDiffer, match=r"[Rr]ank.* 2") as raised:
        trained.model.regroup(trio)
    assert raised.value.ranks == [2]
    with pytest.raises(RuntimeError, match="FD052"):
        trained.model(torch.ones(1, SIDE))
    trained.module.requires_grad_(True)
    trained.model.regroup(pair if rank < 2 else alone())
    trained.train(2)
    if rank < 2:
        assert trained.model.reducer.windows() == 5
        assert_alike(pair, dict(trained.module.named_parameters()))


@on_ranks(2)
def test_a_pinned_plan_on_one_rank_is_named(rank: int) -> None:
    plan = Trained(group=alone(), bucket_cap_mb=0).model.bucket_plan()
    options: dict[str, Any] = {"bucket_cap_mb": None}
    trained = Trained(group=alone(), **options, buckets=plan if rank == 0 else None)
    with pytest.raises(RanksDiffer, match="not given the same bucket plan"):
        trained.model.regroup(dist.group.WORLD)


OF_A_MODEL_WITHOUT_RANKS = {
    "abort", "bucket_plan", "finalize_backward", "forward_sync_buffers", "join", "no_sync", "on_lost",
    "parameters_ready", "regroup", "step_report", "to_kwargs", "will_sync_module_buffers", "zero_grad",
    # They end in forward or in a name above, or tell of what has been.
    "main", "scatter", "gather", "train", "register_fused_optim",
}  # fmt: skip
CALLS: dict[str, Callable[[Any], Any]] = {
    "audit": lambda model: model.audit(),
    "blame_non_finite": lambda model: model.blame_non_finite(),
    "discard_step": lambda model: model.discard_step(),
    "find_non_finite_module": lambda model: model.find_non_finite_module(),
    "forward": lambda model: model(torch.ones(1, SIDE)),
    "found_inf": lambda model: model.found_inf(),
    "join_hook": lambda model: model.join_hook(),
    "last_grad_norm": lambda model: model.last_grad_norm(),
    "register_comm_hook": lambda model: model.register_comm_hook(None, comm_hooks.int8_compress_hook),
    "sample_steps": lambda model: model.sample_steps(1, compare_ranks=True),
}


@on_ranks(2)
def test_each_method_says_that_a_model_has_left_its_ranks(rank: int) -> None:
    watch = fastddp.Watch(audit_every=10, corruption="report")
    trained = Trained(group=alone(), watch=watch)
    trained.module[2].weight.requires_grad_(rank == 0)
    with pytest.raises(RanksDiffer):
        trained.model.regroup(dist.group.WORLD)
    methods = {name for name in dir(type(trained.model)) if callable(getattr(type(trained.model), name))}
    of_ours = {name for name in methods - {*dir(nn.Module)} if not name.startswith("_")} | {"forward"}
    assert CALLS.keys() <= of_ours
    assert of_ours - CALLS.keys() <= OF_A_MODEL_WITHOUT_RANKS
    for call in CALLS.values():
        with pytest.raises(dist.DistBackendError, match="FD052"):
            call(trained.model)


@pytest.mark.parametrize("arms", [False, True])
@on_ranks(2)
def test_gradients_of_an_open_step_are_removed_those_of_microbatches_too(arms: bool, rank: int) -> None:
    trained = Trained()
    trained.train()
    trained.backward()
    trained.model.regroup(dist.new_group([0, 1]))
    assert all(parameter.grad is not None for parameter in trained.module.parameters())  # of a step that was whole
    trained.optimizer.step()
    trained.model.zero_grad()
    with trained.model.no_sync():
        for _ in range(1 + rank):
            trained.model(torch.ones(1, SIDE)).sum().backward()
    if arms:
        trained.model(torch.ones(1, SIDE))
    group = dist.new_group([0, 1])
    trained.model.regroup(group)
    assert all(parameter.grad is None for parameter in trained.module.parameters())
    trained.train()
    assert_alike(group, dict(trained.module.named_parameters()))


@on_ranks(2)
def test_models_and_regroups_leave_no_keys_in_the_store(rank: int) -> None:
    store: Any = dist.distributed_c10d._get_process_group_store(dist.group.WORLD)
    counts: list[int] = []
    while isinstance(store.underlying_store, dist.PrefixStore):
        store = store.underlying_store  # at last this call's: models of earlier ones may write where theirs is
    trained = Trained("int8")
    for _ in range(3):
        Trained().train()
        copy.deepcopy(trained.model)
        trained.model.regroup(dist.group.WORLD)
        trained.train()
        dist.barrier()
        counts.append(len(store.list_keys()))
        dist.barrier()
    assert 0 < counts[0] == counts[1] == counts[2]


@on_ranks(2)
def test_sampling_goes_on(rank: int) -> None:
    trained = Trained(group=alone())
    if rank == 0:
        trained.train(2)
        trained.model.sample_steps(2, compare_ranks=True)
    trained.model.regroup(dist.group.WORLD)
    assert trained.model.engine.slow_ranks is not None
    trained.train(4)
    report = trained.model.step_report()
    assert report is not None


@on_ranks(2)
def test_the_same_object_with_other_ranks_is_another_group(rank: int) -> None:
    """As after torch's own ``reconfigure``: what was remembered of the group is asked anew."""
    trained, other = Trained(), Trained()
    trained.train(2)
    asked = once_a_group(lambda group: [rank])
    before = asked(dist.group.WORLD)
    trained.model.regroup(dist.group.WORLD)
    assert asked(dist.group.WORLD) is not before
    other.model.regroup(dist.group.WORLD)
    assert [each.model._number.agreed for each in (trained, other)] == [3, 4]
    trained.train(2)
    other.train(2)
    assert_alike(dist.group.WORLD, dict(trained.module.named_parameters()))


@on_ranks(3)
def test_the_first_rank_says_who_has_left_and_joined(rank: int) -> None:
    trained = Trained()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fastddp").addHandler(handler)
    pair = dist.new_group([0, 2])
    if rank != 1:
        trained.model.regroup(pair)
    trained.model.regroup(dist.group.WORLD)
    logging.getLogger("fastddp").removeHandler(handler)
    said = ["rank 1 left; 3 → 2 ranks, generation 1.", "rank 1 joined; 2 → 3 ranks, generation 2."]
    assert lines == (said if rank == 0 else [])


@on_ranks(2)
def test_what_cannot_be_meant_is_refused_before_anything_is_left(rank: int) -> None:
    trained = Trained()
    trained.model.register_comm_hook(dist.group.WORLD, comm_hooks.bf16_compress_hook)
    pair = dist.new_group([0, 1])
    with pytest.raises(ValueError, match="FD034"):
        trained.model.regroup(pair)
    with pytest.raises(TypeError):
        trained.model.regroup([0, 1])
    trained.module[0].weight.register_post_accumulate_grad_hook(lambda _: trained.model.regroup(pair))
    with pytest.raises(RuntimeError, match="FD014"):
        trained.backward()


@pytest.mark.parametrize("options", [{"static_graph": True}, {"find_unused_parameters": True}], ids=str)
@on_ranks(2)
def test_a_static_graph_is_not_learned_again(options: dict[str, bool], rank: int) -> None:
    trained = Trained(group=dist.group.WORLD if rank < 2 else None, **options)
    trained.train(3)
    trained.model.regroup(dist.new_group([0, 1]))
    assert trained.model.reducer.knows_usage() == ("static_graph" in options)
    before = copy.deepcopy(trained.model.bucket_plan())
    trained.train(3)
    assert trained.model.bucket_plan() == before
    assert trained.model.reducer.windows() == 6
    assert_alike(dist.group.WORLD, dict(trained.module.named_parameters()))


@on_ranks(2)
def test_each_rank_still_knows_how_many_gradients_its_own_parameters_get(rank: int) -> None:
    trained = Trained(find_unused_parameters=True)
    layer = trained.module[1]
    if rank == 1:
        once = functools.partial(checkpoint, layer.forward, use_reentrant=True)
        layer.forward = lambda x: once(once(x))
    trained.train(3)
    trained.model.regroup(dist.new_group([0, 1]))
    trained.train(2)
    assert_alike(dist.group.WORLD, dict(trained.module.named_parameters()))


@pytest.mark.parametrize("is_told", [True, False])
@on_ranks(2)
def test_a_manager_is_told_of_a_lost_connection_in_place_of_an_error(is_told: bool, rank: int) -> None:
    """The other rank does not come, and something else than the connection ends the wait."""
    trained = Trained("int8")
    trained.train(3)
    before = trained.remembered()
    told: list[Any] = []
    if is_told:
        trained.model.on_lost(told.append)
    group = dist.new_group([0, 1])
    if rank == 0:
        interruption = trained.model.reducer.interruption
        threading.Timer(0.3, interruption.interrupt, ["nobody comes"]).start()
        if is_told:
            trained.backward()
            assert [(lost.window, lost.what) for lost in told] == [(3, "nobody comes")]
            with pytest.raises(RuntimeError, match="FD052"):
                trained.optimizer.step()
            with pytest.raises(RuntimeError, match="FD052"):
                trained.model(torch.ones(1, SIDE))
        else:
            with pytest.raises(RuntimeError, match="nobody comes"):
                trained.backward()
    trained.model.regroup(group)
    for name, tensor in trained.remembered().items():
        assert torch.equal(tensor, before[name]), name
    trained.steps = 4
    trained.train(2)
    assert_alike(group, dict(trained.module.named_parameters()))
    assert len(told) == (rank == 0 and is_told)


@on_ranks(2)
def test_a_meeting_to_which_a_rank_does_not_come_can_be_ended(rank: int) -> None:
    """And an end of another model's waits does not end it."""
    models = [Trained(), Trained("int8")]
    deserted, group = dist.new_group([0, 1]), dist.new_group([0, 1])
    if rank == 0:
        models[1].model.abort("for another reason")
        threading.Timer(0.3, models[0].model.abort, ["nobody comes"]).start()
        with pytest.raises(RuntimeError, match=r"fastddp: nobody comes.*FD052"):
            models[0].model.regroup(deserted)
    for trained in models:
        trained.model.regroup(group)
    for trained in models:
        trained.train(2)
        assert_alike(group, dict(trained.module.named_parameters()))
