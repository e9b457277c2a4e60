"""What frameworks call on ``model.reducer``, and ask of torch's logger, is what it is under torch's DDP."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel.distributed import _find_tensors

from fastddp.torch_compat.logging_data import Logger
from fastddp.torch_compat.reducer import Reducer
from models import MODELS, inputs
from on_ranks import Wrap, gradients, on_ranks, same_under_both
from parts import Parts, local_input, wrapped

NAME = "batch norm MLP"
SMALL_BUCKETS = {"bucket_cap_mb": 100 / 2**20}
OPTIONS = pytest.mark.parametrize(
    "options", [SMALL_BUCKETS, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}], ids=str
)


def prepare(model: Any, outputs: Any = ()) -> None:
    """What Lightning does before a backward that no forward has prepared."""
    model.require_forward_param_sync = True
    model.reducer._rebuild_buckets()
    model.reducer.prepare_for_backward(outputs)


@OPTIONS
@same_under_both()
def test_accelerates_way_all_forwards_under_no_sync(wrap: Wrap, rank: int, options: dict[str, Any]) -> Any:
    model, found = wrap(MODELS[NAME](), **options), []
    for step in range(3):
        model.zero_grad()
        with model.no_sync():
            losses = [model(inputs(NAME, rank, 2 * step + index)).square().mean() for index in (0, 1)]
        losses[0].backward()
        # Accelerate never gives outputs, with which torch's DDP raises under find_unused_parameters.
        prepare(model, losses[1:] if model.find_unused_parameters else [])
        losses[1].backward()
        found.append(gradients(model))
    return found


@OPTIONS
@same_under_both()
def test_lightnings_way_two_backwards_over_a_forward(wrap: Wrap, rank: int, options: dict[str, Any]) -> Any:
    model, found = wrap(MODELS[NAME](), **options), []
    for step in range(5):
        model.zero_grad()
        if step % 2:
            model(inputs(NAME, rank, step)).square().sum().backward()
            found.append(gradients(model))
            continue
        with model.no_sync():
            output = model(inputs(NAME, rank, step))
        for scale, retain in ((1.0, True), (0.1, False)):
            prepare(model, output)
            (output * scale).square().sum().backward(retain_graph=retain)
            found.append(gradients(model))
    return found


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


@OPTIONS
@same_under_both()
def test_a_forward_that_was_copied_from_torchs_class(wrap: type, rank: int, options: dict[str, Any]) -> Any:
    model, found = type("Framework", (Copied, wrap), {})(MODELS[NAME](), **options), []
    for step in range(4):
        model.zero_grad()
        with model.no_sync() if step == 2 else nullcontext():
            model.train_step(inputs(NAME, rank, step)).square().mean().backward()
        found += [gradients(model), [buffer.clone() for buffer in model.buffers()]]
    return found


# Of torch's reducer, and where what it does is done. Code that reaches for it gets an error.
NOT_NEEDED = {
    "gradients arrive by the reducer's own hooks": "_autograd_hook",
    "the wrapper has it": "_check_reducer_finalized _remove_autograd_hooks _set_ddp_runtime_logging_sample_rate "
    "_set_sparse_metadata _set_static_graph _update_process_group",
    "serves torch's joining": "_get_zeros_like_grad_buckets _push_all_rebuilt_params _set_forward_pass_work_handle",
    "serves torch's hooks, delayed gradients and mixed precision": "_set_optimizer_in_backward _run_allreduce_hook "
    "_install_post_backward_futures _reset_state _run_comm_hook _set_mixed_precision_param_dtype",
    "what torch found out, which fastddp tells by used_parameters() and step_report()": "_ddp_graph_static set_logger "
    "_get_local_used_map get_backward_stats",
}


def names_of(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith(("__", "_pybind11"))}


def test_every_name_of_torchs_reducer_and_logger_is_there_or_not_needed() -> None:
    not_needed = set(" ".join(NOT_NEEDED.values()).split())
    assert names_of(dist.Reducer) - names_of(Reducer) == not_needed & names_of(dist.Reducer)
    assert not not_needed & names_of(Reducer)
    assert names_of(dist.Logger) <= names_of(Logger)


@pytest.mark.parametrize("method", ["prepare_for_backward", "_delay_all_reduce", "_rebuild_buckets"])
@on_ranks(2)
def test_gradients_that_are_missing_are_named(rank: int, method: str) -> None:
    model = wrapped(Parts("ab"))
    model(local_input(rank), "a").backward()
    with pytest.raises(RuntimeError, match=r"parameter b \(number 1"):
        getattr(model.reducer, method)(*[[]] * (method == "prepare_for_backward"))
