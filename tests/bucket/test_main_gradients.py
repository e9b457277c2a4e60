"""main_grads=: what microbatches and ranks add up, who works with it, and windows that are not like the others."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torchs_hooks
from torch.distributed.optim import _apply_optimizer_in_backward

import fastddp
import parts
from fastddp import comm_hooks
from on_ranks import on_ranks
from parts import Parts
from ranks import RankPool

ATTRIBUTES = pytest.mark.parametrize("attribute", ["grad", "main_grad"])


def wrapped(attribute: str = "grad", module: Any = None, **options: Any) -> fastddp.DistributedDataParallel:
    return parts.wrapped(module or Parts(dtype=torch.bfloat16), **{"main_grads": attribute, **options})


def constant(value: float, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full((3,), value, dtype=dtype)


def gradients(model: nn.Module, attribute: str) -> list[float | None]:
    assert {getattr(parameter, attribute).dtype for parameter in model.parameters()} == {torch.float32}
    return parts.gradients(model, attribute)


def two_microbatches(model: Any, first: float, second: float, call: Any = None) -> None:
    """bf16 has no 257, and rounds it to 256; fp16 has no 2049."""
    call, dtype = model if call is None else call, next(model.parameters()).dtype
    with model.no_sync():
        call(constant(first, dtype)).backward()
    call(constant(second, dtype)).backward()


def calls_allreduce(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    assert bucket.buffer().dtype == torch.float32
    assert all(parameter.untyped_storage().nbytes() > 0 for parameter in bucket.parameters())
    return torchs_hooks.allreduce_hook(None, bucket)


class AddsToMainGrad(torch.autograd.Function):
    """As Megatron's layers: adds to ``main_grad``, and says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, says_so: bool) -> Tensor:
        ctx.weight, ctx.says_so = weight, says_so
        return x * weight

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        ctx.weight.main_grad.add_(1.0)
        if ctx.says_so:
            ctx.weight.grad_added_to_main_grad = True
        without_meaning = torch.full_like(ctx.weight, 0.0 if hasattr(ctx.weight, "zero_out_wgrad") else 7.0)
        return None, without_meaning if ctx.says_so else None, None


