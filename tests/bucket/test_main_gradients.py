"""main_grads=: what microbatches and ranks add up, and who works with it."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torchs_hooks

import fastddp
from fastddp import comm_hooks
from on_ranks import on_ranks
from ranks import RankPool

ATTRIBUTES = pytest.mark.parametrize("attribute", ["grad", "main_grad"])


class Net(nn.Module):
    """Layers of 16 bits, and parameters of fp32 between them."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 24, dtype=dtype)
        self.scale = nn.Parameter(torch.ones(24))
        self.last = nn.Linear(24, 4, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.to(self.first.weight.dtype)).relu() * self.scale
        return self.last(hidden.to(self.last.weight.dtype)).float()


def wrapped(attribute: str = "grad", module: nn.Module | None = None, **options: Any) -> Any:
    options = {"bucket_cap_mb": 0.0005, "main_grads": attribute, **options}
    return fastddp.DistributedDataParallel(module or Net(), **options)


def backward(model: nn.Module, rank: int = 0, number: int = 0) -> None:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1000 * rank + number))
    model(x).square().mean().backward()


def gradients(model: fastddp.DistributedDataParallel, attribute: str) -> list[Tensor]:
    return [getattr(parameter, attribute) for parameter in model.module.parameters()]


def window(model: fastddp.DistributedDataParallel, rank: int, numbers: list[int]) -> None:
    """These microbatches, the last of which synchronises."""
    model.zero_grad()
    for number in numbers:
        with model.no_sync() if number != numbers[-1] else nullcontext():
            backward(model, rank, number)


def expected(module: nn.Module, rank: int, numbers: list[int]) -> list[Tensor]:
    """In plain torch: each microbatch's gradient as autograd makes it, then everything in fp32."""
    twin = copy.deepcopy(module)
    sums = [torch.zeros(parameter.shape) for parameter in twin.parameters()]
    for number in numbers:
        twin.zero_grad()
        backward(twin, rank, number)
        for total, parameter in zip(sums, twin.parameters(), strict=True):
            total.add_(parameter.grad.float())
    for total in sums:
        total.mul_(1 / dist.get_world_size())
        dist.all_reduce(total)
    return sums


# ------------------------------------------------------------------------------------------------------------- values


def assert_averages(
    rank: int, attribute: str, dtype: torch.dtype, microbatches: int, options: dict[str, Any], **tolerances: float
) -> None:
    """In three windows; buckets are rebuilt behind the first."""
    model = wrapped(attribute, Net(dtype), **options)
    factor = dist.get_world_size() if "gradient_average" in options else 1
    for number in range(3):
        numbers = [100 * number + microbatch for microbatch in range(microbatches)]
        window(model, rank, numbers)
        sums = [factor * mean for mean in expected(model.module, rank, numbers)]
        torch.testing.assert_close(gradients(model, attribute), sums, **tolerances)  # their dtypes too
        assert attribute == "grad" or all(parameter.grad is None for parameter in model.parameters())


TWO: list[Any] = [  # dtype, microbatches, options
    *((dtype, number, {}) for dtype in (torch.bfloat16, torch.float16) for number in (1, 2, 8)),
    (torch.bfloat16, 2, {"find_unused_parameters": True}),
    (torch.bfloat16, 2, {"static_graph": True}),
    (torch.bfloat16, 2, {"bucket_cap_mb": None, "bucket_cap_mb_list": [0.0001, 0.001]}),
    (torch.bfloat16, 2, {"gradient_average": "sum"}),
    (torch.bfloat16, 2, {"watch": fastddp.Watch(corruption="raise")}),
    (torch.bfloat16, 2, {"watch": fastddp.Watch(audit_every=2)}),
]
VIEW = (torch.bfloat16, 2, {"gradient_as_bucket_view": True})


@pytest.mark.parametrize(
    ("attribute", "dtype", "microbatches", "options"),
    [("grad", *VIEW), *((attribute, *row) for attribute in ("grad", "main_grad") for row in TWO)],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else str(value),
)
@on_ranks(2)
def test_two_ranks_have_every_bit_of_the_sum_in_fp32(
    rank: int, attribute: str, dtype: torch.dtype, microbatches: int, options: dict[str, Any]
) -> None:
    assert_averages(rank, attribute, dtype, microbatches, options, rtol=0, atol=0)


