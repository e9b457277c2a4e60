"""Memory of wires on the simulated device: lent for a window (lazy_bucket_allocation), or a process group's own."""

from __future__ import annotations

import contextlib
import gc
import os
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
from fastddp.exchange import descriptions
from fastddp.ranks import wire_memory
from nodes import nodes_of_two
from on_device import DEVICE, ORDERS
from on_ranks import of_ranks, on_ranks
from ranks import RankPool
from square_layers import HOOKS, LAYERS, WIDTH, backward

ELEMENTS = LAYERS * WIDTH * WIDTH
LENT = {"lazy_bucket_allocation": True}
REGISTERED = {"wire_memory": "registered"}
SLAB = 2 * 2**20


def wrapped(hook: str, **options: Any) -> fastddp.DistributedDataParallel:
    return square_layers.wrapped(hook, DEVICE, watch=fastddp.Watch(stall=None), **options)


@contextlib.contextmanager
def memory_is_offered() -> Iterator[None]:
    fake_cuda.offer_memory(True)
    try:
        yield
    finally:
        fake_cuda.offer_memory(False)


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


@pytest.mark.tier("slow", but_one_in=7)
@pytest.mark.parametrize("fails", [False, True], ids=["", "one window fails"])
@ORDERS
@pytest.mark.parametrize("options", [LENT, REGISTERED, LENT | REGISTERED], ids=["lent", "group's", "group's or lent"])
@pytest.mark.parametrize("hook", ["", *HOOKS])
@on_ranks(2, pool="simulated_ranks")
def test_steps_are_those_with_ordinary_wires_that_are_kept(
    hook: str, options: dict[str, Any], order: str, fails: bool, rank: int
) -> None:
    expected = train(rank, hook, order, {}, fails)
    with memory_is_offered():
        found = train(rank, hook, order, options, fails)
        assert bool(fake_cuda.memory_asked_for()) == ("wire_memory" in options)
    assert all(map(torch.equal, found, expected))


# ----------------------------------------------------------------------------------------------------------- lent wires


def bytes_between_windows(rank: int, hook: str, lazy: bool) -> int:
    fake_cuda.schedule("in_order")
    gc.collect()
    fake_cuda.synchronize()
    before = fake_cuda.allocated_bytes()  # what other tests have left may go only when this one has ended
    model = wrapped(hook, lazy_bucket_allocation=lazy)
    found = []
    for step in range(6):
        backward(model, rank, step)
        model.zero_grad()
        fake_cuda.synchronize()
        found.append(fake_cuda.allocated_bytes())
    return min(found[2:]) - before  # the thread that ran a collective may hold its tensors for a moment longer


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


# ------------------------------------------------------------------------------------------------- the group's memory


ONE_FOR_GRADIENTS = 1


@pytest.mark.parametrize(
    ("hook", "options", "at_construction", "later"),
    [
        ("", {}, ONE_FOR_GRADIENTS, 0),
        # When buckets are rebuilt, or PowerSGD starts.
        *((hook, {}, ONE_FOR_GRADIENTS + 1, 1) for hook in HOOKS),
        ("fp32", LENT, ONE_FOR_GRADIENTS, 0),
    ],
)
@on_ranks(2, pool="simulated_ranks")
def test_a_plan_takes_one_slab_of_the_groups_memory_for_wires_that_stay(
    hook: str, options: dict[str, Any], at_construction: int, later: int, rank: int
) -> None:
    fake_cuda.schedule("in_order")
    with memory_is_offered():
        model = wrapped(hook, **REGISTERED, **options)
        assert [size for _, size in fake_cuda.memory_asked_for()] == [SLAB] * at_construction
        for step in range(4):
            model.zero_grad()
            backward(model, rank, step)
        assert [size for _, size in fake_cuda.memory_asked_for()] == [SLAB] * (at_construction + later)


def asked_for(rank: int, variable: str | None, options: dict[str, Any]) -> int:
    fake_cuda.schedule("in_order")
    environment = {} if variable is None else {"DDP_DISABLE_COMM_MEM": variable}
    with memory_is_offered(), mock.patch.dict(os.environ, environment):
        backward(wrapped("", **options), rank, 0)
        return len(fake_cuda.memory_asked_for())


@pytest.mark.parametrize(
    ("ranks", "variable", "options", "expected"),
    [
        (2, None, {}, 0),  # without a choice torch's setting decides
        (2, "1", {}, 0),
        (2, "0", {}, 1),
        (2, "1", REGISTERED, 1),
        (1, None, REGISTERED, 0),
        # The communicator has carried nothing: it carries an element first.
        (2, None, REGISTERED | {"init_sync": False}, 1),
    ],
)
def test_who_asks_for_the_groups_memory(
    simulated_ranks: RankPool, ranks: int, variable: str | None, options: dict[str, Any], expected: int
) -> None:
    assert simulated_ranks.run(asked_for, ranks, variable, options) == [expected] * ranks


@on_ranks(2, pool="simulated_ranks")
def test_where_a_rank_has_no_such_memory_all_are_told_and_take_ordinary_memory(rank: int) -> None:
    fake_cuda.schedule("in_order")
    fake_cuda.offer_memory(rank == 0)
    with pytest.warns(UserWarning, match=r"has no memory of its own.*Leave wire_memory out") as caught:
        backward(wrapped("", **REGISTERED), rank, 0)
    fake_cuda.offer_memory(False)
    assert len([warning for warning in caught if "wire_memory" in str(warning.message)]) == 1
    assert fake_cuda.memory_asked_for() == []


