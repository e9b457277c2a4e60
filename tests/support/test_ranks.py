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


def fail_on(rank: int, failing: tuple[int, ...]) -> None:
    if rank in failing:
        raise KeyError(f"rank {rank} has no key")
    dist.barrier()


def end_on(rank: int, ending: int, how: str) -> None:
    if rank == ending:
        os._exit(7) if how == "exits" else time.sleep(1000)
    dist.barrier()


def litter(rank: int) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    register_optimizer_step_pre_hook(lambda *_: None)
    torch.rand(3)


def state_of_the_process(rank: int) -> tuple[object, ...]:
    assert ROOT not in [Path(entry or ".").resolve() for entry in sys.path]  # kernels/ is not to be found there
    threads, hooks = torch.get_num_threads(), len(_global_optimizer_pre_hooks)
    return torch.get_default_dtype(), threads, torch.is_grad_enabled(), hooks, torch.rand(1).item()


def test_results_come_back_by_rank_and_nothing_is_left_behind(ranks: RankPool) -> None:
    assert ranks.run(rank_and_sum, 3, 1.5, offset=0.5) == [(rank, 3, 6.0) for rank in range(3)]
    clean = ranks.run(state_of_the_process, 2)
    ranks.run(litter, 2)
    assert ranks.run(state_of_the_process, 2) == clean == [clean[0]] * 2


def test_exceptions_reach_the_test_with_type_and_traceback(ranks: RankPool) -> None:
    with pytest.raises(RanksFailed, match="rank 1 raised KeyError") as failure:
        ranks.run(fail_on, 3, (1,))
    assert "in fail_on" in failure.value.errors[0].traceback
    errors = ranks.errors(fail_on, 2, (0, 1))
    assert [(error.rank, error.type_name) for error in errors] == [(0, "KeyError"), (1, "KeyError")]
    with pytest.raises(RanksFailed, match=r"every rank should have raised, but \[0, 1\] returned"):
        ranks.errors(fail_on, 2, ())


@pytest.mark.tier("nightly")
@pytest.mark.parametrize(
    ("how", "said"),
    [("hangs", r"ranks \[.*1.*\] not done after 0.5 s(.|\n)*in end_on"), ("exits", r"rank 1 died(.|\n)*with code 7")],
)
def test_a_rank_that_hangs_or_exits_is_reported_and_the_next_call_works(ranks: RankPool, how: str, said: str) -> None:
    with pytest.raises(RanksFailed, match=said):
        ranks.run(end_on, 2, 1, how, time_limit=0.5 if how == "hangs" else 60.0)
    assert len(ranks.run(rank_and_sum, 2, 1.0)) == 2
