"""A window without all gradients: what the error says about the other ranks."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fastddp
from fastddp import _C
from hooks_by_name import register
from on_ranks import on_ranks
from parts import Parts
from parts import wrapped as with_options

X = torch.ones(3)


def wrapped(hook: str = "none", **options: object) -> fastddp.DistributedDataParallel:
    """A model of four buckets, in the order d, c, b, a."""
    model = with_options(Parts("abcd"), **options)
    register(model, hook)
    return model


def said_by_forward(model: fastddp.DistributedDataParallel) -> str:
    with pytest.raises(RuntimeError) as caught:
        model(X)
    return str(caught.value)


def send_what_others_wait_for(model: fastddp.DistributedDataParallel) -> None:
    with torch.no_grad():
        model(X)


def fails_elsewhere(loss: Tensor, rank: int) -> None:
    with pytest.raises(RuntimeError, match=f"failed on rank {rank}"):
        loss.backward()


@on_ranks(2)
def test_every_rank_that_raises_says_who_has_what_it_misses(rank: int) -> None:
    # What rank 1 sends meets nothing, and leaving the group waits for it as long as the group has patience.
    model = wrapped(process_group=dist.new_group(timeout=timedelta(seconds=6)))
    model(X, ("acd", "bcd")[rank]).backward()
    began = time.monotonic()
    said = said_by_forward(model)
    assert time.monotonic() - began < 4  # nobody waited for the time limit
    assert f"on rank {rank} without a gradient for 1 of 4 parameters" in said
    parameter = ("parameter b (number 1, bucket 2)", "parameter a (number 0, bucket 3)")[rank]
    assert f"{parameter}: produced by rank {1 - rank}" in said


@pytest.mark.tier("nightly")
@on_ranks(2)
def test_ranks_that_do_not_answer_in_time_are_named(rank: int) -> None:
    model = wrapped()
    if rank == 0:
        model(X, "abc").backward()
        said = said_by_forward(model)
        assert "parameter d (number 3, bucket 0): no other rank has said whether it has it" in said
        assert "No report within 5 s from rank 1, which may have them or not." in said
    dist.barrier()  # the other one does not come to backward


OF_LATER = ("acd", ["parameter b (number 1, bucket 2): produced by rank 0, 1"])
# The sums of 16-bit gradients take two collectives: others wait for d's, before all gradients have come.
OF_FIRST = ["parameter d (number 3, bucket 0): produced by rank 0, 1", "not yet by rank 0, 1, which waits in backward"]


@pytest.mark.tier("slow", but_one_in=4)
@pytest.mark.parametrize(
    ("hook", "used", "words"), [*((hook, *OF_LATER) for hook in ("none", "bf16", "python")), ("bf16", "b", OF_FIRST)]
)
@on_ranks(3)
def test_ranks_that_wait_have_said_what_they_have(rank: int, hook: str, used: str, words: list[str]) -> None:
    """Ranks 0 and 1 wait; rank 2 comes when they have waited a while, and misses a gradient."""
    model = wrapped(hook)
    if rank < 2:
        fails_elsewhere(model(X), rank=2)
        return
    loss = model(X, used)
    time.sleep(1)
    loss.backward()
    said = said_by_forward(model)
    send_what_others_wait_for(model)
    assert all(text in said for text in words)
    assert "No report" not in said


@on_ranks(2)
def test_what_was_frozen_or_tied_after_wrapping_is_said_so(rank: int) -> None:
    model = wrapped()
    model.module.a.requires_grad_(False)
    model.module.b = model.module.c
    model(X).backward()
    said = said_by_forward(model)
    assert "parameter a (number 0, bucket 3): produced by no rank; it was frozen after wrapping: wrap" in said
    assert "b (number 1, bucket 2): produced by no rank; the module has another parameter in its place" in said


@on_ranks(2)
def test_without_a_store_the_error_is_still_the_missing_gradient(rank: int) -> None:
    if rank == 1:
        model = wrapped()
        fails_elsewhere(model(X), rank=0)
        return
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    groups = dist.distributed_c10d._world.pg_map
    group = dist.group.WORLD
    backend, store = groups[group]
    groups[group] = (backend, dist.TCPStore("127.0.0.1", server.port, is_master=False))
    model = wrapped()
    groups[group] = (backend, store)
    del server  # as if its process had ended
    model(X, "acd").backward()
    said = said_by_forward(model)
    send_what_others_wait_for(model)
    assert said.startswith("fastddp: backward ended on rank 0 without a gradient for 1 of 4 parameters")
    assert "the store of the process group does not answer" in said
    assert "find_unused_parameters=True" in said


@on_ranks(2)
def test_ranks_that_watch_no_stalls_are_not_asked(rank: int) -> None:
    model = wrapped(watch=fastddp.Watch(stall=None))
    model(X, "acd").backward()
    said = said_by_forward(model)
    assert "parameter b (number 1, bucket 2): no other rank has said whether it has it" in said
    assert "Watch(stall=None)" in said


# -------------------------------------------------------------------------------- over several machines, by the store


class Asks:
    """A rank of four that is alone on its machine, and asks before its first step has ended."""

    def __init__(self, store: dist.Store, rank: int = 0) -> None:
        page = _C.Progress(["a", "b", "c"], rank, 4)
        self._watch = _C.StallWatch(page, store, "model", rank, 60.0, prints=False)

    def __call__(self, patience: float = 60.0) -> dict[int, tuple[list[int], bool]]:
        said = self._watch.ask_who_has(patience)
        assert said is not None
        return {rank: (lack.parameters, lack.waits) for rank, lack in said.items()}


def write(store: dist.Store, rank: int, **fields: object) -> None:
    """Let a rank write its record: it has waited in its first step's backward for long, if nothing else is given."""
    waits = {"rank": rank, "doing": "finish", "seconds": 3.0, "state": "reducing", "windows": 0, "lacking": ""}
    store.set(f"model/{rank}", "\n".join(["fastddp 1", *(f"{key} {value}" for key, value in (waits | fields).items())]))


