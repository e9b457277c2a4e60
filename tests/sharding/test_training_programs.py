"""Whatever a loop does and whichever optimizer it has, parameters are those that one process would have."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ranks import RankPool
from training_execution import differences


@pytest.mark.timeout(0)  # a rank that hangs is reported by the ranks' own limit
@pytest.mark.parametrize(
    ("world_size", "seeds"),
    [
        (2, range(25)),
        (3, range(15)),
        (2, (6, 127, 190, 294, 315, 349, 358, 371)),  # these have found faults
        (3, (24,)),
        *(pytest.param(world_size, range(1000), marks=pytest.mark.tier("nightly")) for world_size in (2, 3)),
    ],
    ids=str,
)
def test_ranks_train_as_one_process_does(ranks: RankPool, world_size: int, seeds: Sequence[int]) -> None:
    for begin in range(0, len(seeds), 50):
        some = seeds[begin : begin + 50]
        assert ranks.run(differences, world_size, some, time_limit=300) == [[]] * world_size
