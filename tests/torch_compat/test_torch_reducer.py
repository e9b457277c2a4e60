"""What frameworks call on ``model.reducer``, and ask of torch's logger, is what it is under torch's DDP."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _find_tensors

import fastddp
from fastddp import comm_hooks
from fastddp.torch_compat.logging_data import Logger
from fastddp.torch_compat.reducer import Reducer
from models import MODELS, inputs
from ranks import RankPool

NAME = "batch norm MLP"
SMALL_BUCKETS = {"bucket_cap_mb": 100 / 2**20}
Result = list[Tensor]


def prepare(model: nn.Module, outputs: Any = ()) -> None:
    """What Lightning does before a backward that no forward has prepared."""
    model.require_forward_param_sync = True
    model.reducer._rebuild_buckets()
    model.reducer.prepare_for_backward(outputs)


def gradients(model: nn.Module) -> Result:
    return [parameter.grad.clone() for parameter in model.parameters()]


def after_local_passes(rank: int, model: nn.Module) -> Result:
    """Accelerate's way: all forwards under no_sync, the last backward synchronises."""
    found = []
    for step in range(3):
        model.zero_grad()
        with model.no_sync():
            losses = [model(inputs(NAME, rank, 2 * step + index)).square().mean() for index in (0, 1)]
        losses[0].backward()
        # Accelerate never gives outputs, with which torch's DDP raises under find_unused_parameters.
        prepare(model, losses[1:] if model.find_unused_parameters else [])
        losses[1].backward()
        found += gradients(model)
    return found


def twice_over_one_forward(rank: int, model: nn.Module) -> Result:
    """Lightning's way, by hand: each backward synchronises."""
    found = []
    for step in range(3):
        model.zero_grad()
        with model.no_sync():
            output = model(inputs(NAME, rank, step))
        for scale, retain in ((1.0, True), (0.1, False)):
            prepare(model, output)
            (output * scale).square().sum().backward(retain_graph=retain)
            found += gradients(model)
    return found


def between_usual_steps(rank: int, model: nn.Module) -> Result:
    found = []
    for step in range(4):
        model.zero_grad()
        if step % 2 == 0:
            loss = model(inputs(NAME, rank, step)).square().sum()
        else:
            with model.no_sync():
                loss = model(inputs(NAME, rank, step)).square().sum()
            prepare(model, [loss])
        loss.backward()
        found += gradients(model)
    return found


def under_both(rank: int, training: Callable[[int, nn.Module], Result], options: dict[str, Any]) -> list[bool]:
    results = []
    for make in (TorchDDP, fastddp.DistributedDataParallel):
        torch.manual_seed(0)
        results.append(training(rank, make(MODELS[NAME](), **options)))
    return [torch.equal(a, b) for a, b in zip(*results, strict=True)]


@pytest.mark.parametrize(
    "options", [SMALL_BUCKETS, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}], ids=str
)
@pytest.mark.parametrize("training", [after_local_passes, twice_over_one_forward, between_usual_steps])
def test_a_backward_that_no_forward_has_prepared(
    ranks: RankPool, training: Callable[[int, nn.Module], Result], options: dict[str, Any]
) -> None:
    for same in ranks.run(under_both, 2, training, options):
        assert all(same)


def weighted(rank: int) -> list[float]:
    """Rank r's own gradient is r + 1 times the step, its weight (2 r + 1) times the step."""
    steps = iter(range(1, 4))
    model = fastddp.DistributedDataParallel(
        nn.Linear(1, 1, bias=False), gradient_average=lambda: (2.0 * rank + 1) * next(steps)
    )
    found = []
    for step in (1, 2, 3):
        model.zero_grad()
        with model.no_sync():
            output = model(torch.full((1, 1), (rank + 1.0) * step))
        prepare(model, output)
        output.sum().backward()
        found.append(model.module.weight.grad.item())
    return found


def test_a_window_that_is_prepared_counts_what_its_ranks_weigh(ranks: RankPool) -> None:
    for found in ranks.run(weighted, 2):
        assert found == pytest.approx([7 / 4 * step for step in (1, 2, 3)])


def scheduled(rank: int) -> list[str]:
    model = fastddp.DistributedDataParallel(nn.Linear(40, 40))
    model.register_comm_hook(comm_hooks.PowerSGDState(None, 1, start_powerSGD_iter=3), comm_hooks.powerSGD_hook)
    with model.no_sync():
        output = model(torch.ones(2, 40))
    used = []
    for _ in range(4):
        model.reducer.prepare_for_backward([])
        used.append(type(model._exchange).__name__)
        output.sum().backward(retain_graph=True)
    return used


