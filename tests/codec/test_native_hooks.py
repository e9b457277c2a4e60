"""The hooks of fastddp.comm_hooks, run natively, and the norm that unpack measures on its way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks

import fastddp
from fastddp import comm_hooks
from fastddp.comm_hooks import CompressState, PostLocalSGDState
from fastddp.exchange.descriptions import AllReduce, Noop, PythonHook
from hooks_by_name import averages
from models import MODELS, inputs
from nodes import on_machines
from on_ranks import gradients, of_ranks, on_ranks

FP16, BF16 = torch.float16, torch.bfloat16
VIEWS = pytest.mark.parametrize("view", [False, True], ids=["own memory", "bucket views"])


@pytest.mark.parametrize(
    ("accumulate", "machines", "more"),
    [("fp32", (0, 0, 0, 0), [4]), (None, (0, 0, 0, 0), [4]), ("wire", (0, 0, 0, 0), [0, 4]), (None, (0, 0, 1, 1), [2])],
    ids=["fp32", "what gloo gets unless told otherwise", "wire", "two nodes"],
)
@pytest.mark.parametrize(("wire", "big"), [("bf16", 256.0), ("fp16", 2048.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@on_ranks(4)
def test_sums_in_fp32_are_rounded_once_a_level(
    rank: int, dtype: torch.dtype, wire: str, big: float, accumulate: Any, machines: tuple[int, ...], more: list[int]
) -> None:
    """256 + 1 + 1 + 1, another rank having the 256 in each element: bf16 holds 256 and 258, and not 257.

    259 is halfway, and rounds to even, 260; of two nodes one has 257, which rounds to 256, and the other one 2.
    """
    with on_machines(rank, machines):
        model = fastddp.DistributedDataParallel(nn.Linear(4, 1, bias=False, dtype=dtype))
        model.register_comm_hook(CompressState(accumulate=accumulate), getattr(comm_hooks, f"{wire}_compress_hook"))
        model(4 * (1 + (big - 1) * torch.eye(4, dtype=dtype)[rank : rank + 1])).sum().backward()
    found = model.module.weight.grad[0].tolist()
    assert min(found) == big + more[0]
    assert max(found) == big + more[-1]


@VIEWS
@on_ranks(2)
def test_with_a_cast_wire_gradients_stay_where_autograd_put_them(rank: int, view: bool) -> None:
    model = fastddp.DistributedDataParallel(nn.Linear(3, 3), gradient_as_bucket_view=view)
    model.register_comm_hook(None, comm_hooks.fp16_compress_hook)
    addresses = {}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: addresses.update({p: p.grad.data_ptr()}))
    model(torch.ones(1, 3)).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad.data_ptr() == addresses[parameter]
        assert parameter.grad.untyped_storage().nbytes() == parameter.grad.nbytes  # and nothing else is there
        assert not parameter.grad._is_view()


@pytest.mark.parametrize(
    ("state", "hook", "exchange"),
    [
        (None, default_hooks.allreduce_hook, AllReduce()),
        (None, default_hooks.fp16_compress_hook, AllReduce(wire=FP16)),
        (None, dist.BuiltinCommHookType.FP16_COMPRESS, AllReduce(wire=FP16)),
        (None, default_hooks.bf16_compress_hook, AllReduce(wire=BF16)),
        (None, comm_hooks.bf16_compress_hook, AllReduce(wire=BF16)),
        (CompressState(accumulate="fp32"), comm_hooks.bf16_compress_hook, AllReduce(wire=BF16, accumulate="fp32")),
        (None, debugging_hooks.noop_hook, Noop()),
        (None, comm_hooks.fp16_compress_wrapper(comm_hooks.allreduce_hook), AllReduce(wire=FP16)),
        (None, comm_hooks.fp16_compress_wrapper(comm_hooks.bf16_compress_hook), AllReduce(wire=BF16)),
        (None, comm_hooks.bf16_compress_wrapper(comm_hooks.noop_hook), "python"),
        (None, comm_hooks.bf16_compress_wrapper(averages), "python"),
        (None, averages, "python"),
    ],
)
@on_ranks(1)
def test_what_a_hook_stands_for(rank: int, state: object, hook: Any, exchange: object) -> None:
    model = fastddp.DistributedDataParallel(nn.Linear(1, 1))
    if callable(hook):
        model.register_comm_hook(state, hook)
    else:
        model._register_builtin_comm_hook(hook)
    found = model.engine.now.exchange
    assert ("python" if isinstance(found, PythonHook) else found) == exchange


class Parts(nn.Module):
    """Dense parameters and a table of words; a forward uses what it is told to, and every gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(1)) for _ in range(2))
        self.words = nn.Embedding(2, 1, sparse=True)

    def forward(self, x: float, used: str, word: int) -> Tensor:
        loss = x * self.words(torch.tensor([word])).sum()
        return sum(((getattr(self, name) * x).sum() for name in used), loss)


