"""The hooks of fastddp.comm_hooks, run natively, and the norm that unpack measures on its way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fastddp
from casts import CASTS, SMALL_BUCKETS, VIEWS, WIRES, error, gradients_of, train, under_torch
from fastddp import comm_hooks
from fastddp.comm_hooks import CompressState, PostLocalSGDState
from fastddp.exchange.descriptions import AllReduce, Noop, PythonHook
from models import MODELS, inputs
from ranks import RankPool

SUMS = pytest.mark.parametrize("accumulate", ["fp32", "wire"])


def cast_errors(rank: int, wire: torch.dtype, accumulate: str, view: bool, dtype: torch.dtype) -> tuple[float, float]:
    """Of our native hook and of torch's own, against fp64."""
    exact = train(rank, TorchDDP, None, None, dtype=torch.float64)
    state = CompressState(accumulate=accumulate)
    ours = train(rank, fastddp.DistributedDataParallel, state, CASTS[wire], dtype=dtype, gradient_as_bucket_view=view)
    theirs = train(rank, TorchDDP, None, under_torch(CASTS[wire]), dtype=dtype)
    return error(ours, exact), error(theirs, exact)


@pytest.mark.tier("slow", but_one_in=7)
@VIEWS
@SUMS
@WIRES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_casts_are_as_exact_as_torchs(
    ranks: RankPool, wire: torch.dtype, accumulate: str, view: bool, dtype: torch.dtype, world_size: int
) -> None:
    for ours, theirs in ranks.run(cast_errors, world_size, wire, accumulate, view, dtype):
        assert 0 < ours <= 2 * theirs


def rounding(rank: int, accumulate: str | None) -> list[float]:
    """256 + 1 + 1 + 1 over four ranks, another one having the 256 in each element: bf16 holds 256 and 258, not 257."""
    model = fastddp.DistributedDataParallel(nn.Linear(4, 1, bias=False))
    model.register_comm_hook(CompressState(accumulate=accumulate), comm_hooks.bf16_compress_hook)
    model(4 * (1 + 255 * torch.eye(4)[rank : rank + 1])).sum().backward()
    return model.module.weight.grad[0].tolist()


def test_sums_in_fp32_are_rounded_once(ranks: RankPool) -> None:
    once = [[260.0] * 4] * 4  # 259 is halfway, and rounds to even
    assert ranks.run(rounding, 4, "fp32") == once
    assert ranks.run(rounding, 4, None) == once  # what gloo gets unless told otherwise
    assert ranks.run(rounding, 4, "wire") != once


def overflowing(rank: int) -> float:
    """One rank's gradient does not fit in fp16, the mean does."""
    model = fastddp.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    model.register_comm_hook(None, comm_hooks.fp16_compress_hook)
    model(torch.full((1, 1), 100_000.0 if rank == 0 else 0.0)).sum().backward()
    return model.module.weight.grad.item()


def test_a_mean_that_fits_in_fp16_arrives_although_one_gradient_does_not(ranks: RankPool) -> None:
    assert ranks.run(overflowing, 2) == [pytest.approx(50_000, rel=1e-3)] * 2


def kept_gradients(rank: int, view: bool) -> tuple[bool, bool, int]:
    """Whether autograd's memory is still the gradient's, whether buckets have half the bytes, and their padding."""
    model = fastddp.DistributedDataParallel(nn.Linear(3, 3), gradient_as_bucket_view=view)
    model.register_comm_hook(None, comm_hooks.fp16_compress_hook)
    addresses = {}
    for name, parameter in model.module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: addresses.update({name: p.grad.data_ptr()}))
    model(torch.ones(1, 3)).sum().backward()
    stayed = all(p.grad.data_ptr() == addresses[name] for name, p in model.module.named_parameters())
    alone = all(p.grad.untyped_storage().nbytes() == p.grad.nbytes for p in model.parameters())
    return stayed, alone, sum(p.grad._is_view() for p in model.parameters())


@VIEWS
def test_with_a_cast_wire_gradients_stay_where_autograd_put_them(ranks: RankPool, view: bool) -> None:
    assert ranks.run(kept_gradients, 2, view) == [(True, True, 0)] * 2


