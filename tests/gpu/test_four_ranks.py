"""Four ranks on one device, as two nodes of two: in each mode averages are true, and the same bits on all ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fastddp
from exchanges import FAILING, SHAPES, Exchange, Training, assert_averages, means, scale, wave
from fastddp.ranks import lanes
from ranks import RankPool
from waiting import until

WINDOWS = 4
RANKS = 4
TIME_LIMIT = 100.0  # NCCL makes communicators, and a first rank compiles


@dataclass(frozen=True)
class Four(Exchange):
    """Of four ranks at any level."""

    @property
    def ranks(self) -> int:
        return RANKS

    def on(self, pool: RankPool, function: Any, *args: Any) -> list[Any]:
        return pool.run(on_device, RANKS, function, self, *args, time_limit=TIME_LIMIT)


def on_device(rank: int, function: Any, exchange: Exchange, *args: Any) -> Any:
    torch.accelerator.set_device_index(0)
    return function(rank, exchange, *args)


@dataclass(frozen=True)
class Mode:
    codec: str = "plain"
    levels: str = "one level"
    options: dict[str, Any] = field(default_factory=dict)
    passes: int = 1
    lanes: int = 1  # groups that all ranks are in


MODES = {
    "default": Mode(),
    "views": Mode(options={"gradient_as_bucket_view": True}),
    "no_sync": Mode(passes=3),
    "two lanes": Mode(lanes=2),
    **{codec: Mode(codec) for codec in ("bf16", "int8", "PowerSGD")},
    **{f"{codec}, two levels": Mode(codec, "two levels") for codec in ("plain", "bf16", "int8", "PowerSGD")},
    **{levels: Mode(levels=levels) for levels in ("sharded", "sharded by parameters", "sharded over nodes")},
}


def exchange_of(mode: Mode, device: str) -> Four:
    return Four(mode.codec, "nccl" if device == "cuda" else "streams", mode.levels)


def twin(group: dist.ProcessGroup, *_: object) -> dist.ProcessGroup:
    return dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)


def lanes_there_are(exchange: Exchange) -> AbstractContextManager[object]:
    """Inside, the simulated device's groups have lanes, as NCCL's."""
    if exchange.device == "cuda":
        return ExitStack()
    return mock.patch.multiple(lanes, backend_of=lambda *_: dist.Backend.GLOO, make_group=twin)


def averages(rank: int, exchange: Exchange, mode: Mode) -> list[Any]:
    training = Training(rank, exchange, **mode.options)
    if mode.lanes > 1:
        engine = training.model.engine
        with lanes_there_are(exchange):
            engine.use_plan(engine.now.setting.plan, several_lanes=True, lanes_were_measured=True)
    assert len(set(training.model.reducer.interruption.groups)) == (3 if exchange.has_nodes else mode.lanes)
    return [training.step(window, passes=mode.passes) for window in range(WINDOWS)]


@pytest.mark.parametrize("mode", MODES)
def test_averages(sharing_ranks: RankPool, device: str, mode: str) -> None:
    exchange = exchange_of(MODES[mode], device)
    of_ranks = exchange.on(sharing_ranks, averages, MODES[mode])
    for window in range(WINDOWS):
        assert_averages([own[window] for own in of_ranks], means(exchange, window), exchange.rounding)


def left_out(rank: int) -> tuple[int, ...]:
    """Parameter 4 by all, 0 by one node."""
    return (0, 4) if rank < 2 else (4,)


def with_unused(rank: int, exchange: Exchange) -> list[Any]:
    training = Training(rank, exchange, find_unused_parameters=True)
    return [training.step(window, left_out(rank)) for window in range(WINDOWS)]


def test_unused_parameters(sharing_ranks: RankPool, device: str) -> None:
    exchange = exchange_of(Mode(), device)
    of_ranks = exchange.on(sharing_ranks, with_unused)
    assert all(own[window].pop(4) is None for own in of_ranks for window in range(WINDOWS))
    for window in range(WINDOWS):
        expected = means(exchange, window, lambda number: [r for r in range(RANKS) if number not in left_out(r)])
        del expected[4]
        assert_averages([own[window] for own in of_ranks], expected, exchange.rounding)


def joined(rank: int, exchange: Exchange) -> list[Any]:
    training, found = Training(rank, exchange), []
    with training.model.join(divide_by_initial_world_size=True):
        for window in range(2 if rank < 2 else WINDOWS):
            found = training.step(window)
    return found


def test_join(sharing_ranks: RankPool, device: str) -> None:
    exchange = exchange_of(Mode(), device)
    _, _, *others = exchange.on(sharing_ranks, joined)
    total = sum(scale(rank, WINDOWS - 1) for rank in (2, 3)) / RANKS
    assert_averages(others, [total * wave(number) for number in range(len(SHAPES))], exchange.rounding)


def regrouped(rank: int, exchange: Exchange, others: Sequence[int]) -> list[Any]:
    training = Training(rank, exchange)
    for window in range(2):
        training.step(window)
    group = dist.new_group(others)
    if rank not in others:
        return []
    training.model.regroup(group)
    return [training.step(window) for window in range(2, WINDOWS)]


@pytest.mark.parametrize("codec", ["plain", "int8", "PowerSGD"])
def test_three_ranks_go_on(sharing_ranks: RankPool, device: str, codec: str) -> None:
    exchange, others = exchange_of(Mode(codec), device), (0, 1, 3)
    of_ranks = exchange.on(sharing_ranks, regrouped, others)
    for number, window in enumerate(range(2, WINDOWS)):
        expected = [mean * RANKS / len(others) for mean in means(exchange, window, lambda number: others)]
        # What a rank that has left had not sent yet is not said by the others.
        assert_averages([of_ranks[rank][number] for rank in others], expected, 2 * exchange.rounding)


@pytest.mark.parametrize("levels", ["one level", "two levels"])
def test_a_rank_that_raises_is_named_by_all(sharing_ranks: RankPool, device: str, levels: str) -> None:
    of_ranks = exchange_of(Mode(levels=levels), device).on(sharing_ranks, raising)
    for rank, said in enumerate(of_ranks):
        assert ("in the middle of backward" if rank == FAILING else f"failed on rank {FAILING}") in said


def raising(rank: int, exchange: Exchange) -> str:
    training = Training(rank, exchange)
    for window in range(2):
        training.step(window)
    return training.failing_step(2, 2)


def around_a_stopped_rank(rank: int, exchange: Exchange) -> str:
    store = dist.distributed_c10d._get_default_store()
    training = Training(rank, exchange, watch=fastddp.Watch("raise", patience=1.0))
    for window in range(WINDOWS):
        training.step(window)
    if rank == FAILING:
        store.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        return ""
    said = ""
    try:
        for window in range(WINDOWS, WINDOWS + 2):  # the device may be the first to wait
            training.step(window)
    except RuntimeError as error:
        said = str(error)
    store.add("raised", 1)
    if rank == 0:
        until(lambda: int(store.add("raised", 0)) == RANKS - 1)
        os.kill(int(store.get("pid")), signal.SIGCONT)
    return said


def test_a_stopped_rank_is_named_and_ends_all(fresh_sharing_ranks: RankPool, device: str) -> None:
    of_ranks = exchange_of(Mode(), device).on(fresh_sharing_ranks, around_a_stopped_rank)
    for rank, said in enumerate(of_ranks):
        assert rank == FAILING or (f"rank {FAILING} is stopped" in said and "FD016" in said), said
