"""Do replicas still agree: every flipped bit is found and named, and healthy steps say nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import fake_cuda
import fastddp
from fake_cuda import DEVICE as SIMULATED
from fastddp import _C, Corruption, comm_hooks
from fastddp.comm_hooks import PostLocalSGDState
from fastddp.watch.audited_tensors import AuditedTensors
from hooks_by_name import register
from logs import lines_of_the_logger
from models import RaisesInBackward
from on_ranks import on_ranks
from ranks import RankPool

SIGN, EXPONENT, MANTISSA = 31, 24, 0


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 5), nn.Tanh(), nn.Linear(5, 3))
        self.register_buffer("constant", torch.arange(4.0))
        self[0].bias.requires_grad = False


def flip(tensor: Tensor, bit: int, element: int = 0) -> None:
    with torch.no_grad():
        tensor.view(-1).view(torch.int32)[element] ^= torch.tensor(1 << bit).to(torch.int32)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range, device: str = "cpu") -> None:
    for step in steps:
        torch.manual_seed(100 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(4, 6).to(device)).square().sum().backward()
        optimizer.step()
        if device != "cpu":
            torch.accelerator.synchronize()  # what nobody waits for the simulated device does not do


def flipped(rank: int, bit: int, bad: int, device: str) -> list[Corruption]:
    """What is said of a bit flipped after steps 3, 6, 9 and 12, in a parameter, a frozen one, a buffer and a state."""
    seen: list[Corruption] = []
    torch.manual_seed(0)
    model = fastddp.DistributedDataParallel(
        Mlp().to(device), watch=fastddp.Watch(audit_every=1, corruption=seen.append), forward_sync_buffers=False
    )
    optimizer = adam(model)
    module = model.module
    model.audit(optimizer, buffers=["constant"])
    train(model, optimizer, rank, range(3), device)
    state = optimizer.state[module[4].weight]["exp_avg"]
    for number, tensor in enumerate([module[2].weight, module[0].bias, module.constant, state], 1):
        if rank == bad:
            flip(tensor, bit, element=2)
        train(model, optimizer, rank, range(3 * number, 3 * number + 3), device)
    return seen


@pytest.mark.tier("slow", but_one_in=3)
@pytest.mark.parametrize(
    ("world_size", "bit", "device"),
    [
        *[(world_size, bit, "cpu") for world_size in (2, 3, 4) for bit in (SIGN, EXPONENT, MANTISSA)],
        pytest.param(3, SIGN, SIMULATED, marks=pytest.mark.tier("nightly")),
    ],
)
def test_a_flipped_bit_is_found_and_named(
    ranks: RankPool, simulated_ranks: RankPool, world_size: int, bit: int, device: str
) -> None:
    bad = world_size - 2
    blamed = (0, 1) if world_size == 2 else (bad,)
    names = ["2.weight", "0.bias", "constant", "4.weight: exp_avg"]
    pool = ranks if device == "cpu" else simulated_ranks
    for seen in pool.run(flipped, world_size, bit, bad, device):
        assert [(of.kind, of.step, of.ranks, of.parameter) for of in seen[:4]] == [
            ("replicas", 3 * number + 1, blamed, name) for number, name in enumerate(names, 1)
        ]
        for name, of in zip(names, seen, strict=False):
            assert f"'{name}'" in of.message
            assert ("wrong on one of the two" in of.message) == (world_size == 2)


@on_ranks(3)
def test_a_difference_is_told_once_until_it_is_gone(rank: int) -> None:
    seen: list[Corruption] = []
    model = fastddp.DistributedDataParallel(Mlp(), watch=fastddp.Watch(audit_every=2, corruption=seen.append))
    optimizer = sgd(model)
    train(model, optimizer, rank, range(2))
    weight = model.module[2].weight
    for _ in range(3):
        if rank == 2:
            flip(weight, MANTISSA)
        train(model, optimizer, rank, range(2, 9))
        with torch.no_grad():
            dist.broadcast(weight, 0)
        train(model, optimizer, rank, range(9, 13))
    assert [(of.ranks, of.parameter) for of in seen] == [((2,), "2.weight")] * 3


@pytest.mark.parametrize("corruption", [None, "report", "raise"])
@on_ranks(3)
def test_it_is_logged_once_or_raised_on_all_ranks(rank: int, corruption: Any) -> None:
    with lines_of_the_logger() as lines:
        model = fastddp.DistributedDataParallel(Mlp(), watch=fastddp.Watch(audit_every=1, corruption=corruption))
        optimizer = sgd(model)
        if rank == 1:
            flip(model.module[0].weight, SIGN)
        if corruption == "raise":
            with pytest.raises(fastddp.CorruptionError, match=r"'0.weight'"):
                train(model, optimizer, rank, range(4))
        train(model, optimizer, rank, range(4))  # all ranks are at the same step, and can go on
    said = [line for line in lines if "'0.weight' of rank 1 is not that of ranks 0, 2" in line]
    assert len(said) == (corruption != "raise" and rank == 0)


@pytest.mark.parametrize("steps", [1, 2, 7, 100])
def test_a_round_has_every_element_once(steps: int) -> None:
    module = nn.Sequential(nn.Linear(300, 1000), nn.Conv2d(3, 5, 3), nn.Linear(9, 9), nn.LayerNorm(7))
    module[1].weight.data = module[1].weight.data.contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(module.parameters())
    expected = {}
    for name, parameter in module.named_parameters():
        parameter.grad = torch.zeros_like(parameter)
        expected |= {name: parameter.numel(), f"{name}: step": 1}
        expected |= {f"{name}: {key}": parameter.numel() for key in ("exp_avg", "exp_avg_sq")}
    optimizer.step()
    tensors = AuditedTensors([*module.named_parameters()])
    tensors.add_optimizer(optimizer)
    parts = tensors.round(steps).parts
    assert len(parts) == steps
    ends: dict[str, int] = {}
    for part in parts:
        for name, (_, begin, end) in zip(part.names, part.slices, strict=True):
            assert begin == ends.get(name, 0)
            ends[name] = end
    assert ends == expected


@pytest.mark.parametrize("every", [1, 5, 30])
@on_ranks(3)
def test_everything_is_looked_at_within_a_round(rank: int, every: int) -> None:
    # In a window of which more than 128 or 32 tensors are compared, several have one digest.
    seen: list[Corruption] = []
    module = nn.Sequential(*(nn.Linear(6, 6) for _ in range(40)))
    model = fastddp.DistributedDataParallel(module, watch=fastddp.Watch(audit_every=every, corruption=seen.append))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    train(model, optimizer, rank, range(3))
    if rank == 0:
        for parameter in model.parameters():
            flip(parameter, MANTISSA)
    train(model, optimizer, rank, range(3, 3 + every + every // 10 + 2))
    assert {one.kind for one in seen} == {"replicas"}
    assert len(model.engine.audit._differing) == 80


@pytest.mark.parametrize(("every", "windows", "rows"), [(1, 6, 6), (10, 20, 20), (40, 80, 20)])
@on_ranks(2)
def test_a_round_has_ten_collectives(rank: int, every: int, windows: int, rows: int) -> None:
    model = fastddp.DistributedDataParallel(Mlp(), watch=fastddp.Watch(audit_every=every), forward_sync_buffers=False)
    optimizer = sgd(model)
    train(model, optimizer, rank, range(2 * every))  # buckets are final
    names = ["all_gather", "all_to_all_single", "all_reduce", "broadcast", "barrier", "all_gather_object"]
    with mock.patch.multiple(dist, **{name: mock.Mock(wraps=getattr(dist, name)) for name in names}):
        train(model, optimizer, rank, range(windows))
        calls = {name: count for name in names if (count := getattr(dist, name).call_count)}
    assert calls == {"all_gather": rows}


@on_ranks(3)
def test_a_rank_with_optimizer_state_of_its_own_is_named(rank: int) -> None:
    seen: list[Corruption] = []
    model = fastddp.DistributedDataParallel(Mlp(), watch=fastddp.Watch(audit_every=2, corruption=seen.append))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9 if rank == 1 else 0.0)
    model.audit(optimizer)
    train(model, optimizer, rank, range(8))
    assert (seen[0].ranks, seen[0].parameter) == ((1,), None)


def healthy(rank: int, hook: str, device: str = "cpu") -> int:
    """Windows that were audited, with an exchange; this raises as soon as the audit finds something."""
    torch.manual_seed(0)
    more = 2 * (hook == "one forward, rank 1 three")
    watch = fastddp.Watch(audit_every=3, corruption="raise")
    options = {"bucket_cap_mb": 0.0003, "forward_sync_buffers": not more}
    model = fastddp.DistributedDataParallel(Mlp().to(device), watch=watch, **options)
    subgroup, _ = dist.new_subgroups(2) if hook in ("local SGD", "subgroup") else (None, None)
    hooks: dict[str, tuple[Any, Callable[..., Any]]] = {
        "local SGD": (PostLocalSGDState(None, subgroup, 4), comm_hooks.post_localSGD_hook),
        "subgroup": (subgroup, comm_hooks.allreduce_hook),
    }
    if hook in hooks:
        model.register_comm_hook(*hooks[hook])
    else:
        register(model, "none" if more else hook)
    optimizer = adam(model)
    model.audit(optimizer)
    for step in range(14):
        for _ in range(more * (rank == 1)):  # windows are audited, and not forwards
            model(torch.randn(4, 6))
        train(model, optimizer, rank, range(step, step + 1), device)
    assert len(model.engine.audit._sent) <= 3  # answers are read
    return model.engine.audit._audited


EXCHANGES = ["none", "bf16", "fp16, sums in the wire", "PowerSGD", "python", "noop", "local SGD", "subgroup"]


@pytest.mark.parametrize("hook", [*EXCHANGES, "one forward, rank 1 three"])
def test_no_alarm_under_any_exchange(ranks: RankPool, hook: str) -> None:
    assert ranks.run(healthy, 4, hook) == [0 if hook == "noop" else 14] * 4


def test_no_alarm_on_a_device(simulated_ranks: RankPool) -> None:
    assert simulated_ranks.run(healthy, 2, "none", SIMULATED) == [14] * 2


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor, number: int, fails: bool = False) -> Tensor:
        out = self.norm(self.layers[number](x))
        return RaisesInBackward.apply(out) if fails else out


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"gradient_average": "sum"}], ids=str)
@on_ranks(3)
def test_no_alarm_in_eventful_training(rank: int, options: dict[str, Any]) -> None:
    """Accumulation, forwards without a backward, windows that fail, and parameters that are used on some ranks only."""
    torch.manual_seed(0)
    watch = fastddp.Watch(audit_every=2, corruption="raise")
    model = fastddp.DistributedDataParallel(Branches(), watch=watch, find_unused_parameters=True, **options)
    optimizer = adam(model)
    model.audit(optimizer)
    for step in range(20):
        x = torch.randn(4, 6)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if step % 3 == 1:
            with model.no_sync():
                model(x, step % 3).sum().backward()
        if step % 5 in (1, 2):
            with nullcontext() if step % 5 == 1 else torch.no_grad():
                model(x, 0)
        fails = step % 7 == 3
        loss = model(x, (step + rank) % 3 if step % 4 == 0 else step % 3, fails and rank == 1).square().sum()
        with pytest.raises((RuntimeError, ArithmeticError)) if fails else nullcontext():
            loss.backward()
        if not fails:
            optimizer.step()


@on_ranks(1)
def test_what_is_refused(rank: int) -> None:
    with pytest.raises(RuntimeError, match="audit_every=N"):
        fastddp.DistributedDataParallel(Mlp()).audit()
    model = fastddp.DistributedDataParallel(Mlp(), watch=fastddp.Watch(audit_every=1))
    with pytest.raises(TypeError, match="not DistributedDataParallel"):
        model.audit(model)
    with pytest.raises(ValueError, match="none of the model's parameters"):
        model.audit(sgd(nn.Linear(1, 1)))
    with pytest.raises(ValueError, match=r"does not have: '2.running_mean'"):
        model.audit(buffers=["2.running_mean"])
    with pytest.raises(ValueError, match="all ranks have alike, and ZeroRedundancyOptimizer"):
        model.audit(ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1))


CPU = torch.device("cpu")
LARGE = 2**20  # words that have factors of their own


def digest(tensor: Tensor, begin: int = 0, end: int | None = None) -> int:
    end = tensor.numel() if end is None else end
    return int(_C.Digests().of([(tensor, begin, end)], CPU))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8])
def test_every_bit_counts(dtype: torch.dtype) -> None:
    tensor = torch.zeros(13, dtype=dtype)
    raw = tensor.view(torch.uint8)
    seen = {digest(tensor)}
    for byte, bit in itertools.product(range(len(raw)), range(8)):
        raw[byte] ^= 1 << bit
        seen.add(digest(tensor))
        raw[byte] ^= 1 << bit
    assert len(seen) == 1 + 8 * len(raw)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(7, 11),
        torch.randn(6, 4).t(),
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.randn(4, 1).expand(4, 3),
        torch.randn(5, dtype=torch.complex64).conj(),
        torch.randn(10)[::2],
    ],
    ids=["contiguous", "transposed", "channels_last", "expanded", "conjugated", "strided"],
)
def test_elements_count_in_logical_order_and_a_slice_is_what_it_would_be_alone(tensor: Tensor) -> None:
    alone = tensor.resolve_conj().contiguous()
    assert digest(tensor) == digest(alone)
    assert digest(tensor, 2, 5) == digest(alone.flatten()[2:5].clone())


@on_ranks(1, pool="simulated_ranks")
def test_a_device_has_the_digests_of_the_cpu(rank: int) -> None:
    device = torch.device(fake_cuda.DEVICE)
    digests = _C.Digests()
    for batch in [
        [torch.randn(5), torch.randn(4096), torch.randn(3, dtype=torch.bfloat16), torch.ones((), dtype=torch.int64)],
        [torch.randn(LARGE - 100), torch.randn(200), torch.randn(2 * LARGE + 10_007), torch.randn(9, 9).t()],
        [torch.arange(11, dtype=torch.uint8), torch.arange(11, dtype=torch.uint8)[1:]],
    ]:
        there: list[tuple[Tensor | None, int, int]] = [(tensor.to(device), 0, tensor.numel()) for tensor in batch]
        there[1:1] = [(None, 0, 4), (torch.ones(3), 0, 3)]  # nothing, and what is on the CPU
        expected = [digest(batch[0]), int(_C.Digests().of([(None, 0, 4)], CPU)), digest(torch.ones(3))]
        expected += [digest(tensor) for tensor in batch[1:]]
        assert digests.of(there, device).cpu().tolist() == expected
