"""Whatever a loop does and whichever optimizer it has, parameters are those that one process would have."""

from __future__ import annotations

import pytest

from ranks import RankPool
from training_execution import differences

NIGHTLY = pytest.mark.tier("nightly")


@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    ("ranks_of", "seeds"),
    [(2, range(25)), (3, range(15)), pytest.param(2, range(1000), marks=NIGHTLY), pytest.param(3, range(1000), marks=NIGHTLY)],
    ids=str,
)
def test_ranks_train_as_one_process_does(ranks: RankPool, ranks_of: int, seeds: range) -> None:
    for begin in range(seeds.start, seeds.stop, 50):
        some = range(begin, min(begin + 50, seeds.stop))
        assert ranks.run(differences, ranks_of, some, time_limit=300) == [[]] * ranks_of
