"""What users of torch's DDP touch besides forward and backward."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim.optimizer import _global_optimizer_pre_hooks

import fastddp
from both import Program, gradients, same_under_both
from ranks import RankPool


def test_the_constructor_has_torchs_signature() -> None:
    ours = inspect.signature(fastddp.DistributedDataParallel.__init__).parameters
    theirs = inspect.signature(TorchDDP.__init__).parameters
    defaults = {name: parameter.default for name, parameter in theirs.items()}
    if defaults["broadcast_buffers"] is True:  # before torch 2.13; it is what None means
        defaults["broadcast_buffers"] = None
    assert defaults == {name: ours[name].default for name in theirs}
    assert [name for name in ours if name in theirs] == list(theirs)


def constructed(wrap: Program, rank: int, options: dict[str, Any]) -> list[Any]:
    model = wrap(module(), **options)
    return [model.bucket_bytes_cap, model.bucket_bytes_cap_list, model.device_ids, model.output_device]


@pytest.mark.parametrize(
    "options",
    [
        {"bucket_cap_mb": np.int64(1)},
        {"bucket_cap_mb": np.float32(0.5)},
        {"bucket_cap_mb_list": [np.int64(2), np.float64(1.0)]},
        {"output_device": 0},
        {"device_ids": [], "output_device": 0},
    ],
    ids=str,
)
def test_the_constructor_takes_what_torchs_takes(ranks: RankPool, options: dict[str, Any]) -> None:
    same_under_both(ranks, constructed, options)


def attributes(rank: int) -> None:
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


def test_broadcast_buffers_is_an_older_name_and_no_backward_is_finalized_by_hand(ranks: RankPool) -> None:
    ranks.run(attributes, 1)


def module() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def step(model: nn.Module, rank: int) -> list[Any]:
    model.zero_grad()
    model(torch.randn(5, 3, generator=torch.Generator().manual_seed(rank))).square().sum().backward()
    return gradients(model)


def copied(rank: int, how: str) -> list[Any]:
    """Gradients of a model that has trained, of its copy, and of it once more."""
    model = fastddp.DistributedDataParallel(module(), gradient_as_bucket_view=True, bucket_cap_mb=0)
    found = [step(model, rank), step(model, rank)]
    if how == "state_dict":
        twin: Any = TorchDDP(module())
        twin.module[0].weight.data.fill_(5)
        twin.load_state_dict(model.state_dict())
        assert list(twin.state_dict()) == list(model.state_dict())
    else:
        twin = pickle.loads(pickle.dumps(model)) if how == "pickle" else copy.deepcopy(model)
    assert twin.module[0].weight is not model.module[0].weight
    return [*found, step(twin, rank), step(model, rank), step(twin, rank)]


@pytest.mark.parametrize("how", ["pickle", "deepcopy", "state_dict"])
def test_a_copy_and_torchs_ddp_with_its_state_go_on_as_the_original(ranks: RankPool, how: str) -> None:
    # Buffers move on with each step; gradients do not depend on them in training.
    first, second = ranks.run(copied, 2, how)
    for gradients_of_step in [*first, *second]:
        assert all(map(torch.equal, gradients_of_step, first[0]))


def of_a_subgroup(rank: int) -> float:
    pair = dist.new_group([0, 2])
    if rank == 1:
        return 0.0
    model = fastddp.DistributedDataParallel(nn.Linear(1, 1, bias=False), process_group=pair)
    model(torch.full((1, 1), float(rank))).sum().backward()
    with pytest.raises(RuntimeError, match=r"state_dict\(\)"):
        pickle.dumps(model)
    return model.module.weight.grad.item()


def test_a_given_group_averages_and_cannot_be_pickled(ranks: RankPool) -> None:
    assert ranks.run(of_a_subgroup, 3) == [1.0, 0.0, 1.0]


def inference(rank: int) -> list[str]:
    model = fastddp.DistributedDataParallel(module(), forward_sync_buffers=False)
    assert model.eval() is model
    assert not model.module[1].training
    states = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            if rank == 0:  # alone: nothing is exchanged
                assert not model(torch.ones(2, 3)).requires_grad
        states.append(model.reducer.state)
    step(model.train(), rank)
    assert model.module[1].training
    return [*states, model.reducer.state]


def test_inference_starts_no_window_and_waits_for_no_other_rank(ranks: RankPool) -> None:
    assert ranks.run(inference, 2) == [["idle", "idle", "finished"]] * 2


# -------------------------------------------------------------------------------------------------- the wrapper's end


def wrap_twice(rank: int, keep_first: bool) -> tuple[int, bool]:
    inner = module()
    expected = step(fastddp.DistributedDataParallel(copy.deepcopy(inner)), rank)
    first = fastddp.DistributedDataParallel(inner)
    step(first, rank)
    checks = len(_global_optimizer_pre_hooks)
    gc.disable()  # the hooks must not wait for a collection of cycles
    try:
        if not keep_first:
            del first
        second = fastddp.DistributedDataParallel(inner)
        checks = len(_global_optimizer_pre_hooks) - checks
        return checks, all(map(torch.equal, expected, step(second, rank)))
    finally:
        gc.enable()


@pytest.mark.parametrize("keep_first", [False, True])
def test_a_module_may_be_wrapped_again_and_the_first_wrappers_hooks_go_with_it(
    ranks: RankPool, keep_first: bool
) -> None:
    assert ranks.run(wrap_twice, 2, keep_first) == [(int(keep_first), True)] * 2


def without_a_wrapper(rank: int, how: str) -> float:
    """Nobody synchronises any more."""
    inner = nn.Linear(1, 1, bias=False)
    model = fastddp.DistributedDataParallel(inner)
    output = model(torch.full((1, 1), rank + 1.0))
    gc.disable()
    try:
        if how == "dropped":
            alive = weakref.ref(model)
            del model
            assert alive() is None
        else:
            model._remove_autograd_hooks()
        output.sum().backward()
    finally:
        gc.enable()
    return inner.weight.grad.item()


@pytest.mark.parametrize("how", ["dropped", "without its hooks"])
def test_a_wrapper_that_is_gone_or_has_no_hooks_synchronises_no_more(ranks: RankPool, how: str) -> None:
    assert ranks.run(without_a_wrapper, 2, how) == [1.0, 2.0]


def dropped_with_its_group(rank: int) -> list[str]:
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
    events.append("freed")
    return events


def test_a_wrapper_dropped_with_its_group_waits_for_the_groups_threads(ranks: RankPool) -> None:
    assert ranks.run(dropped_with_its_group, 1) == [["callback", "freed"]]


# ----------------------------------------------------------------------------------------------- what is left to ranks


def ignored(rank: int) -> list[float]:
    inner = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    inner.register_buffer("count", torch.full((1,), float(rank)))
    for layer in inner:
        nn.init.constant_(layer.weight, rank)
    TorchDDP._set_params_and_buffers_to_ignore_for_model(inner, ["0.weight", "count"])
    inner.forward = lambda x: inner[0](x) + inner[1](x)  # type: ignore[method-assign]
    model = fastddp.DistributedDataParallel(inner)
    model(torch.full((1, 1), rank + 1.0)).sum().backward()
    return [inner[0].weight.item(), inner[0].weight.grad.item(), inner[1].weight.grad.item(), inner.count.item()]


def test_ignored_parameters_and_buffers_stay_local(ranks: RankPool) -> None:
    assert ranks.run(ignored, 2) == [[0.0, 1.0, 1.5, 0.0], [1.0, 2.0, 1.5, 1.0]]


class Ordered(nn.Module):
    """Gradients come in the order b, a, c; on rank 1 in another one."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(2)) for _ in range(3))
        self.order = (self.b, self.a, self.c) if rank == 1 else (self.c, self.a, self.b)

    def forward(self, x: Tensor) -> Tensor:
        for parameter in self.order:
            x = x * parameter
        return x.sum()


def rebuilt(rank: int) -> tuple[list[int], list[list[str]], list[float]]:
    model = fastddp.DistributedDataParallel(Ordered(rank), bucket_cap_mb=0)
    x = torch.full((2,), rank + 1.0)
    model(x).backward()
    arrived = model.reducer.arrival_order()
    model.zero_grad()
    model(x).backward()
    names = [[parameter.name for parameter in bucket.parameters] for bucket in model.bucket_plan().buckets]
    return arrived, names, model.module.a.grad.tolist()


def test_buckets_are_rebuilt_in_the_order_of_rank_0_on_all_ranks(ranks: RankPool) -> None:
    first, second = ranks.run(rebuilt, 2)
    assert first == ([1, 0, 2], [["b"], ["a"], ["c"]], [1.5, 1.5])
    assert second == ([2, 0, 1], [["b"], ["a"], ["c"]], [1.5, 1.5])
