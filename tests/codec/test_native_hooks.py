"""The hooks of fastddp.comm_hooks, run natively, and the norm that unpack measures on its way."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fastddp
from casts import CASTS, SMALL_BUCKETS, VIEWS, error, gradients_of, train, under_torch
from fastddp import comm_hooks
from fastddp.comm_hooks import CompressState, PostLocalSGDState
from fastddp.exchange import placement
from fastddp.exchange.descriptions import AllReduce, Noop, PythonHook
from models import MODELS, inputs
from ranks import RankPool

Nodes = tuple[int, ...]  # the machine of each rank

FP16, BF16 = torch.float16, torch.bfloat16
PAIRS, MIXED, UNEQUAL = (0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1)
WAYS: list[dict[str, Any]] = [{}, {"gradient_as_bucket_view": True}]


def on_machines(rank: int, nodes: Nodes) -> Any:
    return mock.patch.object(placement, "_this_machine", return_value=nodes[rank].to_bytes(8))


def cast_errors(
    rank: int, nodes: Nodes, wire: torch.dtype, accumulate: str | None, dtype: torch.dtype, options: dict[str, Any]
) -> tuple[float, float]:
    """Of our native hook and of torch's own, against fp64."""
    exact = train(rank, TorchDDP, None, None, dtype=torch.float64)
    with on_machines(rank, nodes):
        state, make = CompressState(accumulate=accumulate), fastddp.DistributedDataParallel
        ours = train(rank, make, state, CASTS[wire], dtype=dtype, **options)
    theirs = train(rank, TorchDDP, None, under_torch(CASTS[wire]), dtype=dtype)
    return error(ours, exact), error(theirs, exact)


@pytest.mark.tier("slow", but_one_in=7)
@pytest.mark.parametrize(
    ("nodes", "wire", "accumulate", "dtype", "options"),
    [
        *itertools.product([(0, 0), (0, 0, 0)], CASTS, ["fp32", "wire"], [torch.float32, torch.float64], WAYS),
        *itertools.product([PAIRS, MIXED, UNEQUAL], CASTS, [None], [torch.float32], WAYS),
        *itertools.product([PAIRS], CASTS, [None], [torch.float32], [{"hierarchy": "node"}]),
    ],
    ids=str,
)
def test_casts_are_as_exact_as_torchs(
    ranks: RankPool,
    nodes: Nodes,
    wire: torch.dtype,
    accumulate: str | None,
    dtype: torch.dtype,
    options: dict[str, Any],
) -> None:
    for ours, theirs in ranks.run(cast_errors, len(nodes), nodes, wire, accumulate, dtype, options):
        assert 0 < ours <= 2 * theirs


def rounding(rank: int, accumulate: str | None, nodes: Nodes) -> list[float]:
    """256 + 1 + 1 + 1 over four ranks, another one having the 256 in each element: bf16 holds 256 and 258, not 257."""
    with on_machines(rank, nodes):
        model = fastddp.DistributedDataParallel(nn.Linear(4, 1, bias=False))
        model.register_comm_hook(CompressState(accumulate=accumulate), comm_hooks.bf16_compress_hook)
        model(4 * (1 + 255 * torch.eye(4)[rank : rank + 1])).sum().backward()
    return model.module.weight.grad[0].tolist()


def test_sums_in_fp32_are_rounded_once_a_level(ranks: RankPool) -> None:
    once = [[260.0] * 4] * 4  # 259 is halfway, and rounds to even
    assert ranks.run(rounding, 4, "fp32", (0, 0, 0, 0)) == once
    assert ranks.run(rounding, 4, None, (0, 0, 0, 0)) == once  # what gloo gets unless told otherwise
    assert ranks.run(rounding, 4, "wire", (0, 0, 0, 0)) != once
    # 257 is halfway, and rounds to 256 in its node; the other node has 2.
    assert ranks.run(rounding, 4, None, PAIRS) == [[258.0] * 4] * 4


def kept_gradients(rank: int, view: bool) -> tuple[bool, bool, int]:
    """Whether autograd's memory is still the gradient's and holds nothing else; how many are views."""
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


def exchange_of(rank: int, state: object, hook: Any) -> object:
    model = fastddp.DistributedDataParallel(nn.Linear(1, 1))
    if callable(hook):
        model.register_comm_hook(state, hook)
    else:
        model._register_builtin_comm_hook(hook)
    exchange = model.engine.now.exchange
    return "python" if isinstance(exchange, PythonHook) else exchange


def users_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return default_hooks.allreduce_hook(None, bucket)


