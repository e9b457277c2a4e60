"""Several wrappers in one process, and what else a backward may have beside a wrapper's own gradients."""

from __future__ import annotations

import copy
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import fake_cuda
import fastddp
from fastddp.comm_hooks import bf16_compress_hook, noop_hook
from ranks import RankPool, RanksFailed


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


# ----------------------------------------------------------------------------------------------- shared parameters


def with_a_common_layer(rank: int, how: str, hook: Any = None, **options: Any) -> list[list[float | None]]:
    layer = Ones()
    if how == "nested":
        inner = fastddp.DistributedDataParallel(layer, **options)
        models = [fastddp.DistributedDataParallel(Pair(inner), **options), inner]
    elif how == "in one loss":
        models = [fastddp.DistributedDataParallel(Pair(layer), **options) for _ in range(2)]
    else:
        module = Pair(layer)
        models = [fastddp.DistributedDataParallel(module, **options) for _ in range(2)]
    for model in models:
        if hook:
            model.register_comm_hook(None, hook)
    steps = []
    for _ in range(3):
        for model in models:
            model.zero_grad()
        outputs = [model(at(rank)) for model in models]
        if how == "in one loss":
            (outputs[0] + outputs[1]).sum().backward()
        else:  # the other one has only run its forward
            outputs[0].sum().backward()
        steps.append(gradients(models[0].module))
    return steps


@pytest.mark.parametrize("hook", [None, bf16_compress_hook])
@pytest.mark.parametrize(
    ("how", "expected"), [("nested", [3.0, 3.0]), ("in one loss", [6.0, 3.0]), ("idle", [3.0, 3.0])]
)
def test_wrappers_with_a_layer_in_common_average_its_gradient_once(
    ranks: RankPool, how: str, expected: list[float], hook: Any
) -> None:
    assert ranks.run(with_a_common_layer, 2, how, hook) == [[expected] * 3] * 2


def doubled_at_once(state: object, bucket: Any) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer() * 2)
    return future


def averaged_behind_a_hook(rank: int) -> list[list[float | None]]:
    layer = Ones()
    models = [fastddp.DistributedDataParallel(Pair(layer)) for _ in range(2)]
    models[0].register_comm_hook(None, doubled_at_once)
    steps = []
    for _ in range(3):
        layer.zero_grad()
        (models[0](at(rank)) + models[1](at(rank))).sum().backward()
        steps.append(gradients(layer))
    return steps


def test_what_one_wrapper_has_at_once_is_written_when_the_other_has_read_the_gradient(ranks: RankPool) -> None:
    """The wrapper with the hook writes last; had it written first, the other one's average would be what is left."""
    assert ranks.run(averaged_behind_a_hook, 2) == [[[8.0]] * 3, [[16.0]] * 3]


def test_a_gradient_cannot_be_a_view_of_the_buckets_of_two_wrappers(ranks: RankPool) -> None:
    with pytest.raises(RanksFailed, match="in the buckets of one of them only"):
        ranks.run(with_a_common_layer, 2, "in one loss", gradient_as_bucket_view=True)


# ------------------------------------------------------------------------------------- the order of collectives


def chained(rank: int) -> list[list[float | None]]:
    """In the third step rank 1 leaves out a layer that it had used before."""
    first = fastddp.DistributedDataParallel(Ones())
    second = fastddp.DistributedDataParallel(Pair(), find_unused_parameters=True)
    steps = []
    for used in [(True, True), (True, True), (True, False), (False, False), (True, True)]:
        first.zero_grad()
        second.zero_grad()
        second(first(at(rank)), used[rank]).sum().backward()
        steps.append(gradients(first, second))
    return steps


def test_two_wrappers_of_one_group_keep_their_order_though_ranks_use_other_parameters(ranks: RankPool) -> None:
    all_used, left_out_by_one, left_out = [6.0, 6.0, 6.0], [4.0, 4.0, 2.0], [3.0, 3.0, None]
    expected = [all_used, all_used, left_out_by_one, left_out, all_used]
    assert ranks.run(chained, 2) == [expected] * 2


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


