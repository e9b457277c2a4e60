"""Collectives and graphs of the simulated device are ordered by streams, and move data between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

import fake_cuda
from ranks import RankPool
from test_fake_cuda_device import DEVICE, LENGTH, ORDERS, SEEDS, current, full, message_of, stream

# --------------------------------------------------------------------------------------------------------- collectives


def all_collectives(rank: int, order: str) -> dict[str, list[float]]:
    fake_cuda.schedule(order)
    device = torch.device(DEVICE, rank)
    mine = torch.tensor([1.0 + rank, 2.0], device=device)
    total, mean, first = mine.clone(), mine.clone(), mine.clone()
    gathered = [torch.empty_like(mine) for _ in range(2)]
    flat, part = torch.empty(4, device=device), torch.empty(1, device=device)
    dist.all_reduce(total)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    dist.broadcast(first, src=0)
    dist.all_gather(gathered, mine)
    dist.all_gather_into_tensor(flat, mine)
    dist.reduce_scatter_tensor(part, mine)
    results = {"sum": total, "mean": mean, "first": first, "gathered": torch.cat(gathered), "flat": flat, "part": part}
    return {name: tensor.tolist() for name, tensor in results.items()}


@pytest.mark.parametrize("order", ORDERS)
def test_collectives_move_data_between_ranks(simulated_ranks: RankPool, order: str) -> None:
    for rank, results in enumerate(simulated_ranks.run(all_collectives, 2, order)):
        assert results == {
            "sum": [3, 4],
            "mean": [1.5, 2],
            "first": [1, 2],
            "gathered": [1, 2, 2, 2],
            "flat": [1, 2, 2, 2],
            "part": [3.0 if rank == 0 else 4.0],
        }


def meet(rank: int, where: str) -> None:
    """No rank goes on before all are here: what one rank needs, the others' devices do too."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{where}, {rank}", "")
    store.wait([f"{where}, {other}" for other in range(dist.get_world_size())])


def asynchronous(rank: int, wait: bool) -> tuple[bool, list[str]]:
    fake_cuda.schedule("lazy")
    tensor = full(1)
    torch.accelerator.synchronize()
    fake_cuda.reset_records()
    with fake_cuda.without_waits():
        work = dist.all_reduce(tensor, async_op=True)
        if wait:
            work.wait()
        copy = tensor + 0
    before = fake_cuda.history()
    meet(rank, f"launched, wait={wait}")
    seen = bool((copy == 2).all())
    meet(rank, f"seen, wait={wait}")
    work.wait()
    torch.accelerator.synchronize()
    return seen, before


@pytest.mark.parametrize("wait", [True, False])
def test_a_collective_is_asynchronous_and_has_to_be_waited_for(simulated_ranks: RankPool, wait: bool) -> None:
    assert simulated_ranks.run(asynchronous, 2, wait) == [(wait, [])] * 2


def busy_host(rank: int) -> float | None:
    """Rank 1's host never waits for its device, and does not go on before rank 0 has the result."""
    fake_cuda.schedule("lazy")
    store = dist.distributed_c10d._get_default_store()
    tensor = full(1)
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 1:
        store.wait(["rank 0 is done"])
        return None
    work.wait()
    result = tensor.mean().item()
    store.set("rank 0 is done", "")
    return result


def test_a_collective_runs_when_another_rank_needs_it(simulated_ranks: RankPool) -> None:
    assert simulated_ranks.run(busy_host, 2) == [2, None]


def released(rank: int) -> list[bool]:
    fake_cuda.schedule("lazy")
    before = fake_cuda.allocated_bytes()
    output, tensor = torch.empty(2 * LENGTH, device=DEVICE), full(1)
    size = (fake_cuda.allocated_bytes() - before) / 3  # the output takes two of three
    work = dist.all_gather_into_tensor(output, tensor, async_op=True)
    del tensor
    held = fake_cuda.allocated_bytes() - before
    work.wait()
    after = fake_cuda.allocated_bytes() - before
    return [held == 3 * size, after < held, bool((output == 1).all())]


def test_what_travels_is_kept_until_the_wait(simulated_ranks: RankPool) -> None:
    assert simulated_ranks.run(released, 2) == [[True] * 3] * 2


def chained(rank: int) -> bool:
    fake_cuda.schedule("lazy")
    work = dist.all_reduce(full(1), async_op=True)
    with fake_cuda.without_waits():
        future = work.get_future().then(lambda done: done.value()[0] * 5)
        result = future.wait()
    return bool((result == 10).all())


