"""Memory of wires on the simulated device: lent for a window (lazy_bucket_allocation), or a process group's own."""

from __future__ import annotations

import contextlib
import gc
import os
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import fake_cuda
import fastddp
import square_layers
from fastddp.exchange import descriptions, wire_memory
from nodes import nodes_of_two
from ranks import RankPool
from square_layers import HOOKS, LAYERS, WIDTH, backward

DEVICE = fake_cuda.DEVICE
ORDERS = ["lazy", "others_first", "random"]
ELEMENTS = LAYERS * WIDTH * WIDTH


def wrapped(hook: str, **options: Any) -> fastddp.DistributedDataParallel:
    return square_layers.wrapped(hook, DEVICE, watch=fastddp.Watch(stall=None), **options)


# ----------------------------------------------------------------------------------------------------------- lent wires


def bytes_between_windows(rank: int, hook: str, lazy: bool) -> int:
    fake_cuda.schedule("in_order")
    model = wrapped(hook, lazy_bucket_allocation=lazy)
    found = []
    for step in range(6):
        backward(model, rank, step)
        model.zero_grad()
        fake_cuda.synchronize()
        found.append(fake_cuda.allocated_bytes())
    return min(found[2:])  # the thread that ran a collective may hold its tensors for a moment longer


FACTOR = 4 * 4 * WIDTH
"""Bytes of one of PowerSGD's."""


@pytest.mark.parametrize(
    ("hook", "least", "most"),
    [
        ("wire", 2 * ELEMENTS, 2 * ELEMENTS),  # a cast wire
        ("fp32", 2 * 2 * ELEMENTS, 2 * 2 * ELEMENTS),  # and the room in which ranks add up
        ("int8", 2 * ELEMENTS + 1, 3 * ELEMENTS - 1),  # a byte and a scale's share, and the same of sums
        ("power_sgd", 2 * LAYERS * FACTOR, 2 * LAYERS * FACTOR),
        ("", 0, 0),  # wires in which gradients live stay
    ],
)
def test_lent_wires_are_not_there_between_windows(simulated_ranks: RankPool, hook: str, least: int, most: int) -> None:
    kept, lent = (simulated_ranks.run(bytes_between_windows, 2, hook, lazy) for lazy in (False, True))
    for a, b in zip(kept, lent, strict=True):
        assert least <= a - b <= most


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

REGISTERED = {"wire_memory": "registered"}
SLAB = 2 * 2**20


@contextlib.contextmanager
def memory_is_offered() -> Iterator[None]:
    fake_cuda.offer_memory(True)
    try:
        yield
    finally:
        fake_cuda.offer_memory(False)


def sizes_asked_for(rank: int, hook: str, options: dict[str, Any]) -> list[list[int]]:
    """Bytes that the group was asked for, in order: at construction, and by step."""
    fake_cuda.schedule("in_order")
    with memory_is_offered():
        model = wrapped(hook, **options)
        found = [[size for _, size in fake_cuda.memory_asked_for()]]
        for step in range(4):
            before = len(fake_cuda.memory_asked_for())
            model.zero_grad()
            backward(model, rank, step)
            found.append([size for _, size in fake_cuda.memory_asked_for()[before:]])
    return found


@pytest.mark.parametrize("hook", ["", *HOOKS])
def test_a_plan_takes_one_slab_of_the_groups_memory(simulated_ranks: RankPool, hook: str) -> None:
    """At construction, when the hook is registered, and when buckets are rebuilt or PowerSGD starts."""
    first, second = simulated_ranks.run(sizes_asked_for, 2, hook, REGISTERED)
    assert first == second
    assert first[0] == [SLAB] * (1 if hook == "" else 2)
    later = [size for step in first[1:] for size in step]
    assert later == [SLAB] * (0 if hook in ("", "wire") else 1)


def test_lent_wires_take_ordinary_memory(simulated_ranks: RankPool) -> None:
    asked = simulated_ranks.run(sizes_asked_for, 2, "fp32", REGISTERED | {"lazy_bucket_allocation": True})
    assert asked == [[[SLAB], [], [], [], []]] * 2  # for gradients, before there was a hook


def asked_for(rank: int, variable: str | None, **options: Any) -> int:
    fake_cuda.schedule("in_order")
    environment = {} if variable is None else {"DDP_DISABLE_COMM_MEM": variable}
    with memory_is_offered(), mock.patch.dict(os.environ, environment):
        backward(wrapped("", **options), rank, 0)
        return len(fake_cuda.memory_asked_for())