def exchange_of(rank: int, state: object, hook: Callable[..., Any]) -> object:
    model = fastddp.DistributedDataParallel(nn.Linear(1, 1))
    model.register_comm_hook(state, hook)
    exchange = model._exchange
    return "python" if isinstance(exchange, PythonHook) else exchange


def users_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return default_hooks.allreduce_hook(None, bucket)


FP16, BF16 = torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("state", "hook", "exchange"),
    [
        (None, default_hooks.allreduce_hook, AllReduce()),
        (None, default_hooks.fp16_compress_hook, AllReduce(wire=FP16)),
        (None, comm_hooks.bf16_compress_hook, AllReduce(wire=BF16)),
        (CompressState(accumulate="fp32"), comm_hooks.bf16_compress_hook, AllReduce(wire=BF16, accumulate="fp32")),
        (None, debugging_hooks.noop_hook, Noop()),
        (None, comm_hooks.fp16_compress_wrapper(comm_hooks.allreduce_hook), AllReduce(wire=FP16)),
        (None, comm_hooks.fp16_compress_wrapper(comm_hooks.bf16_compress_hook), AllReduce(wire=BF16)),
        (None, comm_hooks.bf16_compress_wrapper(comm_hooks.noop_hook), "python"),
        (None, comm_hooks.bf16_compress_wrapper(users_hook), "python"),
        (None, users_hook, "python"),
    ],
)
def test_what_a_hook_stands_for(ranks: RankPool, state: object, hook: Callable[..., Any], exchange: object) -> None:
    assert ranks.run(exchange_of, 1, state, hook) == [exchange]


def as_under_torch(rank: int, wrapper: str, hook: Callable[..., Any]) -> bool:
    ours = train(rank, fastddp.DistributedDataParallel, None, getattr(comm_hooks, wrapper)(hook))
    theirs = train(rank, TorchDDP, None, under_torch(getattr(default_hooks, wrapper)(hook)))
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("wrapper", ["fp16_compress_wrapper", "bf16_compress_wrapper"])
@pytest.mark.parametrize("hook", [users_hook, comm_hooks.noop_hook])
def test_wrappers_around_other_hooks_are_torchs(ranks: RankPool, wrapper: str, hook: Callable[..., Any]) -> None:
    assert ranks.run(as_under_torch, 2, wrapper, hook) == [True, True]


def without_communication(rank: int) -> bool:
    ours = train(rank, fastddp.DistributedDataParallel, None, comm_hooks.noop_hook)
    theirs = train(rank, TorchDDP, None, comm_hooks.noop_hook)
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_the_noop_leaves_each_rank_its_own_gradients(ranks: RankPool) -> None:
    assert ranks.run(without_communication, 2) == [True, True]


def builtin(rank: int) -> bool:
    model = fastddp.DistributedDataParallel(nn.Linear(1, 1))
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return model._exchange == AllReduce(wire=FP16)


def test_torchs_builtin_hooks_are_these(ranks: RankPool) -> None:
    assert ranks.run(builtin, 1) == [True]


def wrong_state(rank: int) -> None:
    exchange_of(rank, "a string", comm_hooks.fp16_compress_hook)


def test_a_state_that_a_hook_does_not_take_is_named(ranks: RankPool) -> None:
    (error,) = ranks.errors(wrong_state, 1)
    assert "fp16_compress_hook is a process group, None or a CompressState, not a str" in error.message
    with pytest.raises(ValueError, match=r'"fp32", "wire" or None, got \'fp16\''):
        CompressState(accumulate="fp16")