def test_futures_are_ordered_on_the_device(simulated_ranks: RankPool) -> None:
    assert simulated_ranks.run(chained, 2) == [True, True]


def pretended(rank: int) -> list[object]:
    fake_cuda.schedule("others_first")
    dist.destroy_process_group()
    with fake_cuda.loopback(4) as group:
        total, mean = full(3), full(3)
        dist.all_reduce(total)
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        return [group.size(), total.mean().item(), mean.mean().item(), fake_cuda.collectives()]


def test_ranks_can_be_pretended(simulated_ranks: RankPool) -> None:
    assert simulated_ranks.run(pretended, 1) == [[4, 12, 3, 2]]


# ------------------------------------------------------------------------------------------------------------- capture


@contextmanager
def captured(graph: fake_cuda.Graph) -> Iterator[torch.Stream]:
    origin = stream()
    origin.wait_stream(current())
    with graph.capture(origin):
        yield origin
    current().wait_stream(origin)


def replayed(rank: int, order: str, seed: int) -> list[list[float]]:
    fake_cuda.schedule(order, seed)
    pinned = torch.zeros(1).pin_memory()
    number, result = torch.empty(1, device=DEVICE), torch.zeros(1, device=DEVICE)
    graph, side = fake_cuda.Graph(), stream()
    with captured(graph) as origin:
        number.copy_(pinned, non_blocking=True)
        side.wait_stream(origin)
        with side:
            doubled = number * 2
        tripled = number * 3
        origin.wait_stream(side)
        dist.all_reduce(doubled)
        result.add_(doubled).add_(tripled)
    torch.accelerator.synchronize()
    fake_cuda.reset_records()
    torch.accelerator.synchronize()
    nothing = fake_cuda.history()
    values = []
    for value in (1, 10):
        pinned.fill_(value)
        graph.replay()
        values.append(result.tolist()[0])
    return [nothing, values]


@pytest.mark.parametrize("order", ORDERS)
def test_a_graph_runs_only_when_it_is_replayed(simulated_ranks: RankPool, order: str) -> None:
    for seed in SEEDS if order == "random" else [0]:
        # Two ranks: 2 * (2 * value) + 3 * value, added up.
        assert simulated_ranks.run(replayed, 2, order, seed) == [[[], [7, 77]]] * 2


def broken_captures(rank: int) -> dict[str, str]:
    fake_cuda.schedule()
    outside, side = torch.Event(DEVICE), stream()
    tensor = full(1)
    outside.record(current())

    def capture(action: Callable[[torch.Stream], object]) -> str:
        def run() -> None:
            with captured(fake_cuda.Graph()) as origin:
                action(origin)

        return message_of(run)

    def fork(origin: torch.Stream) -> None:
        side.wait_stream(origin)
        with side:
            tensor.add_(1)

    return {
        "wait for the host": capture(lambda origin: tensor.sum().item()),
        "wait for the outside": capture(lambda origin: origin.wait_event(outside)),
        "query": capture(lambda origin: outside.query()),
        "pageable": capture(lambda origin: torch.ones(1).to(DEVICE, non_blocking=True)),
        "unjoined": capture(fork),
        "good": capture(lambda origin: tensor.add_(1)),
    }


def test_captures_refuse_what_cuda_refuses(simulated_ranks: RankPool) -> None:
    messages = simulated_ranks.run(broken_captures, 1)[0]
    assert {name: message.split(":")[0] for name, message in messages.items()} == {
        "wait for the host": "cudaErrorStreamCaptureUnsupported",
        "wait for the outside": "cudaErrorStreamCaptureIsolation",
        "query": "cudaErrorStreamCaptureUnsupported",
        "pageable": "cudaErrorStreamCaptureUnsupported",
        "unjoined": "cudaErrorStreamCaptureUnjoined",
        "good": "",
    }


def memory_of_a_graph(rank: int) -> list[object]:
    fake_cuda.schedule("others_first")
    graph = fake_cuda.Graph()
    with captured(graph):
        first = full(1)
        address = first.data_ptr()
        del first
        inside = full(2).data_ptr() == address
        kept = full(3) * 2
    outside = [torch.empty(LENGTH, device=DEVICE).data_ptr() for _ in range(4)]
    graph.replay()
    return [inside, address in outside, kept.mean().item()]


def test_memory_of_a_graph_is_its_own(simulated_ranks: RankPool) -> None:
    assert simulated_ranks.run(memory_of_a_graph, 1) == [[True, False, 6]]