class WithCollective(Pair):
    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        y = Summed.apply(self.first(x))
        return self.second(y) if both else y


def beside_a_collective(rank: int) -> list[list[float | None]]:
    model = fastddp.DistributedDataParallel(WithCollective(), find_unused_parameters=True, bucket_cap_mb=1e-6)
    model.reducer.share_order()
    steps = []
    for used in [(True, True), (True, True), (True, False), (True, True), (False, False), (True, True)]:
        model.zero_grad()
        model(at(rank), used[rank]).sum().backward()
        steps.append(gradients(model.module.first, model.module.second))
    return steps


def test_buckets_keep_clear_of_other_collectives_in_backward(ranks: RankPool) -> None:
    first, second = ranks.run(beside_a_collective, 2)
    assert first == second
    assert first[0] == first[1] == first[3] == first[5]


def says_that_it_shares_the_order(rank: int) -> bool:
    with mock.patch.object(fastddp._C.Reducer, "share_order") as share_order:
        fastddp.DistributedDataParallel(nn.Sequential(Ones(), nn.SyncBatchNorm(2)).to(fake_cuda.DEVICE))
    return share_order.called


def test_syncbatchnorm_has_such_collectives(simulated_ranks: RankPool) -> None:
    assert simulated_ranks.run(says_that_it_shares_the_order, 1) == [True]


# ---------------------------------------------------------------------------------- backwards of somebody else


def with_an_extra_backward_on_rank_0(rank: int) -> list[list[float | None]]:
    model = fastddp.DistributedDataParallel(Pair(), find_unused_parameters=True)
    steps = []
    for _ in range(2):
        model.zero_grad()
        model(at(rank)).sum().backward()
        steps.append(gradients(model))
        if rank == 0:
            model.module(at(0)).sum().backward()
    return steps


def test_a_backward_of_the_module_alone_stays_on_its_rank(ranks: RankPool) -> None:
    assert ranks.run(with_an_extra_backward_on_rank_0, 2) == [[[3.0, 3.0]] * 2] * 2


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        time.sleep(0.3)
        return gradient


class SlowPair(Pair):
    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        return self.second(Slow.apply(self.first(x)))


def evaluated_in_a_thread(rank: int) -> list[list[float | None]]:
    model = fastddp.DistributedDataParallel(SlowPair(), bucket_cap_mb=1e-6)

    def evaluate() -> None:
        time.sleep(0.1)
        with torch.no_grad():
            model(at(rank))

    steps = []
    for _ in range(2):
        model.zero_grad()
        loss = model(at(rank)).sum()
        thread = threading.Thread(target=evaluate)
        if rank == 0:
            thread.start()
        loss.backward()
        if rank == 0:
            thread.join()
        steps.append(gradients(model))
    return steps


def test_a_forward_without_gradients_in_another_thread_leaves_backward_alone(ranks: RankPool) -> None:
    assert ranks.run(evaluated_in_a_thread, 2) == [[[3.0, 3.0]] * 2] * 2


# ------------------------------------------------------------------------------------------------ gradients, wires


def alone(rank: int) -> list[list[float | None]]:
    """Gradients that no rank gets of another, of a layer that comes into use in the third step."""
    model = fastddp.DistributedDataParallel(Pair(), find_unused_parameters=True)
    model.register_comm_hook(None, noop_hook)
    steps = []
    for used in (False, False, True, True, False, True):
        model.zero_grad()
        model(at(rank), used).sum().backward()
        steps.append(gradients(model))
    return steps


def test_without_an_exchange_a_parameter_may_come_into_use(ranks: RankPool) -> None:
    for rank, found in enumerate(ranks.run(alone, 2)):
        without, with_it = [rank + 1.0, None], [2.0 * (rank + 1), 2.0 * (rank + 1)]
        assert found == [without, without, with_it, with_it, without, with_it]


