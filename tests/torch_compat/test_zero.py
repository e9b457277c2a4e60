"""torch's ZeroRedundancyOptimizer, which fastddp shards where it can, and distributed checkpoints."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook, default_hooks
from torch.distributed.checkpoint import state_dict as states_of
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.utils import clip_grad_norm_

import fastddp
from on_ranks import on_ranks
from ranks import RankPool
from side_by_side import RESUMED, Trained, differences, resumed_elsewhere, same_training, without_buffers

SEVERAL_BUCKETS = {"bucket_cap_mb": 0.002}
# A name of gloo that torch's overlapping hooks do not refuse.
GLOO_BY_ANOTHER_NAME = "cpu:gloo"

# The groups that a rank process has had. The interleaved hook leaves a callback to a thread of gloo, and with it, under
# either DDP, sometimes the last reference to the group; freed in a thread of its own, a group aborts the process.
_kept: list[dist.ProcessGroup | None] = []


def wrapped(options: dict[str, Any], **of_zero: Any) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    """The network under the DDP of the moment, and its optimizer, Adam unless another is named."""
    model = nn.parallel.DistributedDataParallel(without_buffers(), **options)
    zero = ZeroRedundancyOptimizer(model.parameters(), **{"optimizer_class": torch.optim.Adam, "lr": 0.01} | of_zero)
    is_ours = isinstance(model, fastddp.DistributedDataParallel) and not of_zero.get("overlap_with_ddp")
    assert isinstance(zero, fastddp.ShardedOptimizer) is is_ours
    return model, zero


def step(rank: int, model: nn.Module, number: int) -> None:
    model.zero_grad()
    model(torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * number + rank))).square().mean().backward()


def trained(rank: int, options: dict[str, Any], zero_options: dict[str, Any]) -> Trained:
    """With the optimizer's tensors, which rank 0 has collected from all."""
    model, zero = wrapped(options, **zero_options)
    for number in range(4):
        step(rank, model, number)
        zero.step()
    zero.consolidate_state_dict(to=0)
    found = Trained.of(model)
    if rank == 0:
        states: dict[int, dict[str, Tensor]] = zero.state_dict()["state"]
        found.others |= {
            f"momentum of {key}": states[key]["exp_avg"] for key in sorted(states) if "exp_avg" in states[key]
        }
    else:
        with pytest.raises(RuntimeError, match=r"has not been consolidated on this rank(.|\n)*\(to=1\)"):
            zero.state_dict()
    return found


@pytest.mark.parametrize(
    ("options", "zero_options", "tensors"),
    [
        (SEVERAL_BUCKETS, {}, 6),
        ({"gradient_as_bucket_view": True}, {"parameters_as_bucket_view": True}, 6),
        (SEVERAL_BUCKETS, {"optimizer_class": torch.optim.Adafactor}, 0),  # takes whole parameters
    ],
)
def test_parameters_and_state_are_those_under_torchs_ddp(
    ranks: RankPool, options: dict[str, Any], zero_options: dict[str, Any], tensors: int
) -> None:
    ours, _ = same_training(ranks, trained, options, zero_options)
    assert len(ours.others) == tensors


@pytest.mark.tier("slow")
def test_a_patch_leaves_the_import_of_torchs_optimizers_to_those_who_need_it() -> None:
    """It takes long; under a patch the class shards from its import on."""
    name = "torch.distributed.optim.zero_redundancy_optimizer"
    lines = [
        "import sys, fastddp",
        "fastddp.patch()",
        f"assert {name!r} not in sys.modules",
        "from torch.distributed.optim import ZeroRedundancyOptimizer",
        "assert type(ZeroRedundancyOptimizer).__name__ == 'ShardsWherePossible'",
    ]
    subprocess.run([sys.executable, "-P", "-c", "\n".join(lines)], check=True, timeout=200)


def halves_of_zero(rank: int, folder: Path, which: tuple[int, ...]) -> Trained:
    """Rank 0 saves for all."""
    model, zero = wrapped(SEVERAL_BUCKETS)
    if which == (2,):
        of_model, of_zero = torch.load(folder)
        model.module.load_state_dict(of_model)
        zero.load_state_dict(of_zero)
    for half in which:
        for number in range(4 * half, 4 * half + 4):
            step(rank, model, number)
            zero.step()
    if which == (1,):
        zero.consolidate_state_dict()
        if rank == 0:
            torch.save((model.module.state_dict(), zero.state_dict()), folder)
        dist.barrier()
    return Trained.of(model)


@RESUMED
def test_a_consolidated_state_goes_on_under_either_ddp(ranks: RankPool, save_under: str, load_under: str) -> None:
    assert ranks.run(resumed_elsewhere, 2, halves_of_zero, save_under, load_under) == [[], []]


# ------------------------------------------------------------------------------------------------- what stays torch's


class OwnZero(ZeroRedundancyOptimizer):
    pass