class Fused(nn.Module):
    """A layer with that protocol, and one without it that may share its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, says_so: bool = True, ties: bool = False) -> Tensor:
        fused = AddsToMainGrad.apply(x, self.weight, says_so).sum()
        return fused + (2 * self.weight).sum() if ties else fused


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"main_grads": "grad"}], ids=str)
@pytest.mark.parametrize("says_so", [True, False])
@on_ranks(2)
def test_a_layer_that_adds_to_a_main_grad_which_is_not_averaged_is_named(
    rank: int, options: dict[str, Any], says_so: bool
) -> None:
    model = fastddp.DistributedDataParallel(Fused(), **options)
    model.module.weight.main_grad = torch.zeros(3)
    with pytest.raises(RuntimeError, match=r"added the gradient of parameter weight to its main_grad(.|\n)*FD049"):
        model(torch.ones(3), says_so).backward()


@on_ranks(2)
def test_the_flag_of_a_layer_is_reset_by_zero_grad_and_zeros_keep_what_others_have_added(rank: int) -> None:
    model = fastddp.DistributedDataParallel(Fused(), main_grads="main_grad")
    weight = model.module.weight
    assert weight.grad_added_to_main_grad is False
    model(torch.ones(3)).backward()
    assert (weight.main_grad.tolist(), weight.grad, weight.grad_added_to_main_grad) == ([1.0] * 3, None, True)
    model.zero_grad()
    assert weight.grad_added_to_main_grad is False
    weight.zero_out_wgrad = True
    model(torch.ones(3), ties=True).backward()
    assert (weight.main_grad.tolist(), weight.grad) == ([3.0] * 3, None)


@ATTRIBUTES
@pytest.mark.parametrize(("dtype", "large"), [(torch.bfloat16, 256.0), (torch.float16, 2048.0)], ids=str)
@pytest.mark.parametrize("hook", [None, calls_allreduce], ids=["", "a hook written for torch"])
@on_ranks(2)
def test_microbatches_and_ranks_add_up_in_fp32(
    rank: int, attribute: str, dtype: torch.dtype, large: float, hook: Any
) -> None:
    """In other options, and under compression: random programs and tests/contract."""
    model = wrapped(attribute, Parts(dtype=dtype))
    if hook is not None:
        model.register_comm_hook(None, hook)
    for _ in range(3):
        model.zero_grad()
        two_microbatches(model, large, 0.5 + rank)
        assert gradients(model, attribute) == [large + 1] * 3
        assert attribute == "grad" or all(parameter.grad is None for parameter in model.parameters())


@ATTRIBUTES
@on_ranks(2)
def test_norm_and_clipping_are_those_of_the_fp32_gradients_also_without_communication(
    rank: int, attribute: str
) -> None:
    for hook in (comm_hooks.allreduce_hook, comm_hooks.noop_hook):
        model = wrapped(attribute)
        model.register_comm_hook(None, hook)
        two_microbatches(model, 256.0, 1.0 + 2 * rank)
        sums = 258.0 if hook is comm_hooks.allreduce_hook else 257.0 + 2 * rank
        assert gradients(model, attribute) == [sums] * 3
        assert model.last_grad_norm().item() == fastddp.clip_grad_norm_(model, 3.0).item() == 3 * sums
        assert gradients(model, attribute) == pytest.approx([1.0] * 3)


@on_ranks(2)
def test_main_grad_stays_the_tensor_that_it_is_and_adds_up_until_zero_grad(rank: int) -> None:
    model = wrapped("main_grad", bucket_cap_mb=25, find_unused_parameters=True)
    parameters: list[Any] = [*model.parameters()]
    first = [parameter.main_grad for parameter in parameters]
    for step in range(3):  # buckets are rebuilt, placeholders travel
        assert gradients(model, "main_grad") == [0.0] * 3
        for _ in range(2):
            model(constant(1.0), "ab" if step == rank else "abc").backward()
        assert gradients(model, "main_grad") == [2.0, 2.0, 1.0 if step < 2 else 2.0]
        model.zero_grad()
        assert all(p.main_grad is gradient for p, gradient in zip(parameters, first, strict=True))


@on_ranks(2)
def test_a_gradient_that_somebody_keeps_is_not_overwritten_by_the_next_microbatches(rank: int) -> None:
    model = wrapped("grad", bucket_cap_mb=25)
    kept = []
    for window in range(4):
        model.zero_grad()
        two_microbatches(model, 2.0 * window, rank)
        assert gradients(model, "grad") == [2 * window + 0.5] * 3
        kept.append(model.module.a.grad)
    assert [gradient[0].item() for gradient in kept] == [0.5, 2.5, 4.5, 6.5]


@ATTRIBUTES
@on_ranks(2)
def test_who_brought_infinity_is_named(rank: int, attribute: str) -> None:
    model = wrapped(attribute, watch=fastddp.Watch(corruption=lambda corruption: None))
    with model.no_sync():
        model(constant(float("inf") if rank == 1 else 1.0), "b").backward()
    model(constant(1.0)).backward()
    found = model.blame_non_finite()
    assert model.found_inf().item() == 1
    assert (found.rank, found.parameter, found.count) == (1, "b", 3)


# ------------------------------------------------------------------------------------------- plans, copies, compilation


@ATTRIBUTES
@pytest.mark.filterwarnings("ignore")
@on_ranks(2)
def test_plans_count_the_bytes_of_fp32_gradients(rank: int, attribute: str) -> None:
    model = wrapped(attribute, bucket_cap_mb="auto")
    for window in range(9):
        model.zero_grad()
        two_microbatches(model, 256.0, 1.0 + window)
        assert gradients(model, attribute) == [257.0 + window] * 3
    plan = model.bucket_plan()
    assert sum(bucket.bytes for bucket in plan.buckets) == 3 * 3 * 4
    assert {str(parameter.dtype) for bucket in plan.buckets for parameter in bucket.parameters} == {"torch.float32"}
    pinned = wrapped(attribute, bucket_cap_mb=None, buckets=plan)
    pinned(constant(1.0)).backward()


@on_ranks(1)
def test_parameters_of_16_and_of_32_bits_share_a_bucket(rank: int) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16))
    assert len(wrapped("grad", module, bucket_cap_mb=25).bucket_plan().buckets) == 1


@ATTRIBUTES
@on_ranks(2)
def test_copies_pickles_and_what_is_compiled_have_fp32_gradients_of_their_own(rank: int, attribute: str) -> None:
    model = wrapped(attribute)
    model(constant(3.0)).backward()
    copied = copy.deepcopy(model)
    pickled = pickle.loads(pickle.dumps(model))
    for other, call in ((copied, copied), (pickled, torch.compile(pickled, backend="aot_eager"))):
        two_microbatches(other, 256.0, 1.0, call)
        assert gradients(other, attribute) == [257.0] * 3
    assert gradients(model, attribute) == [3.0] * 3


# ------------------------------------------------------------------------------ what finds gradients in .grad by itself


def two_wrappers(rank: int, attribute: str) -> list[float | None]:
    inner = wrapped(attribute)
    outer = wrapped(attribute, nn.ModuleDict({"inner": inner}))
    outer.module.forward = lambda x: inner(x)  # type: ignore[method-assign]
    two_microbatches(outer, 256.0, 1.0 + 2 * rank)
    return gradients(inner, attribute)


def optimizers_in_backward(rank: int, attribute: str) -> list[float]:
    module = Parts(dtype=torch.bfloat16)
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 1.0})
    model = wrapped(attribute, module)
    model(constant(1.0 + rank)).backward()
    return module.a.tolist()


@pytest.mark.parametrize(
    ("function", "in_grad"),
    [
        (two_wrappers, [258.0] * 3),  # the inner one averages 256, too: its forward is not under no_sync
        (optimizers_in_backward, [-0.5] * 3),
    ],
)
def test_what_needs_fp32_gradients_in_grad_is_refused_where_they_are_not(
    ranks: RankPool, function: Callable[..., Any], in_grad: list[float]
) -> None:
    assert ranks.run(function, 2, "grad") == [in_grad] * 2
    for error in ranks.errors(function, 2, "main_grad"):
        assert 'main_grads="main_grad"' in error.message


@on_ranks(1)
def test_a_gradient_that_a_hook_took_away_is_an_error(rank: int) -> None:
    model = wrapped("main_grad")
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    loss = model(constant(1.0))
    with pytest.raises(RuntimeError, match=r"parameter c \(number 2, bucket 0\) got a gradient that is not in"):
        loss.backward()


# -------------------------------------------------------------------------------------- optimizers, and what is refused

TAKE_FP32 = ("Adagrad", "Adadelta", "Adafactor", "ASGD", "RMSprop", "Rprop")
NEEDS_GRAD_DTYPE = pytest.mark.skipif(
    not hasattr(Tensor, "grad_dtype"), reason="this torch has no gradients of another dtype"
)


@NEEDS_GRAD_DTYPE
@on_ranks(1)
def test_an_optimizer_that_cannot_take_fp32_gradients_is_told_which_can(rank: int) -> None:
    model = wrapped()
    model(constant(1.0)).backward()
    parameters = [*model.parameters()]
    with_fp32_state = torch.optim.AdamW(parameters)
    for parameter in parameters:
        means = {name: torch.zeros(parameter.shape) for name in ("exp_avg", "exp_avg_sq")}
        with_fp32_state.state[parameter] = {"step": torch.zeros(()), **means}
    with pytest.raises(RuntimeError, match=r"AdamW cannot step with parameter a, which is torch.bfloat16"):
        torch.optim.AdamW(parameters).step()
    with pytest.raises(RuntimeError, match="SGD with fused=True cannot step"):
        torch.optim.SGD(parameters, fused=True).step()
    by_sgd = [torch.optim.SGD(parameters, momentum=0.9, foreach=foreach) for foreach in (False, True)]
    for optimizer in (with_fp32_state, *by_sgd, *(getattr(torch.optim, kind)(parameters) for kind in TAKE_FP32)):
        optimizer.step()


@NEEDS_GRAD_DTYPE
@on_ranks(2)
def test_a_sharded_optimizer_may_be_fused_because_it_steps_fp32_copies(rank: int) -> None:
    model = wrapped()
    optimizer = fastddp.ShardedOptimizer(model, torch.optim.SGD, lr=1.0, fused=True)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model(constant(2.0)).backward()
    optimizer.step()
    assert not any(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


@on_ranks(1)
def test_what_cannot_be_is_refused(rank: int) -> None:
    wide, apart = {"main_grads": "grad"}, {"main_grads": "main_grad"}
    sparse = nn.Embedding(4, 2, sparse=True, dtype=torch.bfloat16)
    mixed = torch.nn.parallel.distributed._MixedPrecision(torch.bfloat16)
    module = Parts(dtype=torch.bfloat16)
    for other, options, text in [
        (module, {"main_grads": "grads"}, 'main_grads must be "grad", "main_grad" or None'),
        (module, {**apart, "gradient_as_bucket_view": True}, "gradient_as_bucket_view speaks"),
        (module, {**wide, "mixed_precision": mixed}, "leave out main_grads, and wrap the module with fp32"),
        (sparse, wide, "The gradients of parameter weight are sparse"),
        (sparse, apart, "The gradients of parameter weight are sparse"),
    ]:
        with pytest.raises(ValueError, match=text):
            fastddp.DistributedDataParallel(other, **options)
    module(constant(1.0)).backward()
    with pytest.raises(RuntimeError, match=r"Parameter a has a gradient in torch.bfloat16.*zero_grad"):
        fastddp.DistributedDataParallel(module, **wide)
    assert module.a.grad_dtype == torch.bfloat16  # as it was


@NEEDS_GRAD_DTYPE
@on_ranks(2)
def test_a_wrapper_without_main_grads_has_gradients_of_the_parameters_dtype_again(rank: int) -> None:
    module = Parts(dtype=torch.bfloat16)
    model = wrapped(module=module)
    model(constant(1.0)).backward()
    del model
    with pytest.raises(RuntimeError, match=r"Parameter a has a gradient in torch.float32.*zero_grad"):
        fastddp.DistributedDataParallel(module)
    module.zero_grad()
    model = fastddp.DistributedDataParallel(module)
    model(constant(1.0)).backward()
    assert module.a.grad_dtype == module.a.grad.dtype == torch.bfloat16


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
        model(constant(1.0)).backward()
    assert gradients(model, "main_grad") == [1.0] * 3
