"""The simulated device can be trusted: it shows errors of order and lifetime, and none where there are none.

Everything that touches the device runs in rank processes, which have it for good.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fake_cuda
from ranks import RankPool

DEVICE = fake_cuda.DEVICE
ORDERS = ["lazy", "others_first", "random"]
SEEDS = range(8)
LENGTH = 100


def stream(device: int = 0) -> torch.Stream:
    return torch.Stream(device=torch.device(DEVICE, device))


def full(value: float) -> Tensor:
    return torch.full((LENGTH,), float(value), device=DEVICE)


def current() -> torch.Stream:
    return torch.accelerator.current_stream()


def message_of(action: Callable[[], object]) -> str:
    """The first line of what it raises; empty if it raises nothing."""
    try:
        action()
    except (RuntimeError, IndexError) as error:
        return str(error).splitlines()[0]
    return ""


# ------------------------------------------------------------------------------------------------- order of work


def read_of_what_another_stream_writes(rank: int, order: str, seed: int, wait: bool) -> bool:
    target = full(0)
    writer, reader = stream(), stream()
    torch.accelerator.synchronize()
    fake_cuda.schedule(order, seed)
    with writer:
        target.fill_(7)
    with reader:
        if wait:
            reader.wait_stream(writer)
        result = bool((target + 0 == 7).all())
    torch.accelerator.synchronize()  # before the memory goes
    return result


def read_of_what_another_stream_overwrites(rank: int, order: str, seed: int, wait: bool) -> bool:
    target = full(7)
    writer, reader = stream(), stream()
    torch.accelerator.synchronize()
    fake_cuda.schedule(order, seed)
    with reader:
        copy = target + 0
    with writer:
        if wait:
            writer.wait_stream(reader)
        target.fill_(0)
    with reader:
        result = bool((copy == 7).all())
    torch.accelerator.synchronize()
    return result


def read_of_memory_freed_on_its_own_stream(rank: int, order: str, seed: int, wait: bool) -> bool:
    reader = stream()
    target = full(7)
    reader.wait_stream(current())
    torch.accelerator.synchronize()
    fake_cuda.schedule(order, seed)
    with reader:
        copy = target + 0
        if wait:
            target.record_stream(reader)
    del target
    with reader:
        return bool((copy == 7).all())


HAZARDS = [
    (read_of_what_another_stream_writes, "lazy"),
    (read_of_what_another_stream_overwrites, "others_first"),
    (read_of_memory_freed_on_its_own_stream, "others_first"),
]


@pytest.mark.parametrize(("hazard", "order"), HAZARDS, ids=[hazard.__name__ for hazard, _ in HAZARDS])
def test_without_a_wait_the_wrong_value_is_read(
    simulated_ranks: RankPool, hazard: Callable[..., bool], order: str
) -> None:
    assert simulated_ranks.run(hazard, 1, order, 0, wait=False) == [False]
    assert not all(simulated_ranks.run(hazard, 1, "random", seed, wait=False)[0] for seed in SEEDS)
    assert simulated_ranks.run(hazard, 1, "in_order", 0, wait=False) == [True]


@pytest.mark.parametrize("hazard", [hazard for hazard, _ in HAZARDS])
def test_with_a_wait_never(simulated_ranks: RankPool, hazard: Callable[..., bool]) -> None:
    for order in [*ORDERS, "in_order"]:
        for seed in SEEDS:
            assert simulated_ranks.run(hazard, 1, order, seed, wait=True) == [True]


def enqueued(rank: int) -> tuple[list[str], list[str]]:
    fake_cuda.schedule()
    tensor = full(1).mul_(2)
    before = fake_cuda.history()
    torch.accelerator.synchronize()
    del tensor
    return before, fake_cuda.history()


def test_nothing_runs_before_the_host_waits(simulated_ranks: RankPool) -> None:
    assert simulated_ranks.run(enqueued, 1) == [([], ["aten::fill_", "aten::mul"])]


def events(rank: int) -> list[str]:
    fake_cuda.schedule()
    a, b = stream(), stream()
    event = torch.Event(DEVICE)
    tensor = torch.zeros(1, device=DEVICE)
    torch.accelerator.synchronize()
    fake_cuda.reset_records()
    b.wait_event(event)  # never recorded: nothing to wait for
    with a:
        tensor.add_(1)
    event.record(a)
    b.wait_event(event)
    with a:
        tensor.mul_(2)
    event.record(a)  # what b waits for is what was recorded then
    b.synchronize()
    first = fake_cuda.history()
    event.synchronize()
    return [*first, "|", *fake_cuda.history()[len(first) :]]


def test_an_event_is_what_it_was_when_the_wait_was_asked_for(simulated_ranks: RankPool) -> None:
    assert [name for name in simulated_ranks.run(events, 1)[0] if name != "wait"] == ["aten::add", "|", "aten::mul"]


def polled(rank: int) -> int:
    fake_cuda.schedule()
    full(1).mul_(2)
    event = torch.Event(DEVICE)
    event.record(current())
    asked = 1
    while not event.query():
        asked += 1
    return asked


def test_a_loop_of_queries_ends(simulated_ranks: RankPool) -> None:
    assert 1 < simulated_ranks.run(polled, 1)[0] < 10


def failing(rank: int) -> tuple[str, str]:
    fake_cuda.schedule()
    F.embedding(torch.tensor([5], device=DEVICE), torch.zeros(2, 2, device=DEVICE))
    return message_of(torch.accelerator.synchronize), message_of(torch.accelerator.synchronize)


def test_what_an_operation_raises_is_raised_once_by_the_next_wait(simulated_ranks: RankPool) -> None:
    first, second = simulated_ranks.run(failing, 1)[0]
    assert "index out of range" in first
    assert "aten::index_select" in first
    assert second == ""


# --------------------------------------------------------------------------------------------------------- waits


def what_waits(rank: int) -> dict[str, int]:
    fake_cuda.schedule()
    other = stream()
    tensor, pinned = full(1), torch.empty(LENGTH).pin_memory()
    event = torch.Event(DEVICE)
    event.record(other)
    actions: dict[str, Callable[[], object]] = {
        "item": lambda: tensor[0].item(),
        "to the host": lambda: tensor.cpu(),
        "to the device": lambda: torch.ones(2).to(DEVICE),
        "nonzero": lambda: tensor.nonzero(),
        "stream": other.synchronize,
        "event": event.synchronize,
        "device": torch.accelerator.synchronize,
        "to pinned memory": lambda: pinned.copy_(tensor, non_blocking=True),
        "from the host, not blocking": lambda: torch.ones(2).to(DEVICE, non_blocking=True),
        "wait of a stream": lambda: other.wait_stream(current()),
        "query": event.query,
        "arithmetic": lambda: (tensor * 2).sum(),
    }
    counts = {}
    for name, action in actions.items():
        fake_cuda.reset_records()
        action()
        counts[name] = len(fake_cuda.host_waits())
    torch.accelerator.synchronize()  # before pinned memory goes
    return counts


def test_waits_of_the_host_are_counted(simulated_ranks: RankPool) -> None:
    waits = ["item", "to the host", "to the device", "nonzero", "stream", "event", "device"]
    counts = simulated_ranks.run(what_waits, 1)[0]
    assert {name for name, count in counts.items() if count == 1} == set(waits)
    assert {count for name, count in counts.items() if name not in waits} == {0}


def forbidden(rank: int) -> list[str]:
    fake_cuda.schedule()
    tensor = full(1)
    with fake_cuda.without_waits():
        inside = message_of(tensor.sum().item)
    return [inside, message_of(tensor.sum().item)]


def test_a_wait_raises_where_waits_are_forbidden(simulated_ranks: RankPool) -> None:
    text = "the host waits for the device (the value of a tensor) where it must not"
    assert simulated_ranks.run(forbidden, 1) == [[text, ""]]


# -------------------------------------------------------------------------------------------------------- memory


def fresh_memory(rank: int) -> list[bool]:
    fake_cuda.schedule()
    dtypes = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
    return [bool(torch.empty(LENGTH, dtype=dtype, device=DEVICE).isnan().all()) for dtype in dtypes]


def test_fresh_memory_is_not_a_number(simulated_ranks: RankPool) -> None:
    assert all(simulated_ranks.run(fresh_memory, 1)[0])


def reuse(rank: int, recorded: bool) -> list[bool]:
    fake_cuda.schedule()
    other, size = stream(), 5000
    tensor = torch.zeros(size, device=DEVICE)
    address = tensor.data_ptr()
    if recorded:
        with other:
            tensor.add_(1)
        tensor.record_stream(other)
    del tensor
    same = []
    for synchronized in (False, True):
        if synchronized:
            torch.accelerator.synchronize()
        tensors = [torch.empty(size, device=DEVICE) for _ in range(2)]
        same.append(any(tensor.data_ptr() == address for tensor in tensors))
        del tensors
    return same


def test_freed_memory_is_given_out_again_when_its_users_are_done(simulated_ranks: RankPool) -> None:
    assert simulated_ranks.run(reuse, 1, recorded=False) == [[True, True]]
    assert simulated_ranks.run(reuse, 1, recorded=True) == [[False, True]]


def accounted(rank: int) -> list[int]:
    before = fake_cuda.allocated_bytes()
    fake_cuda.reset_peak()
    tensor = torch.empty(1000, dtype=torch.uint8, device=DEVICE)
    during = fake_cuda.allocated_bytes()
    del tensor
    return [during - before, fake_cuda.allocated_bytes() - before, fake_cuda.peak_bytes() - before]


def test_memory_is_accounted_for(simulated_ranks: RankPool) -> None:
    assert simulated_ranks.run(accounted, 1) == [[1024, 0, 1024]]


def staging(rank: int, pinned: bool, order: str) -> float:
    fake_cuda.schedule(order)
    source = torch.ones(LENGTH)
    source = source.pin_memory() if pinned else source
    target = source.to(DEVICE, non_blocking=True)
    source.fill_(5)
    return target.mean().item()


@pytest.mark.parametrize("order", ORDERS)
def test_pinned_memory_is_read_when_the_copy_runs_and_pageable_memory_at_once(
    simulated_ranks: RankPool, order: str
) -> None:
    assert simulated_ranks.run(staging, 1, True, order) == [5]
    assert simulated_ranks.run(staging, 1, False, order) == [1]


def freed_staging(rank: int, order: str) -> list[object]:
    fake_cuda.schedule(order)
    source = torch.ones(LENGTH).pin_memory()
    address = source.data_ptr()
    target = source.to(DEVICE, non_blocking=True)
    del source
    reused = torch.empty(LENGTH).pin_memory().data_ptr() == address
    return [reused, target.mean().item()]


@pytest.mark.parametrize("order", ORDERS)
def test_freed_pinned_memory_waits_for_its_copies(simulated_ranks: RankPool, order: str) -> None:
    assert simulated_ranks.run(freed_staging, 1, order) == [[False, 1.0]]


def resized(rank: int) -> list[list[float]]:
    fake_cuda.schedule()
    tensor = torch.tensor([1.0, 2.0], device=DEVICE)
    grown = tensor.clone().resize_(300)[:2]
    alias = torch.empty(0, device=DEVICE).set_(tensor.untyped_storage(), 1, (1,), (1,))
    emptied = torch.ones(3, device=DEVICE)
    emptied.untyped_storage().resize_(0)
    return [grown.tolist(), alias.tolist(), [emptied.untyped_storage().nbytes()]]


def test_storages_can_be_resized_and_set(simulated_ranks: RankPool) -> None:
    assert simulated_ranks.run(resized, 1) == [[[1, 2], [2], [0]]]


# ------------------------------------------------------------------------------------------------------ training


class Net(nn.Module):
    """A bit of everything: embedding, attention by hand, norms, convolution, activations."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.qkv = nn.Linear(16, 48)
        self.norm = nn.LayerNorm(16)
        self.convolution = nn.Conv2d(1, 3, 3, padding=1)
        self.batch_norm = nn.BatchNorm2d(3)
        self.out = nn.Linear(48, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        q, k, v = self.qkv(hidden).chunk(3, -1)
        hidden = self.norm(hidden + F.gelu(torch.softmax(q @ k.transpose(-1, -2) / 4, -1) @ v))
        channels = F.relu(self.batch_norm(self.convolution(hidden.unsqueeze(1))))
        return self.out(channels.permute(0, 2, 1, 3).flatten(2))


def losses(device: str, dtype: torch.dtype, optimizer: str) -> list[float]:
    torch.manual_seed(0)
    model = Net().to(dtype).to(device)
    kinds = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, foreach=False),
        "adam": lambda: torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False),
    }
    steps = kinds[optimizer]()
    values = []
    for step in range(4):
        tokens = torch.randint(0, 20, (4, 6), generator=torch.Generator().manual_seed(step)).to(device)
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) + F.mse_loss(logits, torch.zeros_like(logits))
        steps.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        steps.step()
        values.append(loss.detach())
    return [value.item() for value in values]