def in_pairs(rank: int, first: int, uses: list[str], **options: Any) -> list[tuple[list[float | None], list[float]]]:
    """Gradients of a and b, and of the words, of each step; rank r's own are r + 1, and it looks word r % 2 up."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = fastddp.DistributedDataParallel(Parts(), bucket_cap_mb=0, **options)
    state = PostLocalSGDState(None, pairs[rank // 2], first)
    model.register_comm_hook(state, comm_hooks.post_localSGD_hook)
    seen = []
    for used in uses:
        model.zero_grad()
        model(rank + 1.0, used, rank % 2).backward()
        *dense, words = gradients(model)
        seen.append(([None if one is None else one.item() for one in dense], words.to_dense().flatten().tolist()))
    assert state.iter == first
    assert len(set(of_ranks(str(model.bucket_plan())))) == 1
    return seen


@pytest.mark.parametrize("average", ["mean", "sum"])
@on_ranks(4)
def test_local_sgd_averages_over_all_ranks_first_and_over_the_subgroup_then(rank: int, average: str) -> None:
    # Words 0 and 1: rank r's gradient is r + 1, and the other one's row is zero.
    over_all = [4.0, 6.0] if average == "sum" else [1.0, 1.5]
    then = {"mean": [[0.5, 1.0], [1.5, 2.0]], "sum": [[1.0, 2.0], [3.0, 4.0]]}[average][rank // 2]
    seen = in_pairs(rank, 1, ["ab"] * 3, gradient_average=average)
    assert seen == [([sum(words)] * 2, words) for words in (over_all, then, then)]


@pytest.mark.parametrize(
    ("option", "first", "uses", "expected"),
    [
        # Rank 0 uses b in the third step, for the first time, and in the fourth.
        (
            "find_unused_parameters",
            1,
            ["a", "a", "ab", "ab", "a"],
            ([[2.5, None], [1.5, None], [1.5, 0.5], [1.5, 0.5], [1.5, None]], [[2.5, None]] + [[3.5, None]] * 4),
        ),
        # Rank 0 uses b, and its first step goes over a pair already. On the other pair b counts as used, with zeros.
        ("static_graph", 0, ["ab"] * 3, ([[1.5, 0.5]] * 3, [[3.5, 0.0]] * 3)),
    ],
)
@on_ranks(4)
def test_under_local_sgd_what_another_subgroup_uses_leaves_gradients_alone_and_buckets_alike(
    rank: int, option: str, first: int, uses: list[str], expected: tuple[list[Any], list[Any]]
) -> None:
    seen = in_pairs(rank, first, uses if rank == 0 else ["a"] * len(uses), **{option: True})
    assert [dense for dense, _ in seen] == expected[rank // 2]


@VIEWS
@pytest.mark.parametrize("hold", [False, True], ids=["", "held"])
@pytest.mark.parametrize("hook", [None, comm_hooks.fp16_compress_hook, comm_hooks.noop_hook, averages])
@on_ranks(2)
def test_the_norm_is_torchs(rank: int, hook: Callable[..., Any] | None, view: bool, hold: bool) -> None:
    module = MODELS["batch norm MLP"]()
    model = fastddp.DistributedDataParallel(module, gradient_as_bucket_view=view, bucket_cap_mb=1e-4)
    if hook is not None:
        model.register_comm_hook(None, hook)
    held: list[Tensor] = []
    if hold:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: held.append(p.grad))
    for step in range(3):
        model.zero_grad()
        model(inputs("batch norm MLP", rank, step)).square().sum().backward()
        expected = torch.nn.utils.get_total_norm(gradients(model))
        torch.testing.assert_close(model.last_grad_norm().float(), expected, rtol=1e-6, atol=0)
        assert model.found_inf().item() == 0


@pytest.mark.parametrize("hook", [None, comm_hooks.fp16_compress_hook, comm_hooks.bf16_compress_hook])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), -float("inf"), 1e6, 1e5])
@on_ranks(2)
def test_what_is_not_finite_or_does_not_fit_in_fp16_is_found_on_all_ranks(
    rank: int, hook: Callable[..., Any] | None, value: float
) -> None:
    model = fastddp.DistributedDataParallel(nn.Linear(40, 1, bias=False))
    if hook is not None:
        model.register_comm_hook(None, hook)
    batch = torch.ones(1, 40)
    batch[0, 33] = value if rank == 0 else 0.0
    model(batch).sum().backward()
    is_found = not math.isfinite(value) or (value == 1e6 and hook is comm_hooks.fp16_compress_hook)
    assert model.found_inf().item() == is_found
    average = model.module.weight.grad[0, 33].item()
    assert is_found or average == pytest.approx(value / 2, rel=4e-3)  # though 1e5 itself does not fit in fp16
