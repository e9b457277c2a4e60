"""Whatever a loop does and whichever optimizer it has, parameters are those that one process would have."""

from __future__ import annotations

import pytest

from ranks import RankPool
from training_execution import differences


@pytest.mark.timeout(0)  # a rank that hangs is reported by the ranks' own limit
@pytest.mark.parametrize(
    ("world_size", "seeds"),
    [
        (2, range(25)),
        (3, range(15)),
        *(pytest.param(world_size, range(1000), marks=pytest.mark.tier("nightly")) for world_size in (2, 3)),
    ],
    ids=str,
)
def test_ranks_train_as_one_process_does(ranks: RankPool, world_size: int, seeds: range) -> None:
    for begin in range(seeds.start, seeds.stop, 50):
        some = range(begin, min(begin + 50, seeds.stop))
        assert ranks.run(differences, world_size, some, time_limit=300) == [[]] * world_size
