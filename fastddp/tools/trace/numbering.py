"""Which recordings of a run are of a rank, and which rank."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fastddp.tools.trace.names import LOADER
from fastddp.tools.trace.recording import Recording, TraceError
from fastddp.tools.trace.wording import plural

BY_NAME = "The traces do not say which rank is which: that is taken from the names of files."
BY_ORDER = "The traces do not say which rank is which: ranks are counted in the order of files and processes."
RANK = re.compile(r"rank[-_.=]?(\d{1,9})(?!\d)", re.IGNORECASE)


Numbered = tuple[list[tuple[int, Recording]], tuple[str, ...]]


def number(recordings: Sequence[Recording]) -> Numbered:
    """Recordings by rank, and notes; TraceError: two are of one rank, or made by different recorders."""
    recorders = {recording.recorder for recording in recordings}
    if len(recorders) > 1:
        raise TraceError(
            f"These traces are of one run, but were recorded by {' and '.join(sorted(recorders))}: "
            f"{', '.join(recording.source for recording in recordings)}. Look at them one by one."
        )
    kept, notes = _without_helpers(recordings)
    if all(recording.rank is not None for recording in kept):
        return _by_rank(kept), notes
    # 12 of ``rank12.sqlite``, if the name has one number.
    found = [RANK.findall(Path(recording.source).name) for recording in kept]
    by_name = [int(one) for numbers in found if len(numbers) == 1 for one in numbers]
    if len(set(by_name)) < len(kept):
        return list(enumerate(kept)), (*notes, BY_ORDER)
    named = [replace(recording, rank=rank) for recording, rank in zip(kept, by_name, strict=True)]
    return _by_rank(named), (*notes, BY_NAME)


def _without_helpers(recordings: Sequence[Recording]) -> tuple[list[Recording], tuple[str, ...]]:
    """If some processes train, leave out those that only used a GPU, such as a data loader."""
    training = [one for one in recordings if _trains(one)]
    if not training or len(training) == len(recordings):
        return list(recordings), ()
    helpers = Counter(one.source for one in recordings if not _trains(one))
    return training, tuple(
        f"{source}: {plural(count, 'recording')} without steps and collectives, of a process that is no rank, "
        f"{'is' if count == 1 else 'are'} left out."
        for source, count in helpers.items()
    )


def _trains(recording: Recording) -> bool:
    # A data loader has ranges of loading only; a rank has others too.
    marks = recording.rank is not None or any(not range_.text.startswith(LOADER) for range_ in recording.ranges)
    return marks or bool(recording.activities.of("collective").any())


def _by_rank(recordings: Sequence[Recording]) -> list[tuple[int, Recording]]:
    by_rank: dict[int, Recording] = {}
    for recording in recordings:
        assert recording.rank is not None
        other = by_rank.setdefault(recording.rank, recording)
        if other is not recording:
            raise TraceError(
                f"{other.source} and {recording.source} are both of rank {recording.rank}. Name one file a rank, and "
                "put each run into a folder of its own. Several cycles that a profiler recorded of a rank are several "
                "runs: give each cycle a folder."
            )
    return sorted(by_rank.items())