def test_without_a_choice_torchs_setting_decides(simulated_ranks: RankPool) -> None:
    assert [simulated_ranks.run(asked_for, 2, variable) for variable in (None, "1", "0")] == [[0, 0], [0, 0], [1, 1]]
    assert simulated_ranks.run(asked_for, 2, "1", **REGISTERED) == [1, 1]


def test_a_single_rank_asks_for_none(simulated_ranks: RankPool) -> None:
    assert simulated_ranks.run(asked_for, 1, None, **REGISTERED) == [0]


def test_a_communicator_that_has_carried_nothing_carries_an_element_first(simulated_ranks: RankPool) -> None:
    assert simulated_ranks.run(asked_for, 2, None, init_sync=False, **REGISTERED) == [1, 1]


def asked_without_offer(rank: int) -> tuple[int, list[str]]:
    fake_cuda.schedule("in_order")
    fake_cuda.offer_memory(rank == 0)  # on one rank only
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        backward(wrapped("", **REGISTERED), rank, 0)
    fake_cuda.offer_memory(False)
    texts = [str(warning.message) for warning in caught if "wire_memory" in str(warning.message)]
    return len(fake_cuda.memory_asked_for()), texts


def test_where_a_rank_has_no_such_memory_all_are_told_and_take_ordinary_memory(simulated_ranks: RankPool) -> None:
    for asked, texts in simulated_ranks.run(asked_without_offer, 2):
        assert asked == 0
        assert len(texts) == 1
        assert "has no memory of its own" in texts[0]
        assert "Leave wire_memory out" in texts[0]


def places_of_gradients(rank: int, hook: str, steps: int, holds: bool = False) -> list[int | None]:
    """By parameter, where its gradient is in the last slab."""
    fake_cuda.schedule("in_order")
    with memory_is_offered():
        model = wrapped(hook, **REGISTERED)
        held = []
        for step in range(steps):
            model.zero_grad(set_to_none=step % 2 == 0)
            backward(model, rank, step)
            if holds:
                held += [parameter.grad for parameter in model.parameters()]
        begin, _ = fake_cuda.memory_asked_for()[-1]
        places = [parameter.grad.untyped_storage().data_ptr() - begin for parameter in model.parameters()]
        return [place if 0 <= place < SLAB else None for place in places]


LAYER = WIDTH * WIDTH


def test_gradients_live_there_each_in_its_place(simulated_ranks: RankPool) -> None:
    expected = [4 * LAYER * (LAYERS - 1 - number) for number in range(LAYERS)]  # they come against the order of layers
    assert simulated_ranks.run(places_of_gradients, 2, "", 1) == [expected] * 2
    assert simulated_ranks.run(places_of_gradients, 2, "", 4) == [expected] * 2


def test_what_a_rank_keeps_is_replaced_by_ordinary_memory(simulated_ranks: RankPool) -> None:
    assert simulated_ranks.run(places_of_gradients, 2, "", 4, True) == [[None] * LAYERS] * 2


