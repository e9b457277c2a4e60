"""Memory of wires on the simulated device: lent for a window (lazy_bucket_allocation), or a process group's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fake_cuda
import fastddp
import square_layers
from fastddp import comm_hooks
from ranks import RankPool
from square_layers import HOOKS, LAYERS, WIDTH, backward

DEVICE = fake_cuda.DEVICE
ORDERS = ["lazy", "others_first", "random"]
ELEMENTS = LAYERS * WIDTH * WIDTH


def wrapped(hook: str, **options: Any) -> fastddp.DistributedDataParallel:
    return square_layers.wrapped(hook, DEVICE, on_stall=None, **options)


# ----------------------------------------------------------------------------------------------------------- lent wires


def bytes_between_windows(rank: int, hook: str, lazy: bool) -> list[int]:
    fake_cuda.schedule("in_order")
    model = wrapped(hook, lazy_bucket_allocation=lazy)
    found = []
    for step in range(6):
        backward(model, rank, step)
        model.zero_grad()
        fake_cuda.synchronize()
        found.append(fake_cuda.allocated_bytes())
    return found


def saved(ranks: RankPool, hook: str) -> list[int]:
    """Bytes between the last windows, on each rank."""
    kept, lent = (ranks.run(bytes_between_windows, 2, hook, lazy) for lazy in (False, True))
    return [a[-1] - b[-1] for a, b in zip(kept, lent, strict=True)]


def test_a_cast_wire_is_not_there_between_windows(simulated_ranks: RankPool) -> None:
    assert saved(simulated_ranks, "wire") == [2 * ELEMENTS] * 2


def test_nor_is_the_room_in_which_ranks_add_up(simulated_ranks: RankPool) -> None:
    assert saved(simulated_ranks, "fp32") == [2 * 2 * ELEMENTS] * 2


def test_nor_are_wires_of_8_bits_and_their_sums(simulated_ranks: RankPool) -> None:
    for rank in saved(simulated_ranks, "int8"):
        assert 2 * ELEMENTS < rank < 3 * ELEMENTS  # a byte and a scale's share, twice


def test_nor_are_factors(simulated_ranks: RankPool) -> None:
    factor = 4 * 4 * WIDTH  # bytes
    assert saved(simulated_ranks, "power_sgd") == [2 * LAYERS * factor] * 2


def test_wires_in_which_gradients_live_stay(simulated_ranks: RankPool) -> None:
    assert saved(simulated_ranks, "") == [0] * 2


def train(rank: int, hook: str, order: str, options: dict[str, Any], fails: bool = False) -> list[Tensor]:
    fake_cuda.schedule(order, 3)
    model = wrapped(hook, **options)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    found = []
    for step in range(5):
        optimizer.zero_grad()
        if fails and step == 3:
            fail_on_rank_0(model, optimizer, rank, step)
            continue
        backward(model, rank, step)
        found.append(model.last_grad_norm().cpu())
        # What comes next gets the memory that wires have given back.
        others = [torch.full((n,), 3.0, device=DEVICE) for n in (128, 1024, WIDTH * WIDTH // 2, WIDTH * WIDTH) * 3]
        optimizer.step()
        found += [parameter.detach().cpu() for parameter in model.parameters()]
        assert all(bool((other.cpu() == 3.0).all()) for other in others)
    return found


def fail_on_rank_0(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    """When one bucket is on its way; the other rank hears of it when its device has."""

    def fail(_: Tensor) -> None:
        raise ValueError("as asked for")

    if rank == 0:
        handle = model.module[1].weight.register_hook(fail)
        with pytest.raises(ValueError, match="as asked for"):
            backward(model, rank, step)
        handle.remove()
        with pytest.warns(UserWarning, match="as asked for"):
            model(torch.zeros(1, WIDTH, device=DEVICE))
    else:
        backward(model, rank, step)
        fake_cuda.synchronize()
        with pytest.raises(RuntimeError, match="failed on rank 0"):
            optimizer.step()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("fails", [False, True], ids=["", "one window fails"])
def test_steps_with_lent_wires_are_those_with_kept_ones(
    simulated_ranks: RankPool, hook: str, order: str, fails: bool
) -> None:
    kept, lent = (
        simulated_ranks.run(train, 2, hook, order, {"lazy_bucket_allocation": lazy}, fails) for lazy in (False, True)
    )
    for a, b in zip(kept, lent, strict=True):
        assert all(map(torch.equal, a, b))


def replayed(rank: int, hook: str, lazy: bool) -> list[Tensor]:
    fake_cuda.schedule("lazy", 3)
    extension = fake_cuda.build()
    with torch.Stream(device=DEVICE):
        model = wrapped(hook, lazy_bucket_allocation=lazy)
        static = torch.ones(4, WIDTH).to(DEVICE)

        def step() -> None:
            model.zero_grad()
            model(static).square().sum().backward()

        for _ in range(4):
            step()
        torch.accelerator.synchronize()
        model.zero_grad()
        extension.begin_capture()
        step()
        graph = extension.end_capture()
        captured = [parameter.grad for parameter in model.parameters()]
        found = []
        for number in range(3):
            static.copy_(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * rank + number)))
            graph.replay()
            found += [gradient.cpu() for gradient in captured]
            step()  # and eager steps between replays
            found += [parameter.grad.cpu() for parameter in model.parameters()]
            others = [torch.full((WIDTH * WIDTH // 2,), 3.0, device=DEVICE) for _ in range(8)]
            del others
    return found


def test_a_captured_graph_keeps_its_wires(simulated_ranks: RankPool) -> None:
    kept, lent = (simulated_ranks.run(replayed, 2, "wire", lazy) for lazy in (False, True))
    for a, b in zip(kept, lent, strict=True):
        assert all(map(torch.equal, a, b))


# ------------------------------------------------------------------------------------------------- the group's memory


@contextlib.contextmanager
def memory_is_offered() -> Iterator[None]:
    fake_cuda.offer_memory(True)
    try:
        yield
    finally:
        fake_cuda.offer_memory(False)


def sizes_asked_for(rank: int, hook: str, options: dict[str, Any]) -> list[list[int]]:
    """By step: bytes that the group was asked for, in order."""
    fake_cuda.schedule("in_order")
    with memory_is_offered():
        model = wrapped(hook, **options)
        found = []
        for step in range(4):
            before = len(fake_cuda.memory_asked_for())
            model.zero_grad()
            backward(model, rank, step)
            found.append([size for _, size in fake_cuda.memory_asked_for()[before:]])
    return found


LAYER = WIDTH * WIDTH


def test_buckets_travel_in_memory_of_the_groups(simulated_ranks: RankPool) -> None:
    expected = [[4 * LAYER] * LAYERS, [], [], []]
    assert simulated_ranks.run(sizes_asked_for, 2, "", {}) == [expected] * 2


def test_so_do_cast_gradients(simulated_ranks: RankPool) -> None:
    expected = [[2 * LAYER] * LAYERS, [], [], []]
    assert simulated_ranks.run(sizes_asked_for, 2, "wire", {}) == [expected] * 2


def test_lent_wires_are_asked_for_in_every_window_in_the_plans_order(simulated_ranks: RankPool) -> None:
    expected = [[2 * LAYER] * LAYERS] * 4
    assert simulated_ranks.run(sizes_asked_for, 2, "wire", {"lazy_bucket_allocation": True}) == [expected] * 2


@pytest.mark.parametrize("hook", ["int8", "power_sgd"])
def test_messages_of_codecs_travel_there_too(simulated_ranks: RankPool, hook: str) -> None:
    first, second = simulated_ranks.run(sizes_asked_for, 2, hook, {})
    assert first == second
    assert sum(map(len, first)) > LAYERS


def test_wires_stay_where_they_are_without_such_memory(simulated_ranks: RankPool) -> None:
    assert simulated_ranks.run(asked_without_offer, 2) == [[], []]


def asked_without_offer(rank: int) -> list[tuple[int, int]]:
    fake_cuda.schedule("in_order")
    fake_cuda.offer_memory(False)
    backward(wrapped(""), rank, 0)
    return fake_cuda.memory_asked_for()


def gradients_and_memory(rank: int) -> bool:
    fake_cuda.schedule("in_order")
    with memory_is_offered():
        model = wrapped("")
        backward(model, rank, 0)
        memory = dict(fake_cuda.memory_asked_for())
        return all(parameter.grad.untyped_storage().data_ptr() in memory for parameter in model.parameters())


def test_gradients_live_there(simulated_ranks: RankPool) -> None:
    assert simulated_ranks.run(gradients_and_memory, 2) == [True, True]


def asked_for_by_a_rank_that_keeps_gradients(rank: int) -> tuple[int, bool]:
    fake_cuda.schedule("in_order")
    with memory_is_offered():
        model = wrapped("")
        held = []
        for step in range(4):
            model.zero_grad()
            backward(model, rank, step)
            if rank == 1:
                held += [parameter.grad for parameter in model.parameters()]
        memory = dict(fake_cuda.memory_asked_for())
        there = all(parameter.grad.untyped_storage().data_ptr() in memory for parameter in model.parameters())
        return len(fake_cuda.memory_asked_for()), there


def test_what_a_rank_keeps_is_replaced_by_ordinary_memory_so_that_ranks_ask_alike(simulated_ranks: RankPool) -> None:
    assert simulated_ranks.run(asked_for_by_a_rank_that_keeps_gradients, 2) == [(LAYERS, True), (LAYERS, False)]


def asked_for_in_any_order(rank: int, hook: str) -> list[int]:
    """The ranks' gradients come in opposite orders."""
    fake_cuda.schedule("random", rank)
    with memory_is_offered():
        torch.manual_seed(0)
        module = Fan().to(DEVICE)
        model = fastddp.DistributedDataParallel(module, bucket_cap_mb=1e-6, on_stall=None, lazy_bucket_allocation=True)
        model.register_comm_hook(comm_hooks.CompressState(accumulate=hook), comm_hooks.bf16_compress_hook)
        for _ in range(3):
            model.zero_grad()
            model(rank == 0).backward()
        return [size for _, size in fake_cuda.memory_asked_for()]