def exchanged(rank: int) -> list[list[float | None]]:
    """After two steps the gradients lie in the wire; then those of two parameters change places."""
    model = fastddp.DistributedDataParallel(Pair())
    steps = []
    for step in range(3):
        model(at(rank)).sum().backward()
        steps.append(gradients(model))
        first, second = model.module.first.weight, model.module.second.weight
        if step == 1:
            first.grad, second.grad = second.grad, first.grad
    return steps


def test_gradients_that_change_places_keep_their_values(ranks: RankPool) -> None:
    assert ranks.run(exchanged, 2) == [[[3.0, 3.0], [6.0, 6.0], [9.0, 9.0]]] * 2


def one_large_parameter(rank: int) -> list[float | None]:
    """Its one bucket stays as it is when a second lane comes; rank 0 keeps a gradient, so its wire is a new one."""
    model = fastddp.DistributedDataParallel(Ones(4096, 4096))
    kept, seen = [], []
    for _ in range(4):
        model.zero_grad()
        model(torch.full((1, 4096), rank + 1.0)).sum().backward()
        seen += gradients(model)
        if rank == 0:
            kept.append(model.module.weight.grad)
    return seen


def test_ranks_cut_wires_alike_once_there_is_a_second_lane(ranks: RankPool) -> None:
    assert ranks.run(one_large_parameter, 2) == [[1.5] * 4] * 2


def in_other_groups_too(rank: int) -> list[float | None]:
    dist.new_group([0])  # of which rank 1 is no member
    return one_large_parameter(rank)


def test_ranks_in_different_numbers_of_groups_train_over_one_lane(ranks: RankPool) -> None:
    assert ranks.run(in_other_groups_too, 2) == [[1.5] * 4] * 2


# ----------------------------------------------------------------------------------------------------------- hooks


def collecting(rank: int) -> list[list[float | None]]:
    """A hook whose futures are all done when the last bucket has come."""
    waiting: list[tuple[torch.futures.Future, Tensor]] = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        waiting.append((future, bucket.buffer()))
        if bucket.is_last():
            for done, buffer in waiting:
                done.set_result(buffer)
            waiting.clear()
        return future

    model = fastddp.DistributedDataParallel(Pair(), bucket_cap_mb=1e-6)
    model.register_comm_hook(None, hook)
    steps = []
    for _ in range(3):
        model.zero_grad()
        model(at(rank)).sum().backward()
        steps.append(gradients(model))
    return steps


@pytest.mark.tier("nightly")  # the first time, patience has to end
def test_a_hook_may_collect_buckets_until_the_last_one(ranks: RankPool) -> None:
    assert ranks.run(collecting, 2) == [[[2.0 * (rank + 1)] * 2] * 3 for rank in range(2)]


def hooks_of_optimizers(rank: int) -> list[int]:
    model = fastddp.DistributedDataParallel(Pair())
    counts = []
    for _ in range(3):
        counts.append(len(_global_optimizer_pre_hooks))
        model._update_process_group(dist.group.WORLD)
    return counts


def test_another_process_group_leaves_one_hook_of_optimizers(ranks: RankPool) -> None:
    (counts,) = ranks.run(hooks_of_optimizers, 1)
    assert len(set(counts)) == 1


# ----------------------------------------------------------------------------------------------- their order


def in_another_order(rank: int, copied: bool) -> list[str]:
    """What backwards of two models of one size said, where rank 1 begins with the second one in the last step."""
    first, second = (fastddp.DistributedDataParallel(Ones()) for _ in range(2))
    if copied and rank == 0:  # an average of weights, say
        copy.deepcopy(first)
        fastddp.DistributedDataParallel(Ones(), init_sync=False)
    third = fastddp.DistributedDataParallel(Ones())
    said = []
    in_order = [first, second, third]
    for models in (in_order, in_order, [first, third, second] if rank == 1 else in_order):
        for model in models:
            model.zero_grad()
            try:
                model(at(rank)).sum().backward()
                said.append("")
            except RuntimeError as error:
                said.append(str(error))
    return said


