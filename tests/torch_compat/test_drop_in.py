"""What users of torch's DDP touch besides forward and backward."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim.optimizer import _global_optimizer_pre_hooks

import fastddp
from ranks import RankPool


def test_the_constructor_has_torchs_signature() -> None:
    ours = inspect.signature(fastddp.DistributedDataParallel.__init__).parameters
    theirs = inspect.signature(TorchDDP.__init__).parameters
    defaults = {name: parameter.default for name, parameter in theirs.items()}
    if defaults["broadcast_buffers"] is True:  # before torch 2.13; it is what None means
        defaults["broadcast_buffers"] = None
    assert defaults == {name: ours[name].default for name in theirs}
    assert [name for name in ours if name in theirs] == list(theirs)


def finalized_by_hand(rank: int) -> None:
    model = fastddp.DistributedDataParallel(module())
    model.require_manual_backward_finalization = False
    with pytest.raises(RuntimeError, match="ends its exchanges before backward returns"):
        model.require_manual_backward_finalization = True
    with pytest.raises(RuntimeError, match="gradients are complete when backward returns"):
        model.finalize_backward()
    assert model.require_manual_backward_finalization is model.should_finalize_after_backward is False


def test_no_backward_is_left_to_be_finalized_by_hand(ranks: RankPool) -> None:
    ranks.run(finalized_by_hand, 1)


def older_name_of_forward_sync_buffers(rank: int) -> list[bool]:
    model = fastddp.DistributedDataParallel(module(), forward_sync_buffers=False)
    before = model.broadcast_buffers
    model.broadcast_buffers = True
    return [before, model.broadcast_buffers, model.forward_sync_buffers, model.will_sync_module_buffers()]


def test_broadcast_buffers_is_the_older_name_of_forward_sync_buffers(ranks: RankPool) -> None:
    assert ranks.run(older_name_of_forward_sync_buffers, 1) == [[False, True, True, True]]


def module() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def state_dicts(rank: int) -> bool:
    ours, theirs = fastddp.DistributedDataParallel(module()), TorchDDP(module())
    theirs.module[0].weight.data.fill_(5)
    ours.load_state_dict(theirs.state_dict())
    assert isinstance(ours, TorchDDP)
    same_keys = list(ours.state_dict()) == list(theirs.state_dict())
    return same_keys and bool((ours.module[0].weight == 5).all())


def test_state_dicts_are_interchangeable_with_torchs(ranks: RankPool) -> None:
    assert ranks.run(state_dicts, 2) == [True, True]


def step(model: nn.Module, rank: int) -> list[Tensor]:
    model.zero_grad()
    model(torch.randn(5, 3, generator=torch.Generator().manual_seed(rank))).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def copied(rank: int, how: str) -> bool:
    model = fastddp.DistributedDataParallel(module(), gradient_as_bucket_view=True, bucket_cap_mb=0)
    expected = step(model, rank)
    twin = pickle.loads(pickle.dumps(model)) if how == "pickle" else copy.deepcopy(model)
    assert twin.module[0].weight is not model.module[0].weight
    # The twin's buffers have moved on by one step; its gradients do not depend on them in training.
    actual = step(twin, rank)
    other_rank = [gradient.clone() for gradient in actual]
    for gradient in other_rank:
        dist.broadcast(gradient, 0)
    return all(torch.equal(a, b) and torch.equal(b, c) for a, b, c in zip(expected, actual, other_rank, strict=True))


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_a_copy_synchronises_like_the_original(ranks: RankPool, how: str) -> None:
    assert ranks.run(copied, 2, how) == [True, True]


def subgroup(rank: int) -> float:
    pair = dist.new_group([0, 2])
    if rank == 1:
        return 0.0
    model = fastddp.DistributedDataParallel(nn.Linear(1, 1, bias=False), process_group=pair)
    model(torch.full((1, 1), float(rank))).sum().backward()
    with pytest.raises(RuntimeError, match=r"state_dict\(\)"):
        pickle.dumps(model)
    return model.module.weight.grad.item()


def test_a_given_group_averages_and_cannot_be_pickled(ranks: RankPool) -> None:
    assert ranks.run(subgroup, 3) == [1.0, 0.0, 1.0]


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
        gradients = step(second, rank)
    finally:
        gc.enable()
    return checks, all(torch.equal(a, b) for a, b in zip(expected, gradients, strict=True))


@pytest.mark.parametrize("keep_first", [False, True])
def test_a_module_may_be_wrapped_again_and_the_first_wrappers_hooks_go_with_it(
    ranks: RankPool, keep_first: bool
) -> None:
    assert ranks.run(wrap_twice, 2, keep_first) == [(int(keep_first), True)] * 2


def dropped_wrapper(rank: int) -> tuple[bool, float]:
    inner = nn.Linear(1, 1, bias=False)
    model = fastddp.DistributedDataParallel(inner)
    output = model(torch.full((1, 1), rank + 1.0))
    gc.disable()
    try:
        alive = weakref.ref(model)
        del model
        output.sum().backward()  # nobody synchronises any more
    finally:
        gc.enable()
    return alive() is None, inner.weight.grad.item()


def test_a_dropped_wrapper_is_freed_at_once_and_synchronises_no_more(ranks: RankPool) -> None:
    assert ranks.run(dropped_wrapper, 2) == [(True, 1.0), (True, 2.0)]


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


def removed_hooks(rank: int) -> float:
    model = fastddp.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    model._remove_autograd_hooks()
    model(torch.full((1, 1), rank + 1.0)).sum().backward()
    return model.module.weight.grad.item()


def test_remove_autograd_hooks_ends_synchronisation(ranks: RankPool) -> None:
    assert ranks.run(removed_hooks, 2) == [1.0, 2.0]


def ignored(rank: int, ignored_names: list[str]) -> list[float | None]:
    inner = nn.ModuleDict({"a": nn.Linear(1, 1, bias=False), "b": nn.Linear(1, 1, bias=False)})
    inner.register_buffer("count", torch.full((1,), float(rank)))
    with torch.no_grad():
        inner["a"].weight.fill_(rank)
        inner["b"].weight.fill_(rank)
    TorchDDP._set_params_and_buffers_to_ignore_for_model(inner, ignored_names)
    inner.forward = lambda x: inner["a"](x) + inner["b"](x)  # type: ignore[method-assign]
    model = fastddp.DistributedDataParallel(inner)
    model(torch.full((1, 1), rank + 1.0)).sum().backward()
    return [inner["a"].weight.item(), inner["a"].weight.grad.item(), inner["b"].weight.grad.item(), inner.count.item()]


def test_ignored_parameters_and_buffers_stay_local(ranks: RankPool) -> None:
    assert ranks.run(ignored, 2, ["a.weight", "count"]) == [[0.0, 1.0, 1.5, 0.0], [1.0, 2.0, 1.5, 1.0]]


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


def rebuilt(rank: int) -> tuple[list[int], list[float]]:
    model = fastddp.DistributedDataParallel(Ordered(rank), bucket_cap_mb=0)
    x = torch.full((2,), rank + 1.0)
    model(x).backward()
    arrived = model.reducer.arrival_order()
    model.zero_grad()
    model(x).backward()
    return arrived, model.module.a.grad.tolist()


def test_buckets_are_rebuilt_in_the_order_of_rank_0_on_all_ranks(ranks: RankPool) -> None:
    assert ranks.run(rebuilt, 2) == [([1, 0, 2], [1.5, 1.5]), ([2, 0, 1], [1.5, 1.5])]
