"""Which flipped bits are noticed: `python -m bench.bit_flips` flips hundreds, each in a small training of its own.

Each run lasts as long as a round of audits, over gloo on the CPU. What a flip has changed is seen by comparing all bits
of parameters and optimizer state with those of the same run without it. The program ends with 1 where something that
has to be found was not found in time, or with the wrong rank, or where something was said without a flip.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from bench import harness
from bench.bit_flips.flips import KINDS, TARGETS, all_flips
from bench.bit_flips.judging import measure
from bench.bit_flips.training import PARAMETERS

MODULE = "bench.bit_flips"


def main() -> None:
    options = parse_arguments()
    facts = harness.environment(MODULE, torch.device("cpu"), 1) | {"seed": options.seed}
    targets = [target for target in TARGETS if target.name in options.target]
    flips = list(all_flips(targets, options.ranks, PARAMETERS, options.seed))
    rows: list[harness.Row] = []
    for ranks in sorted(set(options.ranks)):
        own = [flip for flip in flips if flip.ranks == ranks]
        rows += [facts | row for row in harness.spawn_ranks(measure, (own,), ranks, threads=1)]
        if options.json:
            harness.write_json(options.json, rows)
    harness.report(rows, [report(rows), summary(rows), why_not(rows)], options.json)
    exit_if_not_as_promised(rows)


def parse_arguments() -> argparse.Namespace:
    parser = harness.parser(MODULE, __doc__)
    harness.add_selection(parser, TARGETS, "--target")
    parser.add_argument(
        "--ranks", nargs="+", type=int, choices=range(2, 9), default=[2, 3, 4], metavar="N", help="default: 2 3 4"
    )
    harness.add_common(parser, "flip", seed=0)
    return parser.parse_args()


def exit_if_not_as_promised(rows: Sequence[harness.Row]) -> None:
    """Ends the program with 1, and says which, if any is not."""
    wrong = [row for row in rows if not row["as_promised"]]
    if wrong:
        columns = ("target", "precision", "bit", "world_size", "rank", "parameter", "step", "found_by", "steps", "said")
        lines = "\n".join(", ".join(str(row[column]) for column in columns) for row in wrong)
        sys.exit(f"not found as promised:\n{lines}")


def report(rows: Sequence[harness.Row]) -> Any:
    """A line for each target and kind of bit."""
    groups = sorted(harness.grouped(rows, "target", "kind").items(), key=lambda group: _place(*group[0]))
    cells = [[*key, str(len(own)), *_counts(own), _found_by(own)] for key, own in groups]
    columns = ["flipped bit of", "kind", "flips", *_COLUMNS, "by"]
    return harness.table(f"{len(rows)} flipped bits; found of those that do harm", columns, cells, left=2)


def _place(target: str, kind: str) -> tuple[int, int]:
    return [target.name for target in TARGETS].index(target), KINDS.index(kind)


def summary(rows: Sequence[harness.Row]) -> Any:
    """A line for each target."""
    cells = []
    for (target,), own in harness.grouped(rows, "target").items():
        by_kind = harness.grouped(own, "kind")
        found = [_counts(by_kind[kind,])[_FOUND] if (kind,) in by_kind else "" for kind in KINDS]
        cells.append([target, *found, *_counts(own)])
    return harness.table("Found, by kind of bit", ["flipped bit of", *KINDS, *_COLUMNS], cells)


def why_not(rows: Sequence[harness.Row]) -> Any:
    """What is true of the flips that were not found."""
    reasons = Counter((row["target"], row["why_not"]) for row in rows if row["why_not"])
    cells = [[target, str(count), reason] for (target, reason), count in sorted(reasons.items())]
    return harness.table("Not found, because", ["flipped bit of", "flips", "because"], cells, left=3)


_COLUMNS = ("harmless", "healed", "found", "steps", "worst", "rank", "parameter")
_FOUND = 2


def _counts(rows: Sequence[harness.Row]) -> list[str]:
    """In the order of _COLUMNS: found of those that do harm; steps until then, the median and the most; named right."""
    found = [row for row in rows if row["steps"] is not None]
    harmless, healed = (sum(row["found_by"] == what for row in rows) for what in ("harmless", "healed"))
    steps = [row["steps"] for row in found]
    naming = [row for row in found if row["parameter_named"] is not None]
    return [
        *(str(harmless), str(healed)),
        f"{len(found)} of {len(rows) - harmless}",
        f"{statistics.median(steps):g}" if steps else "",
        str(max(steps)) if steps else "",
        f"{sum(row['rank_named'] for row in found)} of {len(found)}" if found else "",
        f"{sum(row['parameter_named'] for row in naming)} of {len(naming)}" if naming else "",
    ]


def _found_by(rows: Sequence[harness.Row]) -> str:
    counts = Counter(row["found_by"] for row in rows if row["steps"] is not None)
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


if __name__ == "__main__":
    main()