@pytest.mark.parametrize("copied", [False, True], ids=["", "a rank has made models alone"])
def test_models_that_a_rank_runs_in_another_order_are_named(ranks: RankPool, copied: bool) -> None:
    for said in ranks.run(in_another_order, 3, copied):
        assert said[:7] == [""] * 7
        third = 4 if copied else 3
        assert f"step 3 of model 2 on rank 0, 2; step 3 of model {third} on rank 1" in said[7]
        assert f"step 3 of model 2 on rank 1; step 3 of model {third} on rank 0, 2" in said[8]


def goes_on_behind_another_order(rank: int) -> list[list[float | None]]:
    """The last two gradients of two models, of which ranks have run another one first, and none the other one then."""
    models = [fastddp.DistributedDataParallel(Ones()) for _ in range(2)]
    for _ in range(2):
        for model in models:
            model(at(rank)).sum().backward()
    with pytest.raises(RuntimeError, match="met that of another model"):
        models[rank](at(rank)).sum().backward()
    found = []
    for model in (*models, *models):
        model.zero_grad()
        model(at(rank)).sum().backward()
        found.append(gradients(model))
    return found


def test_a_loop_that_catches_the_error_of_another_order_goes_on(ranks: RankPool) -> None:
    assert ranks.run(goes_on_behind_another_order, 2, time_limit=20) == [[[1.5]] * 4] * 2


def told_later_of_another_order(rank: int) -> str:
    """What a rank says at the next forward of the model that met the other one."""
    models = [fastddp.DistributedDataParallel(Ones().to(fake_cuda.DEVICE)) for _ in range(2)]
    for model in (*models, *models, models[rank]):
        model(at(rank).to(fake_cuda.DEVICE)).sum().backward()
    fake_cuda.synchronize()
    with pytest.raises(RuntimeError) as failed:
        models[rank](at(rank).to(fake_cuda.DEVICE))
    return str(failed.value)


def test_on_a_device_each_rank_says_which_model_it_was_in(simulated_ranks: RankPool) -> None:
    for rank, said in enumerate(simulated_ranks.run(told_later_of_another_order, 2)):
        assert "met that of another model" in said
        assert f"it was that of model {rank + 1} here" in said


class InOrder(nn.Module):
    """Layers of one size, and the order in which they run; so their gradients come in different orders."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.layers, self.order = nn.ModuleList(Ones() for _ in order), order

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.order:
            x = self.layers[layer](x) * (layer + 1)
        return x


def in_another_order_when_buckets_are_rebuilt(rank: int) -> list[tuple[str, bool]]:
    """For each model in steps 2 and 3: its error, and whether gradients are the mean over ranks."""
    models = [fastddp.DistributedDataParallel(InOrder(order), bucket_cap_mb=1e-5) for order in ([0, 1], [1, 0])]
    found = []
    for step in range(3):
        for model in reversed(models) if (step, rank) == (1, 1) else models:
            model.zero_grad()
            try:
                (model(at(rank)).sum() * model.module.layers[0].weight[0, 0]).backward()
                error = ""
            except RuntimeError as failed:
                error = str(failed)
            inputs = torch.full((1, 2), 1.5)
            loss = model.module(inputs).sum() * model.module.layers[0].weight[0, 0]
            right = torch.autograd.grad(loss, [*model.parameters()])
            pairs = zip(model.parameters(), right, strict=True)
            found.append((error, all(p.grad is not None and torch.equal(p.grad, g) for p, g in pairs)))
    return found[2:]


def test_models_in_another_order_take_no_plan_from_each_other(ranks: RankPool) -> None:
    for found in ranks.run(in_another_order_when_buckets_are_rebuilt, 2):
        assert "model 1 on rank 0; model 2 on rank 1" in found[0][0]
        assert "model 1 on rank 1; model 2 on rank 0" in found[1][0]
        assert found[2:] == [("", True)] * 2
