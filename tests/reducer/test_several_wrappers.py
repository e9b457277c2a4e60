"""Several wrappers in one process, and what else a backward may have beside a wrapper's own gradients."""

from __future__ import annotations

import copy
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fake_cuda
import fastddp
from fastddp import DistributedDataParallel as Wrapper
from fastddp.comm_hooks import bf16_compress_hook, fp16_compress_hook, noop_hook
from on_ranks import of_ranks, on_ranks


class Ones(nn.Linear):
    """Gradients and outputs are easily told."""

    def __init__(self, inputs: int = 2, outputs: int = 2) -> None:
        super().__init__(inputs, outputs, bias=False)
        nn.init.ones_(self.weight)


class Pair(nn.Module):
    """Two layers; the second one may be left out."""

    def __init__(self, first: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.second = first or Ones(), Ones()

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        y = self.first(x)
        return self.second(y) if both else y


def at(rank: int) -> Tensor:
    return torch.full((1, 2), rank + 1.0)


def gradients(*modules: nn.Module) -> list[float | None]:
    of = [parameter.grad for module in modules for parameter in module.parameters()]
    return [None if gradient is None else gradient.flatten()[0].item() for gradient in of]


def after(loss: Tensor, *modules: nn.Module) -> list[float | None]:
    """The gradients that this backward brings."""
    for module in modules:
        module.zero_grad()
    loss.sum().backward()
    return gradients(*modules)


# ----------------------------------------------------------------------------------------------- shared parameters


@pytest.mark.parametrize("hook", [None, bf16_compress_hook])
@pytest.mark.parametrize("how", ["nested", "in one loss", "idle"])
@on_ranks(2)
def test_wrappers_with_a_layer_in_common_average_its_gradient_once(rank: int, how: str, hook: Any) -> None:
    layer = Ones()
    inner = Wrapper(layer if how == "nested" else Pair(layer))
    models = [Wrapper({"nested": Pair(inner), "in one loss": Pair(layer), "idle": inner.module}[how]), inner]
    for model in models:
        if hook:
            model.register_comm_hook(None, hook)
    for _ in range(3):
        outputs = [model(at(rank)) for model in models]
        models[1].zero_grad()
        loss = sum(outputs) if how == "in one loss" else outputs[0]  # the other one has only run its forward
        assert after(loss, models[0].module) == [6.0 if how == "in one loss" else 3.0, 3.0]


@on_ranks(2)
def test_what_one_wrapper_has_at_once_is_written_when_the_other_has_read_the_gradient(rank: int) -> None:
    """The wrapper with the hook writes last; had it written first, the other one's average would be what is left."""

    def doubled_at_once(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer() * 2)
        return future

    layer = Ones()
    models = [Wrapper(Pair(layer)) for _ in range(2)]
    models[0].register_comm_hook(None, doubled_at_once)
    for _ in range(3):
        assert after(models[0](at(rank)) + models[1](at(rank)), layer) == [8.0 * (rank + 1)]


@on_ranks(2)
def test_a_gradient_cannot_be_a_view_of_the_buckets_of_two_wrappers(rank: int) -> None:
    layer = Ones()
    one, other = (Wrapper(Pair(layer), gradient_as_bucket_view=True) for _ in range(2))
    with pytest.raises(RuntimeError, match="in the buckets of one of them only"):
        (one(at(rank)) + other(at(rank))).sum().backward()


WAYS = ["plain", "find_unused_parameters", "static_graph"]


def around(outer: type[nn.Module], inner: type[nn.Module], ways: tuple[str, str]) -> Any:
    of_outer, of_inner = ({} if way == "plain" else {way: True} for way in ways)
    return outer(inner(Pair(), **of_inner), **of_outer)


@pytest.mark.tier("slow", but_one_in=5)
@pytest.mark.parametrize("hook", [None, fp16_compress_hook])
@pytest.mark.parametrize("ways", itertools.product(WAYS, WAYS), ids=" in ".join)
@pytest.mark.parametrize(("outer", "inner"), [(TorchDDP, Wrapper), (Wrapper, TorchDDP)])
@on_ranks(2)
def test_torchs_wrapper_around_or_inside_one_has_the_right_gradients(
    rank: int, outer: Any, inner: Any, ways: tuple[str, str], hook: Any
) -> None:
    model = around(outer, inner, ways)
    for wrapper in (model, model.module) if hook else ():
        wrapper.register_comm_hook(None, hook)
    for _ in range(3):
        assert after(model(at(rank)), model) == [3.0, 3.0]
    for local in (model, model.module):
        model.zero_grad()
        with local.no_sync():
            model(at(rank)).sum().backward()
        model(at(rank)).sum().backward()
        assert gradients(model) == [6.0, 6.0]


@on_ranks(2)
def test_torchs_views_of_its_buckets_are_refused_around_or_inside_one(rank: int) -> None:
    view = "gradient_as_bucket_view"
    with pytest.raises(RuntimeError, match=f"of torch's, with {view}=True, is around or inside"):
        around(Wrapper, TorchDDP, ("plain", view))
    model = around(TorchDDP, Wrapper, (view, "plain"))
    with pytest.raises(RuntimeError, match=f"of torch's, with {view}=True, is around or inside"):
        model(at(rank))
    beside = Wrapper(Ones())
    assert after(TorchDDP(Ones(), gradient_as_bucket_view=True)(beside(at(rank))), beside) == [3.0]


# --------------------------------------------------------------------------------- collectives and backwards of others


@on_ranks(2)
def test_two_wrappers_of_one_group_keep_their_order_though_ranks_use_other_parameters(rank: int) -> None:
    """In the third step rank 1 leaves out a layer that it had used before."""
    first, second = Wrapper(Ones()), Wrapper(Pair(), find_unused_parameters=True)
    both, of_rank_0, none = [6.0, 6.0, 6.0], [4.0, 4.0, 2.0], [3.0, 3.0, None]
    for on_0, on_1, expected in [
        *[(True, True, both)] * 2,
        *[(True, False, of_rank_0), (False, False, none), (True, True, both)],
    ]:
        assert after(second(first(at(rank)), (on_0, on_1)[rank]), first, second) == expected


class Summed(torch.autograd.Function):
    """A collective in backward, as SyncBatchNorm has one."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient / dist.get_world_size()


@on_ranks(2)
def test_buckets_keep_clear_of_other_collectives_in_backward(rank: int) -> None:
    module = Pair()
    module.first.register_forward_hook(lambda layer, inputs, output: Summed.apply(output))
    model = Wrapper(module, find_unused_parameters=True, bucket_cap_mb=1e-6)
    model.reducer.share_order()
    uses = [(True, True), (True, True), (True, False), (True, True), (False, False), (True, True)]
    first, second = of_ranks([after(model(at(rank), used[rank]), model) for used in uses])
    assert first == second
    assert first[0] == first[1] == first[3] == first[5]


@on_ranks(1, pool="simulated_ranks")
def test_syncbatchnorm_has_such_collectives(rank: int) -> None:
    with mock.patch.object(fastddp._C.Reducer, "share_order") as share_order:
        Wrapper(nn.Sequential(Ones(), nn.SyncBatchNorm(2)).to(fake_cuda.DEVICE))
    assert share_order.called


@on_ranks(2)
def test_a_backward_of_the_module_alone_stays_on_its_rank(rank: int) -> None:
    model = Wrapper(Pair(), find_unused_parameters=True)
    for _ in range(2):
        assert after(model(at(rank)), model) == [3.0, 3.0]
        if rank == 0:
            model.module(at(0)).sum().backward()


# ------------------------------------------------------------------------------------------------ gradients, wires


@on_ranks(2)
def test_without_an_exchange_a_parameter_may_come_into_use(rank: int) -> None:
    model = Wrapper(Pair(), find_unused_parameters=True)
    model.register_comm_hook(None, noop_hook)
    for both in (False, False, True, True, False, True):
        expected = [2.0 * (rank + 1)] * 2 if both else [rank + 1.0, None]
        assert after(model(at(rank), both), model) == expected


@on_ranks(2)
def test_gradients_that_change_places_keep_their_values(rank: int) -> None:
    """After two steps they lie in the wire."""
    model = Wrapper(Pair())
    first, second = model.module.first.weight, model.module.second.weight
    for step in range(3):
        if step == 2:
            first.grad, second.grad = second.grad, first.grad
        model(at(rank)).sum().backward()
        assert gradients(model) == [3.0 * (step + 1)] * 2


@pytest.mark.parametrize("in_other_groups_too", [False, True])
@on_ranks(2)
def test_ranks_cut_wires_alike_once_there_is_a_second_lane(rank: int, in_other_groups_too: bool) -> None:
    """The one bucket, of 50 MiB, stays as it is then; rank 0 keeps a gradient, so its wire is a new one."""
    if in_other_groups_too:
        dist.new_group([0])  # of which rank 1 is no member: there is one lane
    model = Wrapper(Ones(4096, 3300))
    kept = []
    for _ in range(4):
        assert after(model(torch.full((1, 4096), rank + 1.0)), model) == [1.5]
        kept.append(model.module.weight.grad if rank == 0 else None)


@pytest.mark.tier("nightly")  # the first time, patience has to end
@on_ranks(2)
def test_a_hook_may_collect_buckets_until_the_last_one(rank: int) -> None:
    waiting: list[tuple[torch.futures.Future, Tensor]] = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        waiting.append((future, bucket.buffer()))
        while bucket.is_last() and waiting:
            done, buffer = waiting.pop(0)
            done.set_result(buffer)
        return future

    model = Wrapper(Pair(), bucket_cap_mb=1e-6)
    model.register_comm_hook(None, hook)
    for _ in range(3):
        assert after(model(at(rank)), model) == [2.0 * (rank + 1)] * 2


# ------------------------------------------------------------------------------------------------------ their order


def said_by(model: nn.Module, x: Tensor) -> str:
    try:
        model(x).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("copied", [False, True], ids=["", "a rank has made models alone"])
@on_ranks(3)
def test_models_that_a_rank_runs_in_another_order_are_named(rank: int, copied: bool) -> None:
    """Of one size; rank 1 begins with the third one after the first in the last step."""
    first, second = (Wrapper(Ones()) for _ in range(2))
    if copied and rank == 0:  # an average of weights, say
        copy.deepcopy(first)
        Wrapper(Ones(), init_sync=False)
    third = Wrapper(Ones())
    in_order = [first, second, third]
    last = [first, third, second] if rank == 1 else in_order
    said = [said_by(model, at(rank)) for model in (*in_order, *in_order, *last)]
    assert said[:7] == [""] * 7
    number = 4 if copied else 3
    assert f"step 3 of model 2 on rank 0, 2; step 3 of model {number} on rank 1" in said[7]
    assert f"step 3 of model 2 on rank 1; step 3 of model {number} on rank 0, 2" in said[8]
    for model in (*in_order, *in_order):  # a loop that catches the error goes on
        assert after(model(at(rank)), model) == [2.0]


@on_ranks(2, pool="simulated_ranks")
def test_on_a_device_each_rank_says_which_model_it_was_in(rank: int) -> None:
    """At the next forward of the model that met the other one."""
    models = [Wrapper(Ones().to(fake_cuda.DEVICE)) for _ in range(2)]
    x = at(rank).to(fake_cuda.DEVICE)
    for model in (*models, *models, models[rank]):
        model(x).sum().backward()
    fake_cuda.synchronize()
    with pytest.raises(RuntimeError, match=rf"met that of another model.*\(it was that of model {rank + 1} here"):
        models[rank](x)


def in_order(order: list[int]) -> nn.Module:
    """Layers of one size that run in this order; so their gradients come in different orders."""
    layers: Any = nn.ModuleList(Ones() for _ in order)

    def forward(x: Tensor) -> Tensor:
        for layer in order:
            x = layers[layer](x) * (layer + 1)
        return x.sum() * layers[0].weight[0, 0]

    layers.forward = forward
    return layers


@on_ranks(2)
def test_models_in_another_order_take_no_plan_from_each_other(rank: int) -> None:
    """Rank 1 runs them in another order in the second step, when buckets are rebuilt."""
    models = [Wrapper(in_order(order), bucket_cap_mb=1e-5) for order in ([0, 1], [1, 0])]
    for step in range(3):
        for place, model in enumerate(reversed(models) if (step, rank) == (1, 1) else models):
            model.zero_grad()
            said = said_by(model, at(rank))
            if step == 1:
                assert f"model 1 on rank {place}; model 2 on rank {1 - place}" in said
                continue
            right = torch.autograd.grad(model.module(torch.full((1, 2), 1.5)), [*model.parameters()])
            assert said == ""
            assert all(torch.equal(p.grad, gradient) for p, gradient in zip(model.parameters(), right, strict=True))