class Fan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.ones(16 * (1 + number)) for number in range(4))

    def forward(self, forwards: bool) -> Tensor:
        parts = list(self.parts) if forwards else list(reversed(self.parts))
        total = parts[0].sum()
        for part in parts[1:]:
            total = total + part.square().sum()
        return total


def test_ranks_ask_in_one_order_whatever_comes_first_on_each(simulated_ranks: RankPool) -> None:
    first, second = simulated_ranks.run(asked_for_in_any_order, 2, "wire")
    assert first == second
    assert len(first) == 3 * 4


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("lazy", [False, True], ids=["kept", "lent"])
@pytest.mark.parametrize("hook", ["", *HOOKS])
def test_steps_in_the_groups_memory_are_those_in_ordinary_one(
    simulated_ranks: RankPool, hook: str, lazy: bool, order: str
) -> None:
    options = {"lazy_bucket_allocation": lazy}
    expected = simulated_ranks.run(train, 2, hook, order, options)
    for a, b in zip(simulated_ranks.run(in_the_groups_memory, 2, hook, order, options), expected, strict=True):
        assert all(map(torch.equal, a, b))


def in_the_groups_memory(rank: int, hook: str, order: str, options: dict[str, Any]) -> list[Tensor]:
    with memory_is_offered():
        found = train(rank, hook, order, options)
        assert fake_cuda.memory_asked_for()
    return found