def compare_losses(rank: int, order: str, dtype: torch.dtype, optimizer: str) -> tuple[list[float], list[float]]:
    fake_cuda.schedule(order)
    return losses(DEVICE, dtype, optimizer), losses("cpu", dtype, optimizer)


@pytest.mark.tier("slow", but_one_in=5)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_training_gives_the_losses_of_the_cpu(
    simulated_ranks: RankPool, order: str, dtype: torch.dtype, optimizer: str
) -> None:
    ((ours, expected),) = simulated_ranks.run(compare_losses, 1, order, dtype, optimizer)
    assert ours == expected


def elementwise(rank: int, dtype: torch.dtype) -> bool:
    fake_cuda.schedule("random")
    host = torch.randn(LENGTH, dtype=torch.complex64 if dtype.is_complex else torch.float32).to(dtype)
    device = host.to(DEVICE)
    return torch.equal((device * 2 + device.conj()).t().cpu(), (host * 2 + host.conj()).t())


@pytest.mark.parametrize("dtype", [torch.float16, torch.complex64, torch.complex128, torch.int32], ids=str)
def test_arithmetic_is_that_of_the_cpu(simulated_ranks: RankPool, dtype: torch.dtype) -> None:
    assert simulated_ranks.run(elementwise, 1, dtype) == [True]


