"""Finds the collectives of several ranks that are one, and when each rank joined.

Note [Matching collectives]
Ranks run the collectives of a process group in the same order. Torch numbers them ("Seq"). Without these numbers we
count within a step, kind by kind, in the order of launches. A count is used only if all ranks of the group have the
same total: a collective missing on one rank would shift all later ones. A bucket's collectives are matched bucket by
bucket. Only collectives that every rank has to join before any can leave are matched. A broadcast is not: its source
may be done before others begin.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from fastddp.tools.trace.buckets import Runs
from fastddp.tools.trace.collectives import ALL_REDUCE, OTHER
from fastddp.tools.trace.intervals import Floats, Integers
from fastddp.tools.trace.recording import NONE, Recording

TOGETHER = (ALL_REDUCE, "all_gather", "reduce_scatter", "all_to_all", "send/recv", "barrier", OTHER)

Key = tuple[int, Hashable, int, int]  # step, what, number, place among equal numbers


@dataclass(frozen=True)
class Matched:
    """Collectives that at least two ranks joined; arrays of shape (ranks, collectives) but for the first."""

    step: Integers  # (collectives,): index into the steps that ranks have in common
    run: Integers  # index into the rank's runs; NONE: it did not join
    start: Floats  # ms on the rank's own clock; NaN: not joined
    end: Floats


def match(recordings: Sequence[Recording], runs: Sequence[Runs], chosen: Sequence[Integers]) -> Matched:
    """Match the collectives of ranks; ``chosen``: of each, indices of the steps that all have, in one order."""
    found = [_keyed(*of_rank) for of_rank in zip(recordings, runs, chosen, strict=True)]
    ranks_with: defaultdict[Key, list[int]] = defaultdict(list)
    for rank, keys in enumerate(found):
        for key in keys:
            ranks_with[key].append(rank)
    doubtful = _doubtful(found)
    kept = sorted(
        (key for key, ranks in ranks_with.items() if len(ranks) > 1 and key[:3] not in doubtful),
        key=lambda key: (key[0], found[ranks_with[key][0]][key]),
    )
    run = np.array([[keys.get(key, NONE) for key in kept] for keys in found], dtype=np.int64).reshape(len(found), -1)
    return Matched(
        np.array([key[0] for key in kept], dtype=np.int64),
        run,
        _times(run, [of_rank.start for of_rank in runs]),
        _times(run, [of_rank.end for of_rank in runs]),
    )


def _keyed(recording: Recording, runs: Runs, chosen: Integers) -> dict[Key, int]:
    """The runs of one rank that others may have joined."""
    place = {int(step): i for i, step in enumerate(chosen)}
    counts: Counter[tuple[int, Hashable, int]] = Counter()
    found: dict[Key, int] = {}
    for i in np.argsort(np.where(np.isfinite(runs.launched), runs.launched, runs.start), kind="stable"):
        about = recording.collectives[recording.activities.about[runs.activity[i]]]
        if int(runs.step[i]) not in place or about.operation not in TOGETHER:
            continue
        bucket, sequence = int(runs.bucket[i]), int(recording.activities.sequence[runs.activity[i]])
        what = (bucket, about.group, about.operation)
        key = (place[int(runs.step[i])], what, sequence)
        found[*key, counts[key]] = int(i)
        counts[key] += 1
    return found


def _doubtful(found: list[dict[Key, int]]) -> set[tuple[int, Hashable, int]]:
    """Collectives without a number of which ranks count different totals."""
    totals = [Counter(key[:3] for key in keys if key[2] == NONE) for keys in found]
    everything = set().union(*totals)
    return {one for one in everything if len({counts[one] for counts in totals if counts[one]}) > 1}


def _times(run: Integers, times: Sequence[Floats]) -> Floats:
    """Of each matched run; the NaN is for NONE."""
    return np.stack([np.append(of_rank, np.nan)[own] for own, of_rank in zip(run, times, strict=True)])
