"""What users of torch's DDP touch besides forward and backward."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fastddp
from fastddp.window.step_check import _ALL_STEPS
from on_ranks import gradients, of_ranks, on_ranks


def module() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def step(model: nn.Module, rank: int) -> list[Any]:
    model.zero_grad()
    model(torch.randn(5, 3, generator=torch.Generator().manual_seed(rank))).square().sum().backward()
    return gradients(model)


def scale() -> nn.Linear:
    """Its gradient is its input."""
    return nn.Linear(1, 1, bias=False)


def test_the_constructor_has_torchs_signature() -> None:
    ours = inspect.signature(fastddp.DistributedDataParallel.__init__).parameters
    theirs = inspect.signature(TorchDDP.__init__).parameters
    defaults = {name: parameter.default for name, parameter in theirs.items()}
    if defaults["broadcast_buffers"] is True:  # before torch 2.13; it is what None means
        defaults["broadcast_buffers"] = None
    assert defaults == {name: ours[name].default for name in theirs}
    assert [name for name in ours if name in theirs] == list(theirs)


@on_ranks(1)
def test_broadcast_buffers_is_an_older_name_and_no_backward_is_finalized_by_hand(rank: int) -> None:
    model = fastddp.DistributedDataParallel(module(), forward_sync_buffers=False)
    assert model.broadcast_buffers is False
    model.broadcast_buffers = True
    assert model.forward_sync_buffers is model.will_sync_module_buffers() is True
    model.require_manual_backward_finalization = False
    with pytest.raises(RuntimeError, match="ends its exchanges before backward returns"):
        model.require_manual_backward_finalization = True
    with pytest.raises(RuntimeError, match="gradients are complete when backward returns"):
        model.finalize_backward()
    assert model.require_manual_backward_finalization is model.should_finalize_after_backward is False


@pytest.mark.parametrize("how", ["pickle", "deepcopy", "state_dict"])
@on_ranks(2)
def test_a_copy_and_torchs_ddp_with_its_state_go_on_as_the_original(rank: int, how: str) -> None:
    model = fastddp.DistributedDataParallel(module(), gradient_as_bucket_view=True, bucket_cap_mb=0)
    expected = step(model, rank)
    if how == "state_dict":
        twin: Any = TorchDDP(module())
        nn.init.constant_(twin.module[0].weight, 5)
        twin.load_state_dict(model.state_dict())
        assert list(twin.state_dict()) == list(model.state_dict())
    else:
        twin = pickle.loads(pickle.dumps(model)) if how == "pickle" else copy.deepcopy(model)
    assert twin.module[0].weight is not model.module[0].weight
    # Buffers move on with each step; gradients do not depend on them in training.
    for each in (twin, model, twin):
        for found in of_ranks(step(each, rank)):
            assert all(map(torch.equal, found, expected))


@on_ranks(3)
def test_a_given_group_averages_and_cannot_be_pickled(rank: int) -> None:
    pair = dist.new_group([0, 2])
    if rank != 1:
        model = fastddp.DistributedDataParallel(scale(), process_group=pair)
        model(torch.full((1, 1), float(rank))).sum().backward()
        assert model.module.weight.grad.item() == 1.0
        with pytest.raises(RuntimeError, match=r"state_dict\(\)"):
            pickle.dumps(model)


@on_ranks(2)
def test_inference_starts_no_window_and_waits_for_no_other_rank(rank: int) -> None:
    model = fastddp.DistributedDataParallel(module(), forward_sync_buffers=False).eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            if rank == 0:  # alone: nothing is exchanged
                assert not model(torch.ones(2, 3)).requires_grad
        assert model.reducer.state == "idle"
    step(model.train(), rank)
    assert model.module[1].training
    assert model.reducer.state == "finished"


# -------------------------------------------------------------------------------------------------- the wrapper's end


@pytest.mark.parametrize("keep_first", [False, True])
@on_ranks(2)
def test_a_module_may_be_wrapped_again_and_the_first_wrappers_hooks_go_with_it(rank: int, keep_first: bool) -> None:
    inner = module()
    expected = step(fastddp.DistributedDataParallel(copy.deepcopy(inner)), rank)
    first = fastddp.DistributedDataParallel(inner)
    step(first, rank)
    checks = len(_ALL_STEPS)
    gc.disable()  # the hooks must not wait for a collection of cycles
    if not keep_first:
        del first
    second = fastddp.DistributedDataParallel(inner)
    assert len(_ALL_STEPS) == checks + keep_first
    assert all(map(torch.equal, expected, step(second, rank)))
    gc.enable()


@pytest.mark.parametrize("how", ["dropped", "without its hooks"])
@on_ranks(2)
def test_a_wrapper_that_is_gone_or_has_no_hooks_synchronises_no_more(rank: int, how: str) -> None:
    inner = scale()
    model = fastddp.DistributedDataParallel(inner)
    output = model(torch.full((1, 1), rank + 1.0))
    gc.disable()
    if how == "dropped":
        del model
    else:
        model._remove_autograd_hooks()
    output.sum().backward()
    gc.enable()
    assert inner.weight.grad.item() == rank + 1.0


@on_ranks(1)
def test_a_wrapper_dropped_with_its_group_waits_for_the_groups_threads(rank: int) -> None:
    """The wrapper has the last reference to a group whose thread is running Python code."""
    model = fastddp.DistributedDataParallel(nn.Linear(1, 1))
    events: list[str] = []
    begun = threading.Event()

    def in_the_groups_thread(_: torch.futures.Future) -> None:
        begun.set()
        time.sleep(0.1)  # the main thread goes on and takes the GIL
        events.append("callback")

    work = dist.all_reduce(torch.zeros(10_000_000), async_op=True)  # not done before then() is called
    work.get_future().then(in_the_groups_thread)
    begun.wait()
    del work
    dist.destroy_process_group()
    del model
    gc.collect()
    assert events == ["callback"]


# ----------------------------------------------------------------------------------------------- what is left to ranks


@on_ranks(2)
def test_ignored_parameters_and_buffers_stay_local(rank: int) -> None:
    inner = nn.Sequential(scale(), scale())
    inner.register_buffer("count", torch.full((1,), float(rank)))
    for layer in inner:
        nn.init.constant_(layer.weight, rank)
    TorchDDP._set_params_and_buffers_to_ignore_for_model(inner, ["0.weight", "count"])
    inner.forward = lambda x: inner[0](x) + inner[1](x)  # type: ignore[method-assign]
    model = fastddp.DistributedDataParallel(inner)
    model(torch.full((1, 1), rank + 1.0)).sum().backward()
    assert (inner[0].weight.item(), inner[0].weight.grad.item(), inner.count.item()) == (rank, rank + 1, rank)
    assert (inner[1].weight.item(), inner[1].weight.grad.item()) == (0, 1.5)