@ATTRIBUTES
@on_ranks(3)
def test_three_ranks_have_the_sum_to_the_rounding_of_fp32(rank: int, attribute: str) -> None:
    assert_averages(rank, attribute, torch.bfloat16, 3, {}, rtol=1e-6, atol=1e-9)


def calls_allreduce(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    assert bucket.buffer().dtype == torch.float32
    assert all(parameter.untyped_storage().nbytes() > 0 for parameter in bucket.parameters())
    return torchs_hooks.allreduce_hook(None, bucket)


def hooked(rank: int, attribute: str, hook: Any) -> tuple[list[Tensor], list[Tensor]]:
    model = wrapped(attribute)
    model.register_comm_hook(None, hook)
    for number in range(3):
        window(model, rank, [10 * number, 10 * number + 1])
    return gradients(model, attribute), expected(model.module, rank, [20, 21])


@ATTRIBUTES
def test_a_hook_written_for_torch_gets_fp32_and_the_parameters(ranks: RankPool, attribute: str) -> None:
    for actual, reference in ranks.run(hooked, 2, attribute, calls_allreduce):
        assert all(map(torch.equal, actual, reference))


@ATTRIBUTES
def test_without_communication_gradients_are_this_ranks_sum(ranks: RankPool, attribute: str) -> None:
    (one, reference), (other, _) = ranks.run(hooked, 2, attribute, comm_hooks.noop_hook)
    torch.testing.assert_close([(a + b) / 2 for a, b in zip(one, other, strict=True)], reference, rtol=1e-6, atol=1e-9)
    assert not torch.equal(one[0], other[0])


def power_sgd(rank: int, attribute: str | None) -> tuple[Tensor, set[torch.dtype]]:
    """Of bf16 parameters, or (None) of the same values in fp32, with the gradients that bf16 parameters have."""
    module = nn.Linear(64, 48, bias=False, dtype=torch.bfloat16 if attribute else torch.float32)
    nn.init.ones_(module.weight)
    model = wrapped(attribute, module) if attribute else fastddp.DistributedDataParallel(module)
    state = comm_hooks.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, comm_hooks.powerSGD_hook)
    for number in range(4):
        model.zero_grad()
        x = torch.randn(48, 64, generator=torch.Generator().manual_seed(10 * rank + number)).bfloat16()
        (model(torch.eye(64, dtype=module.weight.dtype)).t() * x).sum().backward()  # the gradient is x
    return getattr(module.weight, attribute or "grad"), {error.dtype for error in state.errors.values()}


@ATTRIBUTES
def test_power_sgd_is_what_it_is_for_fp32_parameters(ranks: RankPool, attribute: str) -> None:
    (reference, _), _ = ranks.run(power_sgd, 2, None)
    for actual, errors in ranks.run(power_sgd, 2, attribute):
        assert errors == {torch.float32}
        assert torch.equal(actual, reference)


@ATTRIBUTES
@on_ranks(2)
def test_norm_and_clipping_are_those_of_the_fp32_gradients(rank: int, attribute: str) -> None:
    model = wrapped(attribute)
    window(model, rank, [0, 1])
    norm = torch.nn.utils.get_total_norm(gradients(model, attribute))
    assert model.found_inf().item() == 0
    torch.testing.assert_close(model.last_grad_norm(), norm)
    torch.testing.assert_close(fastddp.clip_grad_norm_(model, 0.01), norm)
    assert torch.nn.utils.get_total_norm(gradients(model, attribute)).item() == pytest.approx(0.01, rel=1e-3)


# ------------------------------------------------------------------------------------------- optimizers, refusals