def slab_stays_for_who_holds_a_gradient(rank: int) -> list[int]:
    """Bytes in slabs: with a model, with one of its gradients, and with nothing."""
    fake_cuda.schedule("in_order")
    with memory_is_offered():
        model = wrapped("", **REGISTERED)
        backward(model, rank, 0)
        kept = next(model.parameters()).grad
        fake_cuda.synchronize()
        found = [fake_cuda.allocated_bytes()]
        del model
        gc.collect()
        found.append(fake_cuda.allocated_bytes())
        del kept
        found.append(fake_cuda.allocated_bytes())
    return [bytes // SLAB for bytes in found]


def test_a_slab_lives_as_long_as_what_is_in_it(simulated_ranks: RankPool) -> None:
    assert simulated_ranks.run(slab_stays_for_who_holds_a_gradient, 2) == [[1, 1, 0]] * 2


def asked_of(rank: int, hook: str, zeroed: bool) -> tuple[list[list[int]], bool]:
    """On two nodes of two: the ranks of the groups that are asked, and whether gradients live in what they gave."""
    fake_cuda.schedule("in_order")
    asked = []
    allocate = wire_memory._allocate

    def allocates(choice: Any, group: dist.ProcessGroup, size: int, device: torch.device) -> Tensor | None:
        asked.append(dist.get_process_group_ranks(group))
        return allocate(choice, group, size, device)

    with (
        memory_is_offered(),
        mock.patch.object(wire_memory, "_allocate", allocates),
        nodes_of_two(rank),
    ):
        model = wrapped(hook, hierarchy="node", **REGISTERED)
        for step in range(3):
            model.zero_grad(set_to_none=not zeroed)
            backward(model, rank, step)
        slabs = fake_cuda.memory_asked_for()
        memory = [parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()]
        return asked, all(any(begin <= at < begin + size for begin, size in slabs) for at in memory)


@pytest.mark.parametrize("zeroed", [False, True], ids=["", "gradients stay in their buckets"])
@pytest.mark.parametrize("hook", ["", "wire"])
def test_in_two_levels_the_ranks_of_the_node_are_asked(simulated_ranks: RankPool, hook: str, zeroed: bool) -> None:
    for rank, (asked, live_there) in enumerate(simulated_ranks.run(asked_of, 4, hook, zeroed)):
        node = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert asked
        assert all(group == node for group in asked)
        assert live_there


@pytest.mark.tier("slow", but_one_in=5)
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
        found = train(rank, hook, order, options | REGISTERED)
        assert fake_cuda.memory_asked_for()
    return found


# ---------------------------------------------------------------------------------------------------- symmetric windows


@contextlib.contextmanager
def windows_are_offered() -> Iterator[None]:
    """The group's memory passes for a window: what makes one, and a communicator for it, is NCCL's alone."""

    def in_a_window(_: object, backend: Any, size: int, device: torch.device) -> Tensor:
        return backend.allocate_tensor(size, dtype=torch.uint8, device=device)

    with (
        memory_is_offered(),
        mock.patch.object(wire_memory, "_in_a_window", in_a_window),
        mock.patch.object(descriptions, "zero_cta_twin", lambda group, device: group),
    ):
        yield


class Places(TorchDispatchMode):
    """Of what travels: where in which slab its memory is; -1: in none."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, list[tuple[int, int]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            output, *inputs = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
            # A rank gathers from its own shard of what it gathers to.
            self.found.append((str(func), [self._place(output), *((self._place(tensor)[0], 0) for tensor in inputs)]))
        return func(*args, **kwargs or {})

    def _place(self, tensor: Tensor) -> tuple[int, int]:
        for number, (begin, size) in enumerate(fake_cuda.memory_asked_for()):
            if begin <= tensor.data_ptr() < begin + size:
                return number, tensor.data_ptr() - begin
        return -1, -1


def in_windows(rank: int, hook: str, fails: bool) -> tuple[list[Tensor], list[Any]]:
    with windows_are_offered(), Places() as places:
        found = train(rank, hook, "lazy", {"wire_memory": "symmetric"}, fails)
    return found, places.found


@pytest.mark.tier("slow", but_one_in=3)
@pytest.mark.parametrize("fails", [False, True], ids=["", "one window fails"])
@pytest.mark.parametrize("hook", ["", *HOOKS])
def test_all_ranks_send_out_of_the_same_places_of_windows(simulated_ranks: RankPool, hook: str, fails: bool) -> None:
    expected = simulated_ranks.run(train, 2, hook, "lazy", {}, fails)
    (first, places), (second, others) = simulated_ranks.run(in_windows, 2, hook, fails)
    assert all(map(torch.equal, first + second, expected[0] + expected[1]))
    assert places == others
    windows = [in_window for _, tensors in places for in_window, _ in tensors]
    assert sum(number >= 0 for number in windows) >= 4 * LAYERS


def in_no_window(rank: int, what: str) -> str:
    """The error."""
    fake_cuda.schedule("in_order")
    with contextlib.ExitStack() as stack:
        if what == "no memory":
            stack.enter_context(windows_are_offered())
            fake_cuda.offer_memory(False)
        elif what == "no CUDA":
            stack.enter_context(memory_is_offered())
            stack.enter_context(mock.patch.object(descriptions, "zero_cta_twin", lambda group, device: group))
        with pytest.raises((ValueError, RuntimeError)) as raised:
            wrapped("", wire_memory="symmetric")
    return str(raised.value)


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("no NCCL", "takes a process group over NCCL"),
        ("no memory", "has no memory of its own"),
        ("no CUDA", "could not make a symmetric window of 2097152 bytes"),
    ],
)
def test_what_lacks_for_windows_is_said_at_construction(simulated_ranks: RankPool, what: str, error: str) -> None:
    for text in simulated_ranks.run(in_no_window, 2, what):
        assert error in text
        assert "Leave wire_memory out" in text