@pytest.mark.parametrize(("steps", "holds"), [(1, False), (4, False), (4, True)])
@on_ranks(2, pool="simulated_ranks")
def test_gradients_live_there_each_in_its_place_unless_a_rank_keeps_them(steps: int, holds: bool, rank: int) -> None:
    fake_cuda.schedule("in_order")
    with memory_is_offered():
        model = wrapped("", **REGISTERED)
        held = []
        for step in range(steps):
            model.zero_grad(set_to_none=step % 2 == 0)
            backward(model, rank, step)
            if holds:
                held += [parameter.grad for parameter in model.parameters()]
        begin, _ = fake_cuda.memory_asked_for()[-1]
    places = [parameter.grad.untyped_storage().data_ptr() - begin for parameter in model.parameters()]
    if holds:
        assert not any(0 <= place < SLAB for place in places)
    else:  # they come against the order of layers
        assert places == [4 * WIDTH * WIDTH * (LAYERS - 1 - number) for number in range(LAYERS)]


@on_ranks(2, pool="simulated_ranks")
def test_a_slab_lives_as_long_as_what_is_in_it(rank: int) -> None:
    fake_cuda.schedule("in_order")
    with memory_is_offered():
        model = wrapped("", **REGISTERED)
        backward(model, rank, 0)
        kept = next(model.parameters()).grad
        fake_cuda.synchronize()
        assert fake_cuda.allocated_bytes() // SLAB == 1
        del model
        gc.collect()
        assert fake_cuda.allocated_bytes() // SLAB == 1
        del kept
        assert fake_cuda.allocated_bytes() // SLAB == 0


@pytest.mark.parametrize("zeroed", [False, True], ids=["", "gradients stay in their buckets"])
@pytest.mark.parametrize("hook", ["", "wire"])
@on_ranks(4, pool="simulated_ranks")
def test_in_two_levels_the_ranks_of_the_node_are_asked(hook: str, zeroed: bool, rank: int) -> None:
    fake_cuda.schedule("in_order")
    with (
        memory_is_offered(),
        mock.patch.object(wire_memory, "_allocate", side_effect=wire_memory._allocate) as allocate,
        nodes_of_two(rank),
    ):
        model = wrapped(hook, hierarchy="node", **REGISTERED)
        for step in range(3):
            model.zero_grad(set_to_none=not zeroed)
            backward(model, rank, step)
        slabs = fake_cuda.memory_asked_for()
    assert allocate.called
    for call in allocate.call_args_list:
        assert dist.get_process_group_ranks(call.args[1]) == [rank // 2 * 2, rank // 2 * 2 + 1]
    for parameter in model.parameters():
        place = parameter.grad.untyped_storage().data_ptr()
        assert any(begin <= place < begin + size for begin, size in slabs)


# ---------------------------------------------------------------------------------------------------- symmetric windows


@contextlib.contextmanager
def windows_are_offered() -> Iterator[None]:
    """The group's memory passes for a window: what makes one, and a communicator for it, is NCCL's alone."""

    def in_a_window(_: object, backend: Any, size: int, device: torch.device) -> Tensor:
        return backend.allocate_tensor(size, dtype=torch.uint8, device=device)

    with (
        memory_is_offered(),
        mock.patch.object(wire_memory, "_in_a_window", in_a_window),
        mock.patch.object(descriptions, "symmetric_twin", lambda group, device: group),
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


@pytest.mark.tier("slow", but_one_in=3)
@pytest.mark.parametrize("fails", [False, True], ids=["", "one window fails"])
@pytest.mark.parametrize("hook", ["", *HOOKS])
@on_ranks(2, pool="simulated_ranks")
def test_all_ranks_send_out_of_the_same_places_of_windows(hook: str, fails: bool, rank: int) -> None:
    expected = train(rank, hook, "lazy", {}, fails)
    with windows_are_offered(), Places() as places:
        found = train(rank, hook, "lazy", {"wire_memory": "symmetric"}, fails)
    assert all(map(torch.equal, found, expected))
    assert of_ranks(places.found) == [places.found] * 2
    windows = [in_window for _, tensors in places.found for in_window, _ in tensors]
    assert sum(number >= 0 for number in windows) >= 4 * LAYERS


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("no NCCL", "takes a process group over NCCL"),
        ("no memory", "has no memory of its own"),
        ("no CUDA", "could not make a symmetric window of 2097152 bytes"),
    ],
)
@on_ranks(2, pool="simulated_ranks")
def test_what_lacks_for_windows_is_said_at_construction(what: str, error: str, rank: int) -> None:
    fake_cuda.schedule("in_order")
    offers = {"no NCCL": contextlib.nullcontext, "no memory": windows_are_offered, "no CUDA": memory_is_offered}
    with contextlib.ExitStack() as stack:
        stack.enter_context(offers[what]())
        if what == "no memory":
            fake_cuda.offer_memory(False)
        elif what == "no CUDA":
            stack.enter_context(mock.patch.object(descriptions, "symmetric_twin", lambda group, device: group))
        with pytest.raises((ValueError, RuntimeError), match=rf"(?s){error}.*Leave wire_memory out"):
            wrapped("", wire_memory="symmetric")
