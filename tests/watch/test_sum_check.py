"""Was a sum right: what is no rounding is found, wherever it happened; and rounding is no error."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastddp
from fake_cuda import DEVICE as SIMULATED
from fastddp import _C, Corruption, comm_hooks
from fastddp.comm_hooks import CompressState
from fastddp.watch import sum_check
from fastddp.watch.sum_check import regions, wrong_elements
from ranks import RankPool

SIGN, EXPONENT, MANTISSA = 31, 27, 20
FP32 = pytest.mark.parametrize("bit", [SIGN, EXPONENT, MANTISSA], ids=["sign", "exponent", "mantissa"])


def flip(tensor: Tensor, bit: int, element: int) -> None:
    words = tensor.view(-1).view(torch.int32 if tensor.itemsize == 4 else torch.int16)
    words[element] ^= torch.tensor(1 << bit).to(words.dtype)


class Flipping(dist.ProcessGroup):
    """A process group that flips a bit: of what it sends, or of what comes back."""

    def __init__(self, group: dist.ProcessGroup, bit: int | None, when: str) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        cpu = torch.device("cpu")
        self._register_backend(cpu, dist.ProcessGroup.BackendType.GLOO, group._get_backend(cpu))  # which tells its name
        self.group = group
        self.bit = bit
        self.when = when

    def allreduce(self, *arguments: Any) -> dist.Work:
        ((tensor,), *_) = arguments
        if self.when == "sent" and self.bit is not None:
            flip(tensor, self.bit, element=3)
        work = self.group.allreduce(*arguments)
        if self.when == "came" and self.bit is not None:
            work.wait()
            flip(tensor, self.bit, element=3)
        return work

    def send(self, tensors: list[Tensor], *arguments: Any) -> dist.Work:
        if self.bit is not None:
            self.kept = tensors = [tensors[0].clone()]  # a gradient of this rank's own stays as it is
            flip(tensors[0].view(torch.int16), self.bit, element=1)
        return self.group.send(tensors, *arguments)

    def recv(self, *arguments: Any) -> dist.Work:
        return self.group.recv(*arguments)


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 5))


def train(model: nn.Module, rank: int, steps: range, device: str = "cpu") -> None:
    """Without an optimizer: replicas stay as they are."""
    for step in steps:
        torch.manual_seed(100 * step + rank)
        model.zero_grad()
        model(torch.randn(4, 6).to(device)).square().sum().backward()
        if device != "cpu":
            torch.accelerator.synchronize()


def flipped(
    rank: int, bit: int, when: str, bad: int, wire: torch.dtype | None = None
) -> tuple[list[tuple[str, int, tuple[int, ...], str | None]], str]:
    """What is said of a wire one bit of which is flipped on one rank, in the fourth step."""
    seen: list[Corruption] = []
    model = fastddp.DistributedDataParallel(Mlp(), audit_every=1, on_corruption=seen.append)
    if wire is not None:
        model.register_comm_hook(None, comm_hooks.fp16_compress_hook)
    train(model, rank, range(3))
    group = model.process_group
    lanes = [Flipping(group, bit if rank == bad else None, when)]
    if wire is None:
        transport = _C.Transport.all_reduce(lanes)
    else:
        transport = _C.Transport.sharded_sum(lanes, [0] * group.size(), torch.device("cpu"))
    flipping = _C.Exchange.pipeline(_C.Codec.cast(wire), _C.Transport.audited(transport, model._setting.sum_audit))
    ours = model._exchange.make(model._setting)
    model.reducer.set_exchange(flipping)
    train(model, rank, range(3, 4))
    model.reducer.set_exchange(ours)
    train(model, rank, range(4, 9))
    return [(one.kind, one.step, one.ranks, one.parameter) for one in seen], "\n".join(one.message for one in seen)


@FP32
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_bit_that_flips_on_the_way_to_the_sum(ranks: RankPool, world_size: int, bit: int) -> None:
    for said, messages in ranks.run(flipped, world_size, bit, "sent", world_size - 1):
        assert said == [("sum", 4, (), "2.bias")]
        assert "bucket 0" in messages
        assert "1 elements, the first in the gradient of '2.bias'" in messages


@pytest.mark.parametrize("bit", [SIGN, EXPONENT, 0], ids=["sign", "exponent", "last bit"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_bit_that_flips_on_one_ranks_way_back(ranks: RankPool, world_size: int, bit: int) -> None:
    bad = world_size - 2
    for said, messages in ranks.run(flipped, world_size, bit, "came", bad):
        assert said == [("sum", 4, (0, 1) if world_size == 2 else (bad,), None)]
        assert "bucket 0" in messages


@pytest.mark.parametrize("bit", [15, 13, 9], ids=["sign", "exponent", "mantissa"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_bit_of_a_cast_wire(ranks: RankPool, world_size: int, bit: int) -> None:
    for said, messages in ranks.run(flipped, world_size, bit, "sent", 0, torch.float16):
        assert said
        assert {(kind, step) for kind, step, _, _ in said} == {("sum", 4)}
        assert "bucket 0" in messages


def on_device(rank: int) -> tuple[int, int]:
    """Regions that were judged there, and reports."""
    seen: list[Corruption] = []
    model = fastddp.DistributedDataParallel(Mlp().to(SIMULATED), audit_every=1, on_corruption=seen.append)
    judged = 0

    def count(*arguments: Any) -> Tensor:
        nonlocal judged
        judged += 1
        return real(*arguments)

    real, sum_check.wrong_elements = sum_check.wrong_elements, count
    train(model, rank, range(8), SIMULATED)
    sum_check.wrong_elements = real
    return judged, len(seen)


def test_sums_of_a_device(simulated_ranks: RankPool) -> None:
    assert simulated_ranks.run(on_device, 2) == [(6, 0)] * 2


class Kinds(nn.Module):
    """Wires of several dtypes, some longer than a region."""

    def __init__(self, has_complex: bool) -> None:
        super().__init__()
        kinds = [kind for kind in KINDS if has_complex or not kind[1].is_complex]
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(count, dtype=dtype)) for count, dtype in kinds)

    def forward(self, scale: float) -> Tensor:
        sums = [(weight.abs() * torch.linspace(-1, 1, weight.numel())).sum().real.float() for weight in self.weights]
        return torch.stack(sums).sum() * scale


KINDS = [
    (300_000, torch.float32),
    (700, torch.float64),
    (5, torch.complex64),
    (2000, torch.bfloat16),
    (3, torch.float32),
]


def judged(rank: int, hook: str) -> tuple[int, int, int]:
    """How many elements were judged on this rank; how many there are; and regions."""
    kinds = Kinds(has_complex=hook == "none")
    model = fastddp.DistributedDataParallel(kinds, audit_every=1, on_corruption="raise", bucket_cap_mb=0.5)
    if hook != "none":
        state = CompressState(accumulate="wire") if hook == "wire" else None
        model.register_comm_hook(state, comm_hooks.bf16_compress_hook)
    count = 0

    def counting(everyones: Tensor, came: Tensor, factor: float) -> Tensor:
        nonlocal count
        assert bool(everyones.isfinite().all())
        assert bool((came != 0).any())
        assert factor == 1
        count += len(came)
        return real(everyones, came, factor)

    real, sum_check.wrong_elements = sum_check.wrong_elements, counting
    for step in range(2):
        model(rank + 1.3 + step).backward()
    layouts = model.reducer.wire_layouts()
    audit = model._audit
    there = len(regions(layouts))
    for _ in range(2):  # until what began before buckets were rebuilt is judged
        model(rank + 1.3).backward()
    while audit._audited % there != 0:
        model(rank + 1.3).backward()
    count = 0
    audited = audit._audited
    while audit._audited < audited + there:
        model.zero_grad()
        model(rank + 1.3).backward()
    sum_check.wrong_elements = real
    extents = [layout.members[-1][0] + layout.members[-1][1] for layout in layouts]
    return count, sum(extents), there


@pytest.mark.parametrize("hook", ["none", "fp32", "wire"])
def test_all_wires_have_their_turn(ranks: RankPool, hook: str) -> None:
    results = ranks.run(judged, 3, hook)
    assert sum(count for count, _, _ in results) == results[0][1]
    assert results[0][2] >= 3


def hooks_without(rank: int) -> int:
    """All-to-alls of exchanges whose sums are not checked."""
    with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as all_to_all:
        for hook in ("power_sgd", "python"):
            model = fastddp.DistributedDataParallel(Mlp(), audit_every=1, on_corruption="raise")
            if hook == "python":
                model.register_comm_hook(None, lambda state, bucket: comm_hooks.allreduce_hook(state, bucket))
            else:
                state = fastddp.comm_hooks.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.1)
                model.register_comm_hook(state, comm_hooks.powerSGD_hook)
            train(model, rank, range(5))
    return all_to_all.call_count


def test_power_sgd_and_hooks_of_ones_own_are_left_out(ranks: RankPool) -> None:
    assert ranks.run(hooks_without, 2) == [2, 2]  # of the two windows before PowerSGD begins


# -------------------------------------------------------------------------------------------------------------- bounds


def test_the_example_of_the_docstring() -> None:
    x = torch.tensor([[1.0, 1.0], [2.0, 2.0]])
    assert wrong_elements(x, torch.tensor([3.0, 3.1]), 1.0).tolist() == [False, True]


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
    for _ in range(3):
        total = torch.zeros(20_000, dtype=dtype)
        for row in torch.randperm(count).tolist():
            total += terms[row]
        assert not wrong_elements(x, total, 1 / count if divides else 1.0).any()
    once = terms.float().sum(0).to(dtype) if dtype.itemsize == 2 else terms.flip(0).sum(0)
    assert not wrong_elements(x, once, 1 / count if divides else 1.0).any()


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 32), (torch.float16, 16), (torch.bfloat16, 16)])
@pytest.mark.parametrize("count", [2, 4])
def test_which_bits_are_seen(dtype: torch.dtype, bits: int, count: int) -> None:
    """Of a sum of numbers with one sign: all but the last three."""
    torch.manual_seed(0)
    x = (torch.rand(count, 1000) + 0.5).to(dtype)
    total = x.float().sum(0).to(dtype)
    for bit in range(bits):
        changed = total.clone()
        flip_all = changed.view(torch.int32 if bits == 32 else torch.int16)
        flip_all ^= torch.tensor(1 << bit).to(flip_all.dtype)
        seen = wrong_elements(x, changed, 1.0)
        if bit >= 3:
            assert seen.all(), bit
        if bit == 0:
            assert not seen.any()


def test_what_is_not_judged() -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[1.0, nan, inf, 3e38, 0.0], [1.0, 1.0, 1.0, 3e38, 0.0]])
    assert not wrong_elements(x, torch.tensor([2.0, 7.0, 7.0, inf, 0.0]), 1.0).any()
    assert wrong_elements(x, torch.tensor([nan, nan, nan, nan, nan]), 1.0).tolist() == [True, False, False, False, True]
    assert wrong_elements(x, torch.tensor([inf, 0.0, 0.0, 0.0, 1e-30]), 1.0).tolist()[::4] == [True, True]