LACKS = {"doing": "forward", "state": "partial"}


def test_what_ranks_have_written_is_what_they_lack_or_still_wait_for() -> None:
    store = dist.HashStore()
    write(store, 1, lacking="0,2")
    write(store, 2, lacking="0-2", **LACKS)
    write(store, 3)
    assert Asks(store)() == {1: ([0, 2], True), 2: ([0, 1, 2], False), 3: ([], True)}


@pytest.mark.parametrize("on_its_way", [{"doing": "backward"}, {"windows": 1}, {"seconds": 0.5}], ids=str)
def test_of_a_rank_that_is_on_its_way_or_in_another_step_nothing_is_known(on_its_way: dict[str, object]) -> None:
    store = dist.HashStore()
    write(store, 1, **{"lacking": "1"} | on_its_way)
    assert Asks(store)(0.1) == {}


ALL = ([0, 1, 2], False)


def test_the_first_to_ask_answers_for_all_and_who_asks_later_also_finds_what_came_after_that() -> None:
    store = dist.HashStore()
    write(store, 1)
    assert Asks(store)(0.1) == {1: ([], True)}
    write(store, 1, lacking="1")
    write(store, 3)
    assert Asks(store, 2)() == {0: ALL, 1: ([], True), 3: ([], True)}


def test_if_the_rank_that_reads_for_all_dies_the_others_read_themselves() -> None:
    store = dist.HashStore()
    store.add("model/missing/0/asked", 1)
    write(store, 1)
    assert Asks(store, 2)(0.1) == {1: ([], True)}


@on_ranks(1)
def test_an_answer_goes_when_its_rank_asks_again(rank: int) -> None:
    model = wrapped()
    store = dist.distributed_c10d._get_process_group_store(model.process_group)
    for step in range(2):
        model(X, "acd").backward()
        assert "produced by no rank" in said_by_forward(model)
        there = [store.check([f"fastddp/stall/1/missing/{number}"]) for number in range(3)]
        assert there == [number == step for number in range(3)]


@on_ranks(2)
def test_a_rank_that_waits_for_long_in_backward_writes_what_it_lacks(rank: int) -> None:
    model = wrapped()
    store = dist.distributed_c10d._get_process_group_store(model.process_group)
    loss = model(X)
    if rank == 0:
        store.wait(["fastddp/stall/1/1"], timedelta(seconds=60))
        assert b"\nlacking \n" in store.get("fastddp/stall/1/1")
    loss.backward()