STAYS: dict[str, Callable[[nn.Module], ZeroRedundancyOptimizer]] = {
    "another group": lambda model: ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, dist.new_group([dist.get_rank()], use_local_synchronization=True), lr=0.1
    ),
    "some parameters": lambda model: ZeroRedundancyOptimizer([*model.parameters()][1:], torch.optim.SGD, lr=0.1),
    "a frozen parameter": lambda model: ZeroRedundancyOptimizer(
        [*model.parameters(), nn.Parameter(torch.ones(2), requires_grad=False)], torch.optim.SGD, lr=0.1
    ),
    "another module's": lambda model: ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), torch.optim.SGD, lr=0.1),
    "LBFGS": lambda model: ZeroRedundancyOptimizer(model.parameters(), torch.optim.LBFGS),
    "a function": lambda model: ZeroRedundancyOptimizer(model.parameters(), partial(torch.optim.SGD, lr=0.1)),
    "a derived class": lambda model: OwnZero(model.parameters(), torch.optim.SGD, lr=0.1),
    "a class derived under the patch": lambda model: type(OwnZero)("New", (ZeroRedundancyOptimizer,), {})(  # type: ignore[misc]
        model.parameters(), torch.optim.SGD, lr=0.1
    ),
}


@pytest.mark.parametrize("kind", STAYS)
@on_ranks(2)
def test_what_is_not_exactly_a_models_optimizer_stays_torchs_without_a_word(rank: int, kind: str) -> None:
    with fastddp.patch(), warnings.catch_warnings():
        warnings.simplefilter("error")
        zero = STAYS[kind](nn.parallel.DistributedDataParallel(without_buffers()))
    assert not isinstance(zero, fastddp.ShardedOptimizer)
    assert isinstance(zero, ZeroRedundancyOptimizer)


@on_ranks(2)
def test_where_gradients_cannot_be_sharded_a_warning_says_why(rank: int) -> None:
    with fastddp.patch():
        model = nn.parallel.DistributedDataParallel(without_buffers())
        model.register_comm_hook(None, lambda state, bucket: default_hooks.allreduce_hook(None, bucket))
        with pytest.warns(UserWarning, match=r"ZeroRedundancyOptimizer stays torch's(.|\n)*a hook in Python") as warned:
            zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        assert warned[0].filename == __file__
        assert not isinstance(zero, fastddp.ShardedOptimizer)
        step(rank, model, 0)
        assert clip_grad_norm_(model.parameters(), 1e-3) > 1e-3
        zero.step()


@on_ranks(2)
def test_after_the_patch_new_optimizers_are_torchs_and_sharded_ones_count_as_torchs(rank: int) -> None:
    with fastddp.patch():
        with fastddp.patch():
            pass
        model, zero = wrapped({})
    assert isinstance(zero, ZeroRedundancyOptimizer)
    assert not isinstance(torch.optim.SGD(model.parameters()), ZeroRedundancyOptimizer)
    again = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    assert type(again) is ZeroRedundancyOptimizer
    assert type(ZeroRedundancyOptimizer) is type(OwnZero)


@pytest.mark.parametrize(("rate", "text"), [(-1.0, "Invalid learning rate"), ("x", "not supported")])
@on_ranks(2)
def test_errors_of_settings_are_torchs(rank: int, rate: Any, text: str) -> None:
    with fastddp.patch(), pytest.raises((TypeError, ValueError), match=text):
        wrapped({}, lr=rate)


# --------------------------------------------------------------------------------------------- steps inside backward


def overlapped(rank: int, hook: str, shard_buckets: bool, options: dict[str, Any]) -> Trained:
    """Steps that a hook does while backward runs; the first two windows only look at the buckets."""
    _kept.append(dist.group.WORLD)
    model, zero = wrapped(options, overlap_with_ddp=True)
    make_hook = getattr(ddp_zero_hook, hook)
    model.register_comm_hook(None, make_hook(default_hooks.allreduce_hook, model, zero, shard_buckets))
    before = Trained.of(model)
    for number in range(6):
        step(rank, model, number)
    trained = Trained.of(model)
    assert differences(before.parameters, trained.parameters) == list(before.parameters)
    return trained


@pytest.mark.parametrize(
    ("hook", "shard_buckets", "options"),
    [
        ("hook_with_zero_step", False, {}),
        ("hook_with_zero_step", False, SEVERAL_BUCKETS),
        ("hook_with_zero_step", True, SEVERAL_BUCKETS),
        ("hook_with_zero_step_interleaved", False, {}),
    ],
)
def test_overlapped_steps_are_torchs(ranks: RankPool, hook: str, shard_buckets: bool, options: dict[str, Any]) -> None:
    same_training(ranks, overlapped, hook, shard_buckets, options, backend=GLOO_BY_ANOTHER_NAME)


def halves(rank: int, folder: Path, which: tuple[int, ...]) -> Trained:
    """Each rank saves and loads its share of what torch's helpers for states return."""
    model = nn.parallel.DistributedDataParallel(without_buffers())  # DCP saves those of one rank
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    if which == (2,):
        state = {"model": states_of.get_model_state_dict(model)}
        state["optimizer"] = states_of.get_optimizer_state_dict(model, optimizer)
        dcp.load(state, checkpoint_id=folder)
        states_of.set_model_state_dict(model, state["model"])
        states_of.set_optimizer_state_dict(model, optimizer, state["optimizer"])
    for half in which:
        for number in range(4 * half, 4 * half + 4):
            step(rank, model, number)
            optimizer.step()
    if which == (1,):
        of_model, of_optimizer = states_of.get_state_dict(model, optimizer)
        dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
    return Trained.of(model)


@RESUMED
def test_a_distributed_checkpoint_goes_on_under_either_ddp(ranks: RankPool, save_under: str, load_under: str) -> None:
    assert ranks.run(resumed_elsewhere, 2, halves, save_under, load_under) == [[], []]