@pytest.mark.parametrize(
    ("state", "hook", "exchange"),
    [
        (None, default_hooks.allreduce_hook, AllReduce()),
        (None, default_hooks.fp16_compress_hook, AllReduce(wire=FP16)),
        (None, dist.BuiltinCommHookType.FP16_COMPRESS, AllReduce(wire=FP16)),
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
def test_what_a_hook_stands_for(ranks: RankPool, state: object, hook: Any, exchange: object) -> None:
    assert ranks.run(exchange_of, 1, state, hook) == [exchange]


def test_a_state_that_a_hook_does_not_take_is_named(ranks: RankPool) -> None:
    (refused,) = ranks.errors(exchange_of, 1, "a string", comm_hooks.fp16_compress_hook)
    assert "fp16_compress_hook is a process group, None or a CompressState, not a str" in refused.message
    with pytest.raises(ValueError, match=r'"fp32", "wire" or None, got \'fp16\''):
        CompressState(accumulate="fp16")


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
    state = PostLocalSGDState(None, pairs[rank // 2], first)
    model.register_comm_hook(state, comm_hooks.post_localSGD_hook)
    seen = []
    for used in uses:
        model.zero_grad()
        model(rank + 1.0, used[rank], rank % 2).backward()
        dense = [None if p.grad is None else p.grad.item() for p in (model.module.a, model.module.b)]
        seen.append((dense, model.module.words.weight.grad.to_dense().flatten().tolist()))
    assert state.iter == first
    plans: list[Any] = [None] * 4
    dist.all_gather_object(plans, str(model.bucket_plan()))
    assert len(set(plans)) == 1
    return seen


@pytest.mark.parametrize("average", ["mean", "sum"])
def test_local_sgd_averages_over_all_ranks_first_and_over_the_subgroup_then(ranks: RankPool, average: str) -> None:
    uses = [["ab"] * 4] * 3
    for rank, seen in enumerate(ranks.run(parts_in_pairs, 4, uses, 1, {"gradient_average": average})):
        # Words 0 and 1: rank r's gradient is r + 1, and the other one's row is zero.
        over_all = [4.0, 6.0] if average == "sum" else [1.0, 1.5]
        then = {"mean": [[0.5, 1.0], [1.5, 2.0]], "sum": [[1.0, 2.0], [3.0, 4.0]]}[average][rank // 2]
        assert seen == [([sum(words)] * 2, words) for words in (over_all, then, then)]


@pytest.mark.parametrize(
    ("uses", "all_ranks_first", "options", "of_first_pair", "of_second_pair"),
    [
        # Rank 0 uses b in the third step, for the first time, and in the fourth.
        (
            [*["a"] * 2, *["ab"] * 2, "a"],
            1,
            {"find_unused_parameters": True},
            [[2.5, None], [1.5, None], [1.5, 0.5], [1.5, 0.5], [1.5, None]],
            [[2.5, None]] + [[3.5, None]] * 4,
        ),
        # Rank 0 uses b, and its first step goes over a pair already. On the other pair b counts as used, with zeros.
        (["ab"] * 3, 0, {"static_graph": True}, [[1.5, 0.5]] * 3, [[3.5, 0.0]] * 3),
    ],
    ids=["unused", "static graph"],
)
def test_under_local_sgd_what_another_subgroup_uses_leaves_gradients_alone_and_buckets_alike(
    ranks: RankPool,
    uses: list[str],
    all_ranks_first: int,
    options: dict[str, Any],
    of_first_pair: list[Any],
    of_second_pair: list[Any],
) -> None:
    of_ranks = ranks.run(parts_in_pairs, 4, [[used, "a", "a", "a"] for used in uses], all_ranks_first, options)
    for rank, seen in enumerate(of_ranks):
        assert [dense for dense, _ in seen] == (of_first_pair if rank < 2 else of_second_pair)


def norms(rank: int, hook: Callable[..., Any] | None, hold: bool, view: bool) -> list[tuple[float, float]]:
    """fastddp's norm and torch's, in each step."""
    model = fastddp.DistributedDataParallel(MODELS["batch norm MLP"](), gradient_as_bucket_view=view, **SMALL_BUCKETS)
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
    for results in ranks.run(norms, 2, hook, hold, view):
        for ours, theirs in results:
            assert ours == pytest.approx(theirs, rel=1e-6)


def infinite(rank: int, hook: Callable[..., Any] | None, value: float) -> tuple[float, float]:
    """What is found, and the average of this value on rank 0 and of 0 on rank 1."""
    model = fastddp.DistributedDataParallel(nn.Linear(40, 1, bias=False))
    if hook is not None:
        model.register_comm_hook(None, hook)
    batch = torch.ones(1, 40)
    batch[0, 33] = value if rank == 0 else 0.0
    model(batch).sum().backward()
    return model.found_inf().item(), model.module.weight.grad[0, 33].item()


@pytest.mark.parametrize("hook", [None, comm_hooks.fp16_compress_hook, comm_hooks.bf16_compress_hook])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), -float("inf"), 1e6, 1e5])
def test_what_is_not_finite_or_does_not_fit_in_fp16_is_found_on_all_ranks(
    ranks: RankPool, hook: Callable[..., Any] | None, value: float
) -> None:
    is_found = not math.isfinite(value) or (value == 1e6 and hook is comm_hooks.fp16_compress_hook)
    for found, average in ranks.run(infinite, 2, hook, value):
        assert found == is_found
        assert is_found or average == pytest.approx(value / 2, rel=4e-3)  # though 1e5 itself does not fit in fp16


def clipped(rank: int, max_norm: float) -> tuple[float, float, float]:
    model = fastddp.DistributedDataParallel(nn.Linear(3, 1, bias=False))
    with pytest.raises(RuntimeError, match="between the backward that synchronises them and the next forward"):
        model.last_grad_norm()
    model(torch.tensor([[0.0, 3.0, 4.0]]) * (2 * rank)).sum().backward()
    norm = fastddp.clip_grad_norm_(model, max_norm)
    return norm.item(), *model.module.weight.grad[0, 1:].tolist()


def test_gradients_are_clipped_to_the_norm(ranks: RankPool) -> None:
    assert ranks.run(clipped, 2, 1.0) == [pytest.approx((5.0, 0.6, 0.8))] * 2
    assert ranks.run(clipped, 2, 9.0) == [(5.0, 3.0, 4.0)] * 2