def random_numbers(rank: int, order: str) -> list[float]:
    fake_cuda.schedule(order)
    torch.manual_seed(1)
    a, b = torch.empty(3, device=DEVICE), torch.empty(3, device=DEVICE)
    other = stream()
    other.wait_stream(current())
    with other:
        a.normal_()
    b.uniform_()
    torch.accelerator.synchronize()
    return [*a.tolist(), *b.tolist()]


def test_random_numbers_do_not_depend_on_the_order(simulated_ranks: RankPool) -> None:
    results = [simulated_ranks.run(random_numbers, 1, order)[0] for order in ORDERS]
    assert results[0] == results[1] == results[2]


def backward_on_two_streams(rank: int, order: str, seed: int) -> list[bool]:
    fake_cuda.schedule(order, seed)
    streams = stream(), stream()
    weights = [full(value).requires_grad_() for value in (2, 3)]
    parts = []
    for own, weight in zip(streams, weights, strict=True):
        own.wait_stream(current())
        with own:
            parts.append((weight * weight * 5).sum())
        current().wait_stream(own)
    (parts[0] * parts[1]).backward()
    expected = 2 * 2 * 5 * (9 * 5 * LENGTH), 2 * 3 * 5 * (4 * 5 * LENGTH)
    return [bool((weight.grad == value).all()) for weight, value in zip(weights, expected, strict=True)]


@pytest.mark.parametrize("order", ORDERS)
def test_autograd_orders_streams(simulated_ranks: RankPool, order: str) -> None:
    for seed in SEEDS:
        assert simulated_ranks.run(backward_on_two_streams, 1, order, seed) == [[True, True]]