def local_sgd(rank: int, allreduce: bool) -> list[float]:
    subgroups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    state = PostLocalSGDState(None, subgroups[rank // 2], 2, post_local_gradient_allreduce=allreduce)
    model = fastddp.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    model.register_comm_hook(state, comm_hooks.post_localSGD_hook)
    means = []
    for _ in range(4):
        model.zero_grad()
        model(torch.full((1, 1), float(rank))).sum().backward()
        means.append(model.module.weight.grad.item())
    assert state.iter == 2
    return means


def test_local_sgd_averages_over_all_ranks_first_and_over_the_subgroup_then(ranks: RankPool) -> None:
    assert ranks.run(local_sgd, 4, True) == [[1.5, 1.5, mean, mean] for mean in (0.5, 0.5, 2.5, 2.5)]
    assert ranks.run(local_sgd, 4, False) == [[1.5, 1.5, own, own] for own in (0.0, 1.0, 2.0, 3.0)]


class Parts(nn.Module):
    """Dense parameters and a table of words; a forward uses what it is told to, and every gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(1)) for _ in range(2))
        self.words = nn.Embedding(2, 1, sparse=True)

    def forward(self, x: float, used: str, word: int) -> Tensor:
        loss = x * self.words(torch.tensor([word])).sum()
        return sum(((getattr(self, name) * x).sum() for name in used), loss)


def parts_in_pairs(
    rank: int, uses: list[list[str]], first: int, options: dict[str, Any]
) -> list[tuple[list[float | None], list[float]]]:
    """Gradients of a and b, and of the words, of each step; rank r's own are r + 1, and it looks word r % 2 up."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = fastddp.DistributedDataParallel(Parts(), bucket_cap_mb=0, **options)
    model.register_comm_hook(PostLocalSGDState(None, pairs[rank // 2], first), comm_hooks.post_localSGD_hook)
    seen = []
    for used in uses:
        model.zero_grad()
        model(rank + 1.0, used[rank], rank % 2).backward()
        dense = [None if p.grad is None else p.grad.item() for p in (model.module.a, model.module.b)]
        seen.append((dense, model.module.words.weight.grad.to_dense().flatten().tolist()))
    assert len({str(plan) for plan in gathered(str(model.bucket_plan()))}) == 1
    return seen


def gathered(value: object) -> list[object]:
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@pytest.mark.parametrize("average", ["mean", "sum"])
def test_under_local_sgd_sparse_gradients_go_over_the_subgroup_too(ranks: RankPool, average: str) -> None:
    uses = [["ab"] * 4] * 3
    for rank, seen in enumerate(ranks.run(parts_in_pairs, 4, uses, 1, {"gradient_average": average})):
        # Words 0 and 1: rank r's gradient is r + 1, and the other one's row is zero.
        over_all = [4.0, 6.0] if average == "sum" else [1.0, 1.5]
        over_pair = {"mean": [[0.5, 1.0], [1.5, 2.0]], "sum": [[1.0, 2.0], [3.0, 4.0]]}[average][rank // 2]
        assert [words for _, words in seen] == [over_all, over_pair, over_pair]
        assert [dense for dense, _ in seen] == [[sum(over_all)] * 2, [sum(over_pair)] * 2, [sum(over_pair)] * 2]


def test_under_local_sgd_what_another_subgroup_uses_leaves_gradients_alone(ranks: RankPool) -> None:
    """b: rank 0 uses it in the third step, for the first time, and in the fourth."""
    uses = [["a"] * 4] * 2 + [["ab", "a", "a", "a"]] * 2 + [["a"] * 4]
    first, second, *others = ranks.run(parts_in_pairs, 4, uses, 1, {"find_unused_parameters": True})
    for seen in (first, second):
        assert [dense for dense, _ in seen] == [[2.5, None], [1.5, None], [1.5, 0.5], [1.5, 0.5], [1.5, None]]
    for seen in others:
        assert [dense for dense, _ in seen] == [[2.5, None]] + [[3.5, None]] * 4


def test_a_static_graphs_buckets_are_the_same_on_all_ranks_though_only_one_subgroup_uses_all(ranks: RankPool) -> None:
    """Rank 0 uses b, and its first step goes over a pair already. On the other pair b counts as used, with zeros."""
    uses = [["ab", "a", "a", "a"]] * 3
    first, second, *others = ranks.run(parts_in_pairs, 4, uses, 0, {"static_graph": True})
    for seen in (first, second):
        assert [dense for dense, _ in seen] == [[1.5, 0.5]] * 3
    for seen in others:
        assert [dense for dense, _ in seen] == [[3.5, 0.0]] * 3


def norms(rank: int, hook: Callable[..., Any] | None, hold: bool, options: dict[str, Any]) -> list[tuple[float, float]]:
    """fastddp's norm and torch's, in each step."""
    model = fastddp.DistributedDataParallel(MODELS["batch norm MLP"](), **SMALL_BUCKETS | options)
    if hook is not None:
        model.register_comm_hook(None, hook)
    held: list[Tensor] = []
    if hold:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: held.append(p.grad))
    results = []
    for step in range(3):
        model.zero_grad()
        model(inputs("batch norm MLP", rank, step)).square().sum().backward()
        expected = torch.nn.utils.get_total_norm(gradients_of(model))
        results.append((model.last_grad_norm().item(), expected.item()))
        assert model.found_inf().item() == 0
    return results


@VIEWS
@pytest.mark.parametrize("hold", [False, True], ids=["", "held"])
@pytest.mark.parametrize("hook", [None, comm_hooks.fp16_compress_hook, comm_hooks.noop_hook, users_hook])
def test_the_norm_is_torchs(ranks: RankPool, hook: Callable[..., Any] | None, view: bool, hold: bool) -> None:
    for results in ranks.run(norms, 2, hook, hold, {"gradient_as_bucket_view": view}):
        for ours, theirs in results:
            assert ours == pytest.approx(theirs, rel=1e-6)


def infinite(rank: int, hook: Callable[..., Any] | None, value: float) -> float:
    model = fastddp.DistributedDataParallel(nn.Linear(40, 1, bias=False))
    if hook is not None:
        model.register_comm_hook(None, hook)
    batch = torch.ones(1, 40)
    batch[0, 33] = value if rank == 0 else 1.0
    model(batch).sum().backward()
    return model.found_inf().item()


@pytest.mark.parametrize("hook", [None, comm_hooks.fp16_compress_hook, comm_hooks.bf16_compress_hook])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), -float("inf")])
def test_what_is_not_finite_is_found_on_all_ranks(
    ranks: RankPool, hook: Callable[..., Any] | None, value: float
) -> None:
    assert ranks.run(infinite, 2, hook, value) == [1.0, 1.0]


def test_what_does_not_fit_in_fp16_is_found(ranks: RankPool) -> None:
    assert ranks.run(infinite, 2, comm_hooks.fp16_compress_hook, 1e6) == [1.0, 1.0]
    assert ranks.run(infinite, 2, comm_hooks.bf16_compress_hook, 1e6) == [0.0, 0.0]


def norm_before_backward(rank: int) -> None:
    fastddp.DistributedDataParallel(nn.Linear(1, 1)).last_grad_norm()


def test_before_backward_there_is_no_norm(ranks: RankPool) -> None:
    (error,) = ranks.errors(norm_before_backward, 1)
    assert "between the backward that synchronises them and the next forward" in error.message


def clipped(rank: int, max_norm: float) -> tuple[float, float, float]:
    model = fastddp.DistributedDataParallel(nn.Linear(3, 1, bias=False))
    model(torch.tensor([[0.0, 3.0, 4.0]]) * (2 * rank)).sum().backward()
    norm = fastddp.clip_grad_norm_(model, max_norm)
    return norm.item(), *model.module.weight.grad[0, 1:].tolist()


def test_gradients_are_clipped_to_the_norm(ranks: RankPool) -> None:
    assert ranks.run(clipped, 2, 1.0) == [pytest.approx((5.0, 0.6, 0.8))] * 2
    assert ranks.run(clipped, 2, 9.0) == [(5.0, 3.0, 4.0)] * 2


def clip_infinite(rank: int) -> None:
    model = fastddp.DistributedDataParallel(nn.Linear(1, 1))
    model(torch.full((1, 1), float("nan"))).sum().backward()
    fastddp.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)


def test_a_norm_that_is_not_finite_is_an_error_where_asked_for(ranks: RankPool) -> None:
    (error,) = ranks.errors(clip_infinite, 1)
    assert "The norm of the gradients is nan" in error.message
