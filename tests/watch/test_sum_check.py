"""Was a sum right: all sums are judged in turn, what is no rounding is found, and rounding is no error."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fastddp
from fake_cuda import DEVICE as SIMULATED
from fastddp import comm_hooks
from fastddp.comm_hooks import CompressState
from fastddp.watch import sum_check
from fastddp.watch.sum_check import regions, wrong_elements
from on_ranks import of_ranks, on_ranks


class Kinds(nn.Module):
    """Wires of several dtypes, some longer than a region."""

    def __init__(self, has_complex: bool) -> None:
        super().__init__()
        kinds = [(300_000, torch.float32), (700, torch.float64), (2000, torch.bfloat16), (3, torch.float32)]
        if has_complex:
            kinds.insert(2, (5, torch.complex64))
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(count, dtype=dtype)) for count, dtype in kinds)

    def forward(self, scale: float) -> Tensor:
        sums = [(weight.abs() * torch.linspace(-1, 1, weight.numel())).sum().real.float() for weight in self.weights]
        return torch.stack(sums).sum() * scale


@pytest.mark.parametrize("hook", ["none", "fp32", "wire"])
@on_ranks(3)
def test_all_wires_have_their_turn(rank: int, hook: str) -> None:
    """In a round each element is judged on one rank."""
    kinds = Kinds(has_complex=hook == "none")
    model = fastddp.DistributedDataParallel(
        kinds, watch=fastddp.Watch(audit_every=1, corruption="raise"), bucket_cap_mb=0.5
    )
    if hook != "none":
        state = CompressState(accumulate="wire") if hook == "wire" else None
        model.register_comm_hook(state, comm_hooks.bf16_compress_hook)
    with mock.patch.object(sum_check, "wrong_elements", wraps=wrong_elements) as judging:
        for step in range(4):  # until what began before buckets were rebuilt is judged
            model(rank + 1.3 + step).backward()
        layouts = model.reducer.wire_layouts()
        there = len(regions(layouts))
        while model.engine.audit._audited % there != 0:
            model(rank + 1.3).backward()
        judging.reset_mock()
        for _ in range(there):
            model.zero_grad()
            model(rank + 1.3).backward()
    for everyones, came, factor in (call.args for call in judging.call_args_list):
        assert everyones.isfinite().all()
        assert (came != 0).any()
        assert factor == 1
    extents = [layout.members[-1][0] + layout.members[-1][1] for layout in layouts]
    assert sum(of_ranks(sum(len(call.args[1]) for call in judging.call_args_list))) == sum(extents)
    assert there >= 3


@on_ranks(2, pool="simulated_ranks")
def test_on_a_device_a_sum_is_judged_in_each_window_too(rank: int) -> None:
    watch = fastddp.Watch(audit_every=1, corruption="raise")
    model = fastddp.DistributedDataParallel(nn.Linear(6, 5).to(SIMULATED), watch=watch)
    with mock.patch.object(sum_check, "wrong_elements", wraps=wrong_elements) as judging:
        for step in range(8):
            model(torch.full((4, 6), 1.0 + step).to(SIMULATED)).square().sum().backward()
            torch.accelerator.synchronize()
    assert judging.call_count == 6  # of the last two not yet


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 3, 4, 9, 32])
@pytest.mark.parametrize("divides", [False, True])
def test_rounding_is_no_error(dtype: torch.dtype, count: int, divides: bool) -> None:
    """Any order; small and large numbers, which cancel; those that a device may take for zero."""
    torch.manual_seed(0)
    x = torch.randn(count, 20_000, dtype=torch.float64) * 10 ** torch.empty(20_000).uniform_(-9, 3).double()
    x = x.to(dtype)
    x[1, ::2] = -x[0, ::2]
    terms = x * torch.tensor(1 / count, dtype=dtype) if divides else x
    sums = [terms.float().sum(0).to(dtype) if dtype.itemsize == 2 else terms.flip(0).sum(0)]
    for _ in range(3):
        total = torch.zeros(20_000, dtype=dtype)
        for row in torch.randperm(count).tolist():
            total += terms[row]
        sums.append(total)
    for total in sums:
        assert not wrong_elements(x, total, 1 / count if divides else 1.0).any()


@pytest.mark.parametrize(
    ("dtype", "words"),
    [(torch.float32, torch.int32), (torch.float16, torch.int16), (torch.bfloat16, torch.int16)],
)
@pytest.mark.parametrize("count", [2, 4])
def test_all_bits_are_seen_but_for_the_last_three(dtype: torch.dtype, words: torch.dtype, count: int) -> None:
    """Of a sum of numbers with one sign."""
    torch.manual_seed(0)
    x = (torch.rand(count, 1000) + 0.5).to(dtype)
    total = x.float().sum(0).to(dtype)
    for bit in (0, *range(3, 8 * dtype.itemsize)):
        changed = total.clone()
        changed.view(words).bitwise_xor_(torch.tensor(1 << bit).to(words))
        seen = wrong_elements(x, changed, 1.0)
        assert seen.all() if bit else not seen.any(), bit


def test_what_is_not_judged() -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[1.0, nan, inf, 3e38, 0.0], [1.0, 1.0, 1.0, 3e38, 0.0]])
    assert not wrong_elements(x, torch.tensor([2.0, 7.0, 7.0, inf, 0.0]), 1.0).any()
    assert wrong_elements(x, torch.tensor([nan, nan, nan, nan, nan]), 1.0).tolist() == [True, False, False, False, True]
    assert wrong_elements(x, torch.tensor([inf, 0.0, 0.0, 0.0, 1e-30]), 1.0).tolist()[::4] == [True, True]
