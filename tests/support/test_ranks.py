"""The harness itself: what a test can rely on when it runs a function on several ranks."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

from ranks import RankPool, RanksFailed
from repository import ROOT


def rank_and_sum(rank: int, number: float, offset: float = 0.0) -> tuple[int, int, float]:
    tensor = torch.tensor(number + offset)
    dist.all_reduce(tensor)
    return rank, dist.get_world_size(), tensor.item()


def fail_on(rank: int, failing: tuple[int, ...]) -> int:
    if rank in failing:
        raise KeyError(f"rank {rank} has no key")
    dist.barrier()
    return rank


def sleep_on(rank: int, sleeping: int) -> None:
    if rank == sleeping:
        time.sleep(1000)


def die_on(rank: int, dying: int) -> None:
    if rank == dying:
        os._exit(7)
    dist.barrier()


def crash(rank: int) -> None:
    import ctypes

    ctypes.string_at(0)


def litter(rank: int) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    register_optimizer_step_pre_hook(lambda *_: None)
    torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: None)
    torch.rand(3)


def state_of_the_process(rank: int) -> tuple[object, ...]:
    return (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        len(_global_optimizer_pre_hooks),
        len(torch.nn.modules.module._global_forward_pre_hooks),
        torch.rand(1).item(),
        dist.get_world_size(),
    )


def search_path(rank: int) -> list[str]:
    return sys.path


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_back_by_rank_from_one_process_group(ranks: RankPool, world_size: int) -> None:
    results = ranks.run(rank_and_sum, world_size, 1.5, offset=0.5)
    assert results == [(rank, world_size, 2.0 * world_size) for rank in range(world_size)]


def test_an_exception_on_one_rank_reaches_the_test_with_its_type_and_traceback(ranks: RankPool) -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="rank 1 raised KeyError") as failure:
        ranks.run(fail_on, 3, (1,))
    first = failure.value.errors[0]
    assert (first.rank, first.type_name) == (1, "KeyError")
    assert "rank 1 has no key" in first.message
    assert "in fail_on" in first.traceback
    assert time.monotonic() - start < 10, "peers in a collective should fail with it, not wait for their timeout"


def test_errors_returns_what_every_rank_raised(ranks: RankPool) -> None:
    errors = ranks.errors(fail_on, 2, (0, 1))
    assert [(error.rank, error.type_name, error.message) for error in errors] == [
        (0, "KeyError", "'rank 0 has no key'"),
        (1, "KeyError", "'rank 1 has no key'"),
    ]


def test_errors_fails_where_a_rank_returns(ranks: RankPool) -> None:
    with pytest.raises(RanksFailed, match=r"every rank should have raised, but \[0, 1\] returned"):
        ranks.errors(fail_on, 2, ())


@pytest.mark.tier("nightly")
def test_a_rank_that_hangs_is_reported_with_its_stack_and_the_next_call_works(ranks: RankPool) -> None:
    with pytest.raises(RanksFailed, match=r"ranks \[1\] not done after 0.5 s(.|\n)*in sleep_on"):
        ranks.run(sleep_on, 2, 1, time_limit=0.5)
    assert len(ranks.run(rank_and_sum, 2, 1.0)) == 2


@pytest.mark.tier("nightly")
def test_a_rank_that_exits_is_reported_and_the_next_call_works(ranks: RankPool) -> None:
    with pytest.raises(RanksFailed, match=r"rank 0 died(.|\n)*exited with code 7"):
        ranks.run(die_on, 2, 0)
    assert len(ranks.run(rank_and_sum, 2, 1.0)) == 2


def test_a_rank_that_crashes_is_reported_with_its_stack(ranks: RankPool) -> None:
    with pytest.raises(RanksFailed, match=r"killed by SIGSEGV(.|\n)*in crash"):
        ranks.run(crash, 1)


def test_a_call_leaves_nothing_behind_for_the_next(ranks: RankPool) -> None:
    clean = ranks.run(state_of_the_process, 2)
    ranks.run(litter, 2)
    assert ranks.run(state_of_the_process, 2) == clean
    assert clean[0] == clean[1], "all ranks start with the same seed"


def test_third_party_code_does_not_find_this_repositorys_kernels_folder(ranks: RankPool) -> None:
    for path in (sys.path, *ranks.run(search_path, 2)):
        assert ROOT not in [Path(entry or ".").resolve() for entry in path]


def test_a_call_costs_tens_of_milliseconds(ranks: RankPool) -> None:
    ranks.run(rank_and_sum, 4, 1.0)
    start = time.monotonic()
    for _ in range(10):
        ranks.run(rank_and_sum, 4, 1.0)
    assert (time.monotonic() - start) / 10 < 0.5, "wide of the usual 0.03 s, since the machine may be busy"