def test_each_window_that_is_prepared_follows_the_schedule_of_the_hook(ranks: RankPool) -> None:
    assert ranks.run(scheduled, 2) == [["AllReduce", "AllReduce", "AllReduce", "PowerSGD"]] * 2


# Of torch's reducer, and where what it does is done. Code that reaches for it gets an error.
NOT_NEEDED = {
    "gradients arrive by the reducer's own hooks": "_autograd_hook",
    "the wrapper has it": "_check_reducer_finalized _remove_autograd_hooks _set_ddp_runtime_logging_sample_rate "
    "_set_sparse_metadata _set_static_graph _update_process_group",
    "serves torch's joining": "_get_zeros_like_grad_buckets _push_all_rebuilt_params _set_forward_pass_work_handle",
    "serves torch's hooks, for optimizers in backward, delayed gradients and in C++": "_set_optimizer_in_backward "
    "_install_post_backward_futures _reset_state _run_allreduce_hook _run_comm_hook",
    "serves torch's mixed precision": "_set_mixed_precision_param_dtype",
    "what torch found out about the graph, and its log": "_ddp_graph_static set_logger",
    "fastddp has used_parameters() and step_report()": "_get_local_used_map get_backward_stats",
}


def test_every_name_of_torchs_reducer_and_logger_is_there_or_not_needed() -> None:
    missing = {name for name in names_of(dist.Reducer) if not hasattr(Reducer, name)}
    not_needed = set(" ".join(NOT_NEEDED.values()).split())
    assert missing == not_needed & names_of(dist.Reducer)
    assert not {name for name in not_needed if hasattr(Reducer, name)}
    assert names_of(dist.Logger) <= names_of(Logger)


def names_of(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith(("__", "_pybind11"))}


class Copied:
    """Torch's own steps around a forward, as training frameworks have copied them into a method of theirs."""

    def train_step(self: Any, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.logger.set_runtime_stats_and_log()
            self.reducer.prepare_for_forward()
        if torch.is_grad_enabled() and self.reducer._rebuild_buckets():
            self._has_rebuilt_buckets = True
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        output = self.module(x)
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.require_forward_param_sync = True
            self.reducer.prepare_for_backward(list(_find_tensors(output)) if self.find_unused_parameters else [])
        else:
            self.require_forward_param_sync = False
        return output


def copied_steps(rank: int, cls: type, options: dict[str, Any]) -> Result:
    torch.manual_seed(0)
    model = type("Framework", (Copied, cls), {})(MODELS[NAME](), **options)
    found = []
    for step in range(4):
        model.zero_grad()
        with model.no_sync() if step == 2 else nullcontext():
            model.train_step(inputs(NAME, rank, step)).square().mean().backward()
        found += gradients(model) + [buffer.clone() for buffer in model.buffers()]
    return found


@pytest.mark.parametrize("options", [SMALL_BUCKETS, {"find_unused_parameters": True}], ids=str)
def test_a_forward_that_was_copied_from_torchs_class_does_what_it_does_there(
    ranks: RankPool, options: dict[str, Any]
) -> None:
    ours, theirs = (ranks.run(copied_steps, 2, cls, options) for cls in (fastddp.DistributedDataParallel, TorchDDP))
    for of_rank in zip(ours, theirs, strict=True):
        assert all(map(torch.equal, *of_rank))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.ones(1))
        self.left_out = nn.Parameter(torch.ones(1))

    def forward(self) -> Tensor:
        return self.used * 2


def with_missing_gradient(rank: int, method: str) -> None:
    model = fastddp.DistributedDataParallel(Two())
    model().backward()
    getattr(model.reducer, method)(*[[]] * (method == "prepare_for_backward"))


@pytest.mark.parametrize("method", ["prepare_for_backward", "_delay_all_reduce", "_rebuild_buckets"])
def test_gradients_that_are_missing_are_named(ranks: RankPool, method: str) -> None:
    for error in ranks.errors(with_missing_gradient, 2, method):
        assert "left_out" in error.message


def rebuilt(rank: int) -> list[bool]:
    model = fastddp.DistributedDataParallel(MODELS[NAME](), **SMALL_BUCKETS)
    before_a_window = model.reducer._rebuild_buckets()
    model(inputs(NAME, rank, 0)).sum().backward()
    first = gradients(model)
    found = [before_a_window, model.reducer._rebuild_buckets(), model.reducer._rebuild_buckets()]
    return [*found, model._has_rebuilt_buckets, all(map(torch.equal, first, gradients(model)))]


def test_buckets_are_rebuilt_once_after_the_first_window(ranks: RankPool) -> None:
    assert ranks.run(rebuilt, 2) == [[False, True, False, True, True]] * 2
