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
from on_ranks import of_ranks, on_ranks

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


def calls_allreduce(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    assert bucket.buffer().dtype == torch.float32
    assert all(parameter.untyped_storage().nbytes() > 0 for parameter in bucket.parameters())
    return torchs_hooks.allreduce_hook(None, bucket)


@ATTRIBUTES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("hook", [None, calls_allreduce], ids=["", "a hook written for torch"])
@on_ranks(2)
def test_two_ranks_have_every_bit_of_the_sum_in_fp32(rank: int, attribute: str, dtype: torch.dtype, hook: Any) -> None:
    """In windows of 1, 2 and 8 microbatches. In other options: random programs and tests/contract."""
    model = wrapped(attribute, Net(dtype))
    if hook is not None:
        model.register_comm_hook(None, hook)
    for microbatches in (1, 2, 8):
        numbers = [100 * microbatches + number for number in range(microbatches)]
        window(model, rank, numbers)
        sums = expected(model.module, rank, numbers)
        torch.testing.assert_close(gradients(model, attribute), sums, rtol=0, atol=0)  # their dtypes too
        assert attribute == "grad" or all(parameter.grad is None for parameter in model.parameters())


@ATTRIBUTES
@on_ranks(2)
def test_without_communication_gradients_are_this_ranks_sum(rank: int, attribute: str) -> None:
    model = wrapped(attribute)
    model.register_comm_hook(None, comm_hooks.noop_hook)
    window(model, rank, [0, 1])
    own = [gradient.clone() for gradient in gradients(model, attribute)]
    assert not torch.equal(*(of_rank[0] for of_rank in of_ranks(own)))
    for gradient in own:
        dist.all_reduce(gradient)
    means = [gradient / 2 for gradient in own]
    torch.testing.assert_close(means, expected(model.module, rank, [0, 1]), rtol=1e-6, atol=1e-9)


def power_sgd(rank: int, attribute: str | None) -> Tensor:
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
    assert {error.dtype for error in state.errors.values()} == {torch.float32}
    return getattr(module.weight, attribute or "grad")


@ATTRIBUTES
@on_ranks(2)
def test_power_sgd_is_what_it_is_for_fp32_parameters(rank: int, attribute: str) -> None:
    assert torch.equal(power_sgd(rank, attribute), power_sgd(rank, None))


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


TAKE_FP32 = ("Adagrad", "Adadelta", "Adafactor", "ASGD", "RMSprop", "Rprop")
NEEDS_GRAD_DTYPE = pytest.mark.skipif(
    not hasattr(Tensor, "grad_dtype"), reason="this torch has no gradients of another dtype"
)


@NEEDS_GRAD_DTYPE
@on_ranks(1)
def test_an_optimizer_that_cannot_take_fp32_gradients_is_told_which_can(rank: int) -> None:
    model = wrapped()
    backward(model)
    parameters = [*model.parameters()]
    with_fp32_state = torch.optim.AdamW(parameters)
    for parameter in parameters:
        means = {name: torch.zeros(parameter.shape) for name in ("exp_avg", "exp_avg_sq")}
        with_fp32_state.state[parameter] = {"step": torch.zeros(()), **means}
    with pytest.raises(RuntimeError, match=r"AdamW cannot step with parameter first.weight, which is torch.bfloat16"):
        torch.optim.AdamW(parameters).step()
    with pytest.raises(RuntimeError, match="SGD with fused=True cannot step"):
        torch.optim.SGD(parameters, fused=True).step()
    for optimizer in (
        with_fp32_state,
        *(torch.optim.SGD(parameters, momentum=0.9, foreach=foreach) for foreach in (False, True)),
        *(getattr(torch.optim, kind)(parameters) for kind in TAKE_FP32),
    ):
        optimizer.step()


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