def steps_of_optimizers(rank: int) -> dict[str, str]:
    """What those say that step with fp32 gradients of bf16 parameters; empty: nothing."""
    model = wrapped()
    backward(model)
    parameters = [*model.parameters()]
    with_fp32_state = torch.optim.AdamW(parameters)
    for parameter in parameters:
        means = {name: torch.zeros(parameter.shape) for name in ("exp_avg", "exp_avg_sq")}
        with_fp32_state.state[parameter] = {"step": torch.zeros(()), **means}
    said = {}
    for name, optimizer in {
        "AdamW": torch.optim.AdamW(parameters),
        "SGD, fused": torch.optim.SGD(parameters, fused=True),
        "AdamW, fp32 state": with_fp32_state,
        "SGD, each": torch.optim.SGD(parameters, momentum=0.9, foreach=False),
        "SGD, foreach": torch.optim.SGD(parameters, momentum=0.9, foreach=True),
        **{kind: getattr(torch.optim, kind)(parameters) for kind in TAKE_FP32},
    }.items():
        try:
            optimizer.step()
            said[name] = ""
        except RuntimeError as error:
            said[name] = str(error)
    return said


TAKE_FP32 = ("Adagrad", "Adadelta", "Adafactor", "ASGD", "RMSprop", "Rprop")
NEEDS_GRAD_DTYPE = pytest.mark.skipif(
    not hasattr(Tensor, "grad_dtype"), reason="this torch has no gradients of another dtype"
)


@NEEDS_GRAD_DTYPE
def test_an_optimizer_that_cannot_take_fp32_gradients_is_told_which_can(ranks: RankPool) -> None:
    (said,) = ranks.run(steps_of_optimizers, 1)
    assert "AdamW cannot step with parameter first.weight, which is torch.bfloat16" in said.pop("AdamW")
    assert "SGD with fused=True cannot step" in said.pop("SGD, fused")
    assert set(said.values()) == {""}


@on_ranks(1)
def test_what_cannot_be_is_refused(rank: int) -> None:
    wide: dict[str, Any] = {"main_grads": "grad"}
    apart = {"main_grads": "main_grad"}
    sparse = nn.Embedding(4, 2, sparse=True, dtype=torch.bfloat16)
    mixed = torch.nn.parallel.distributed._MixedPrecision(torch.bfloat16)
    for module, options, text in [
        (Net(), {"main_grads": "grads"}, 'main_grads must be "grad", "main_grad" or None'),
        (Net(), {**apart, "gradient_as_bucket_view": True}, "gradient_as_bucket_view speaks"),
        (Net(), {**wide, "mixed_precision": mixed}, "leave out main_grads, and wrap the module with fp32"),
        (sparse, wide, "The gradients of parameter weight are sparse"),
        (sparse, apart, "The gradients of parameter weight are sparse"),
    ]:
        with pytest.raises(ValueError, match=text):
            fastddp.DistributedDataParallel(module, **options)
    module = Net()
    backward(module)
    with pytest.raises(RuntimeError, match=r"Parameter first.weight has a gradient in torch.bfloat16.*zero_grad"):
        fastddp.DistributedDataParallel(module, **wide)
    assert module.first.weight.grad_dtype == torch.bfloat16  # as it was


@NEEDS_GRAD_DTYPE
@on_ranks(2)
def test_a_wrapper_without_main_grads_has_gradients_of_the_parameters_dtype_again(rank: int) -> None:
    module = Net()
    model = wrapped(module=module)
    backward(model)
    del model
    with pytest.raises(RuntimeError, match=r"Parameter first.weight has a gradient in torch.float32.*zero_grad"):
        fastddp.DistributedDataParallel(module)
    module.zero_grad()
    model = fastddp.DistributedDataParallel(module)
    backward(model)
    assert module.first.weight.grad_dtype == module.first.weight.grad.dtype == torch.bfloat16


class WithoutGradDtype:
    """What config.py asks of torch, under 2.11."""

    Tensor, float32, __version__ = object, torch.float32, "2.11.0"


@on_ranks(1)
def test_a_torch_without_grad_dtype_has_main_grad(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastddp.config.torch", WithoutGradDtype)
        with pytest.raises(ValueError, match=r'2.11.0, does not have.*or main_grads="main_grad"'):
            wrapped()
        model = wrapped("main_grad")
        backward(model)
    assert all(gradient.any() for gradient in gradients(model, "main_grad"))
