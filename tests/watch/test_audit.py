"""Do replicas still agree: every flipped bit is found and named, and healthy steps say nothing."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer

import fastddp
from fake_cuda import DEVICE as SIMULATED
from fastddp import Corruption, comm_hooks
from fastddp.comm_hooks import CompressState, PostLocalSGDState, PowerSGDState
from fastddp.watch.audited_tensors import AuditedTensors
from logs import lines_of_the_logger
from models import RaisesOnRank
from ranks import RankPool

SIGN, EXPONENT, MANTISSA = 31, 24, 0
BITS = pytest.mark.parametrize("bit", [SIGN, EXPONENT, MANTISSA], ids=["sign", "exponent", "mantissa"])


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 5), nn.Tanh(), nn.Linear(5, 3))
        self.register_buffer("constant", torch.arange(4.0))
        self[0].bias.requires_grad = False


def flip(tensor: Tensor, bit: int, element: int = 0) -> None:
    with torch.no_grad():
        tensor.view(-1).view(torch.int32)[element] ^= torch.tensor(1 << bit).to(torch.int32)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range, device: str = "cpu") -> None:
    for step in steps:
        torch.manual_seed(100 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(4, 6).to(device)).square().sum().backward()
        optimizer.step()
        if device != "cpu":
            torch.accelerator.synchronize()  # what nobody waits for the simulated device does not do


Said = list[tuple[str, int, tuple[int, ...], str | None]]


def in_short(seen: list[Corruption]) -> Said:
    return [(one.kind, one.step, one.ranks, one.parameter) for one in seen]


def flipped(rank: int, bit: int, bad: int, device: str = "cpu") -> tuple[list[Said], str]:
    """What is said of a bit flipped after the third step: of a parameter, a frozen one, optimizer state, a buffer."""
    said = []
    messages = ""
    for what in ("parameter", "frozen", "state", "buffer"):
        seen: list[Corruption] = []
        torch.manual_seed(0)
        model = fastddp.DistributedDataParallel(
            Mlp().to(device), audit_every=1, on_corruption=seen.append, forward_sync_buffers=False
        )
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        model.audit(optimizer, buffers=["constant"])
        train(model, optimizer, rank, range(3), device)
        if rank == bad:
            module = model.module
            tensors = {"parameter": module[2].weight, "frozen": module[0].bias, "buffer": module.constant}
            tensors["state"] = optimizer.state[module[4].weight]["exp_avg"]
            flip(tensors[what], bit, element=2)
        train(model, optimizer, rank, range(3, 7), device)
        said.append(in_short(seen)[:1])
        messages += "\n".join(one.message for one in seen[:1])
    return said, messages


@pytest.mark.tier("slow", but_one_in=3)
@BITS
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_flipped_bit_is_found_and_named(ranks: RankPool, world_size: int, bit: int) -> None:
    bad = world_size - 2
    blamed = (0, 1) if world_size == 2 else (bad,)
    names = ["2.weight", "0.bias", "4.weight: exp_avg", "constant"]
    for said, messages in ranks.run(flipped, world_size, bit, bad):
        assert said == [[("replicas", 4, blamed, name)] for name in names]
        assert all(f"'{name}'" in messages for name in names)
        assert ("wrong on one of the two" in messages) == (world_size == 2)


@pytest.mark.tier("nightly")
def test_a_flipped_bit_is_found_on_a_device(simulated_ranks: RankPool) -> None:
    for said, _ in simulated_ranks.run(flipped, 3, SIGN, 1, SIMULATED):
        assert [[one[:3] for one in case] for case in said] == [[("replicas", 4, (1,))]] * 4


def told_once(rank: int) -> tuple[Said, Said]:
    """A difference that stays; and one that is mended and comes again."""
    seen: list[Corruption] = []
    model = fastddp.DistributedDataParallel(Mlp(), audit_every=2, on_corruption=seen.append)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    train(model, optimizer, rank, range(2))
    weight = model.module[2].weight
    if rank == 2:
        flip(weight, MANTISSA)
    train(model, optimizer, rank, range(2, 9))
    stayed = in_short(seen)
    seen.clear()
    for _ in range(2):
        with torch.no_grad():
            dist.broadcast(weight, 0)
        train(model, optimizer, rank, range(9, 13))
        if rank == 2:
            flip(weight, MANTISSA)
        train(model, optimizer, rank, range(13, 17))
    return stayed, in_short(seen)


def test_a_difference_is_told_once_until_it_is_gone(ranks: RankPool) -> None:
    for stayed, again in ranks.run(told_once, 3):
        assert [one[2:] for one in stayed] == [((2,), "2.weight")]
        assert [one[2:] for one in again] == [((2,), "2.weight")] * 2


def what_is_done(rank: int, on_corruption: Any) -> tuple[str, list[str]]:
    raised = ""
    with lines_of_the_logger() as records:
        model = fastddp.DistributedDataParallel(Mlp(), audit_every=1, on_corruption=on_corruption)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        if rank == 1:
            flip(model.module[0].weight, SIGN)
        try:
            train(model, optimizer, rank, range(4))
        except fastddp.CorruptionError as error:
            raised = error.corruption.parameter or ""
            train(model, optimizer, rank, range(4))  # all ranks are at the same step, and can go on
    return raised, records


@pytest.mark.parametrize("on_corruption", [None, "report"])
def test_report(ranks: RankPool, on_corruption: str | None) -> None:
    for raised, records in ranks.run(what_is_done, 3, on_corruption):
        assert not raised
        assert any("'0.weight' of rank 1 is not that of ranks 0, 2" in record for record in records)


def test_raise(ranks: RankPool) -> None:
    assert ranks.run(what_is_done, 3, "raise") == [("0.weight", [])] * 3


# -------------------------------------------------------------------------------------------------- what is looked at


@pytest.mark.parametrize("steps", [1, 2, 7, 100])
def test_a_round_has_every_element_once(steps: int) -> None:
    module = nn.Sequential(nn.Linear(300, 1000), nn.Conv2d(3, 5, 3), nn.Linear(9, 9), nn.LayerNorm(7))
    module[1].weight.data = module[1].weight.data.contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    tensors = AuditedTensors([*module.named_parameters()])
    tensors.add_optimizer(optimizer)
    found: dict[str, list[tuple[int, int]]] = {}
    parts = tensors.round(steps).parts
    assert len(parts) == steps
    for part in parts:
        for name, (_, begin, end) in zip(part.names, part.slices, strict=True):
            found.setdefault(name, []).append((begin, end))
    expected = {name: p.numel() for name, p in module.named_parameters()}
    for name, p in module.named_parameters():
        expected |= {f"{name}: {key}": value.numel() for key, value in optimizer.state[p].items()}
    assert found.keys() == expected.keys()
    for name, slices in found.items():
        assert [begin for begin, _ in slices] == [0, *(end for _, end in slices[:-1])]
        assert slices[-1][1] == expected[name]


def test_parts_are_about_even() -> None:
    torch.manual_seed(0)
    sizes = [*torch.randint(1, 50_000, (200,)).tolist(), 3_000_000]
    tensors = AuditedTensors([(str(number), torch.empty(size)) for number, size in enumerate(sizes)])
    parts = tensors.round(20).parts
    in_part = [4 * sum(end - begin for _, begin, end in part.slices) for part in parts]
    mean = sum(in_part) / len(in_part)
    assert max(in_part) < 1.6 * mean
    assert min(in_part) > 0.4 * mean


def all_found(rank: int, every: int) -> int:
    """How many of the parameters are reported within a round, and a few steps, of one flip in each of them."""
    seen: list[Corruption] = []
    model = fastddp.DistributedDataParallel(
        nn.Sequential(*(nn.Linear(6, 6) for _ in range(40))), audit_every=every, on_corruption=seen.append
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    train(model, optimizer, rank, range(3))
    if rank == 0:
        for parameter in model.parameters():
            flip(parameter, MANTISSA)
    train(model, optimizer, rank, range(3, 3 + every + every // 10 + 2))
    audit = model._audit
    return len(audit._differing) if all(one.kind == "replicas" for one in seen) else -1


@pytest.mark.parametrize("every", [1, 5, 30])
def test_everything_is_looked_at_within_a_round(ranks: RankPool, every: int) -> None:
    # In a window of which more than 128 or 32 tensors are compared, several have one digest.
    assert ranks.run(all_found, 3, every) == [80] * 3


def names_compared(rank: int) -> set[str]:
    """Behind the first steps of a long round."""
    model = fastddp.DistributedDataParallel(Mlp(), audit_every=50, on_corruption="raise")
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    model.audit(optimizer)
    train(model, optimizer, rank, range(3))
    assert model._audit._round is not None
    return {name for part in model._audit._round.parts for name in part.names}


def test_state_is_compared_as_soon_as_it_is_there(ranks: RankPool) -> None:
    for names in ranks.run(names_compared, 2):
        assert {"0.bias", "2.weight", "2.weight: exp_avg", "4.bias: exp_avg_sq"} <= names


def collectives(rank: int, every: int, windows: int) -> dict[str, int]:
    """How often each is called in so many steps, once buckets are final."""
    model = fastddp.DistributedDataParallel(Mlp(), audit_every=every, forward_sync_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    train(model, optimizer, rank, range(2 * every))
    names = ["all_gather", "all_to_all_single", "all_reduce", "broadcast", "barrier", "all_gather_object"]
    with mock.patch.multiple(dist, **{name: mock.Mock(wraps=getattr(dist, name)) for name in names}):
        train(model, optimizer, rank, range(windows))
        return {name: count for name in names if (count := getattr(dist, name).call_count)}


@pytest.mark.parametrize(
    ("every", "windows", "expected"),
    [
        (1, 6, {"all_gather": 6, "all_to_all_single": 6}),
        (10, 20, {"all_gather": 20, "all_to_all_single": 2}),
        (40, 80, {"all_gather": 20, "all_to_all_single": 2}),
    ],
)
def test_collectives_of_a_round(ranks: RankPool, every: int, windows: int, expected: dict[str, int]) -> None:
    assert ranks.run(collectives, 2, every, windows) == [expected] * 2


def other_optimizers(rank: int) -> Said:
    """Rank 1 has optimizer state that the others do not have."""
    seen: list[Corruption] = []
    model = fastddp.DistributedDataParallel(Mlp(), audit_every=2, on_corruption=seen.append)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9 if rank == 1 else 0.0)
    model.audit(optimizer)
    train(model, optimizer, rank, range(8))
    return in_short(seen)[:1]


def test_ranks_that_have_other_tensors(ranks: RankPool) -> None:
    assert [[one[2:] for one in said] for said in ranks.run(other_optimizers, 3)] == [[((1,), None)]] * 3


# -------------------------------------------------------------------------------------------------------- no alarm


def hooked(rank: int, hook: str) -> fastddp.DistributedDataParallel:
    """A model that raises as soon as its audit finds something, with an exchange."""
    torch.manual_seed(0)
    model = fastddp.DistributedDataParallel(Mlp(), audit_every=3, on_corruption="raise", bucket_cap_mb=0.0003)
    if hook == "power_sgd":
        state = PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.1)
        model.register_comm_hook(state, comm_hooks.powerSGD_hook)
    elif hook == "local_sgd":
        subgroup, _ = dist.new_subgroups(2)
        model.register_comm_hook(PostLocalSGDState(None, subgroup, 4), comm_hooks.post_localSGD_hook)
    elif hook == "python":
        model.register_comm_hook(None, lambda state, bucket: default_hooks.allreduce_hook(state, bucket))
    elif hook == "subgroup":
        model.register_comm_hook(dist.new_subgroups(2)[0], comm_hooks.allreduce_hook)
    elif hook == "fp16 sums":
        model.register_comm_hook(CompressState(accumulate="wire"), comm_hooks.fp16_compress_hook)
    elif hook != "none":
        model.register_comm_hook(None, getattr(comm_hooks, f"{hook}_hook"))
    return model


def healthy(rank: int, hook: str) -> int:
    model = hooked(rank, hook)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model.audit(optimizer)
    train(model, optimizer, rank, range(14))
    return model.reducer.windows()


@pytest.mark.parametrize(
    "hook",
    ["none", "fp16_compress", "bf16_compress", "fp16 sums", "power_sgd", "python", "noop", "local_sgd", "subgroup"],
)
def test_no_alarm_under_any_exchange(ranks: RankPool, hook: str) -> None:
    assert ranks.run(healthy, 4, hook) == [14] * 4


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor, number: int, fails: bool = False) -> Tensor:
        return RaisesOnRank.apply(self.norm(self.layers[number](x)), fails)


def eventful(rank: int, options: dict[str, Any]) -> int:
    """Accumulation, forwards without a backward, windows that fail, and parameters that are used on some ranks only."""
    torch.manual_seed(0)
    model = fastddp.DistributedDataParallel(
        Branches(), audit_every=2, on_corruption="raise", find_unused_parameters=True, **options
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model.audit(optimizer)
    for step in range(20):
        x = torch.randn(4, 6)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if step % 3 == 1:
            with model.no_sync():
                model(x, step % 3).sum().backward()
        if step % 5 == 1:
            model(x, 0)
        if step % 5 == 2:
            with torch.no_grad():
                model(x, 0)
        fails = step % 7 == 3
        loss = model(x, (step + rank) % 3 if step % 4 == 0 else step % 3, fails and rank == 1).square().sum()
        try:
            loss.backward()
        except (RuntimeError, ValueError):
            assert fails
            continue
        optimizer.step()
    return model.reducer.windows()


@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}, {"gradient_average": "sum"}], ids=["plain", "views", "sum"]
)
def test_no_alarm_in_eventful_training(ranks: RankPool, options: dict[str, Any]) -> None:
    assert len(set(ranks.run(eventful, 3, options))) == 1


def forwards_of_its_own(rank: int) -> tuple[Said, int]:
    """Rank 1 runs more forwards than the others, without a backward."""
    seen: list[Corruption] = []
    torch.manual_seed(0)
    model = fastddp.DistributedDataParallel(Mlp(), audit_every=1, on_corruption=seen.append, forward_sync_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(6):
        for _ in range(2 * (rank == 1)):
            model(torch.randn(4, 6))
        train(model, optimizer, rank, range(step, step + 1))
    return in_short(seen), model._audit._audited


def test_windows_are_audited_and_not_forwards(ranks: RankPool) -> None:
    assert ranks.run(forwards_of_its_own, 2) == [([], 6)] * 2


def joined(rank: int) -> Said:
    seen: list[Corruption] = []
    torch.manual_seed(0)
    model = fastddp.DistributedDataParallel(Mlp(), audit_every=1, on_corruption=seen.append)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(2):
        with model.join():
            train(model, optimizer, rank, range(3 + 2 * rank))
    return in_short(seen)


def test_no_alarm_where_ranks_run_out_of_inputs(ranks: RankPool) -> None:
    assert ranks.run(joined, 3) == [[]] * 3


def on_simulated(rank: int) -> int:
    torch.manual_seed(0)
    model = fastddp.DistributedDataParallel(Mlp().to(SIMULATED), audit_every=2, on_corruption="raise")
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model.audit(optimizer)
    train(model, optimizer, rank, range(12), SIMULATED)
    assert len(model._audit._sent) <= 3  # answers are read
    return model._audit._audited


def test_no_alarm_on_a_device(simulated_ranks: RankPool) -> None:
    assert simulated_ranks.run(on_simulated, 2) == [12] * 2


# ------------------------------------------------------------------------------------------------------------- errors


def refused(rank: int) -> None:
    for value in (0, -1, 1.5, True, "10"):
        with pytest.raises((TypeError, ValueError), match=f"audit_every is .* or None for no audit, .*{value}"):
            fastddp.DistributedDataParallel(Mlp(), audit_every=value)
    unaudited = fastddp.DistributedDataParallel(Mlp())
    with pytest.raises(RuntimeError, match=r"adds to what audit_every=N compares"):
        unaudited.audit()
    model = fastddp.DistributedDataParallel(Mlp(), audit_every=1)
    with pytest.raises(TypeError, match=r"takes a torch.optim.Optimizer, not DistributedDataParallel"):
        model.audit(model)
    with pytest.raises(ValueError, match=r"none of the model's parameters"):
        model.audit(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1))
    with pytest.raises(ValueError, match=r"buffer that the module does not have: '2.running_mean'"):
        model.audit(buffers=["2.running_mean"])
    with pytest.raises(ValueError, match=r"that all ranks have alike, and ZeroRedundancyOptimizer"):
        model.audit(ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1))


def test_what_is_refused(ranks: RankPool) -> None:
    ranks.run(refused, 1)
