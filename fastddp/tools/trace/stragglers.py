"""Which rank the others wait for."""

from __future__ import annotations

from collections import Counter

import numpy as np

from fastddp.tools.trace.intervals import Floats, length_between, union
from fastddp.tools.trace.ranks import Together

OFTEN = 0.7  # of the steps; by chance a rank is last less often, even of two
MATTERS = 0.01  # of a step


def waits(together: Together) -> Floats:
    """Shape (ranks, steps): how long each rank computed nothing while its collectives waited for the last rank, ms.

    Collectives that wait at the same time count once. A wait behind compute costs nothing, so it does not count.
    """
    matched = together.collectives
    found = np.zeros(together.begin.shape)
    for step in range(together.begin.shape[1]):
        start, end = matched.start[:, matched.step == step], matched.end[:, matched.step == step]
        # NaN if a rank did not join: no interval.
        until = np.fmin(np.fmax.reduce(start, axis=0, initial=-np.inf), end)
        for rank in range(len(found)):
            waiting = union(start[rank], until[rank])
            hidden = length_between(together.compute[rank], waiting[:, 0], waiting[:, 1]).sum()
            found[rank, step] = max(0.0, np.diff(waiting, axis=1).sum() - hidden)
    return found


def describe_stragglers(ranks: list[int], waiting: Floats, step_ms: float) -> tuple[str, ...]:
    """A sentence on a rank that waits least often, by enough to matter; ``step_ms``: the length of a step."""
    steps = waiting.shape[1]
    if len(ranks) < 2 or steps == 0:
        return ()
    last = waiting.argmin(axis=0)
    rank, count = Counter(last.tolist()).most_common(1)[0]
    own = waiting[:, last == rank]
    by = float(np.median(np.delete(own, rank, axis=0).mean(axis=0) - own[rank]))
    if count < OFTEN * steps or by < MATTERS * step_ms:
        return ()
    last = f"Rank {ranks[rank]} is the last to join collectives in {count} of {steps} steps"
    return (f"{last}: the others wait {by:.2f} ms a step for it.",)
