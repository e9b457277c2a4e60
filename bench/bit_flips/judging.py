"""What was said about a flip, on all ranks, and whether it was right."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist

from bench import harness
from bench.bit_flips.flips import PARAMETER, Flip
from bench.bit_flips.training import AUDIT_EVERY, WITHIN, WITHIN_TWO_ROUNDS, Said, Seen, Training
from bench.checks import digest

FoundBy = Literal["replicas", "too_large", "non_finite", "harmless", "healed", "nothing"]
_HEALED = "ranks agreed again before its turn had come: what differed was rounded away"


@dataclass(frozen=True)
class Outcome:
    """What became of one flip."""

    flip: Flip
    rank: int  # where it happened
    parameter: str
    said: tuple[Said, ...]  # each kind's first, in the order in which they came; of rank 0
    found_by: FoundBy
    """By which check first. Harmless: by none, and at the end all bits on all ranks are as without the flip. Healed: by
    none; ranks differed and do not any more, though all of them have other bits than without the flip."""
    steps: int | None  # from the flip until it was told
    told_alike: bool  # whether all ranks were told the same, and in the same step
    rank_named: bool | None
    """By what was said first: this rank alone, or both of two between which nobody can tell. None: nothing was."""
    parameter_named: bool | None  # by the first that names one. None: nothing does.
    distance: float  # how far parameters are off at the end

    def is_as_promised(self) -> bool:
        """Whether what has to be found is found in time, everywhere, and with the right rank."""
        if self.found_by in ("harmless", "healed") or self.flip.target.why_not:
            return True
        limit = WITHIN if self.flip.target == PARAMETER else WITHIN_TWO_ROUNDS
        return self.steps is not None and self.steps <= limit and self.told_alike and self.rank_named is True

    def row(self) -> dict[str, Any]:
        """For JSON."""
        flip = self.flip
        own = ("rank", "parameter", "found_by", "steps", "told_alike", "rank_named", "parameter_named")
        return {
            "target": flip.target.name,
            "precision": flip.precision.name,
            "world_size": flip.ranks,
            "place": round(flip.place, 4),
            "audit_every": AUDIT_EVERY,
            "said": [[one.kind, one.told, one.step, list(one.ranks), one.parameter] for one in self.said],
            "distance": self.distance if math.isfinite(self.distance) else None,
            "why_not": {"healed": _HEALED, "nothing": flip.target.why_not}.get(self.found_by),
            **{name: getattr(flip, name) for name in ("kind", "bit", "step", "optimizer")},
            **{name: getattr(self, name) for name in own},
        }


class AlarmWithoutFlipError(RuntimeError):
    """The same training without a flip was called corrupt."""


class Runs:
    """Runs of this rank, those without a flip kept for the flips that have them in common."""

    def __init__(self) -> None:
        self._without: dict[tuple[object, ...], Seen] = {}

    def outcome(self, flip: Flip) -> Outcome:
        """A collective; the same on all ranks.

        Raises:
            AlarmWithoutFlipError: something was said though no bit had flipped.
        """
        key = (flip.target, flip.precision, flip.optimizer)
        if key not in self._without:
            self._without[key] = Training(flip, happens=False).run()
        without = self._without[key]
        if without.said:
            raise AlarmWithoutFlipError(f"no bit has flipped, and {without.said} was said ({flip})")
        seen = Training(flip, happens=True).run()
        mine = (seen.said, seen.flipped_at, seen.is_like(without), digest(seen.numbers), seen.distance(without))
        of_all: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_all, mine)
        said, flipped_at, same, digests, distances = zip(*of_all, strict=True)
        is_healed = flip.target.makes_ranks_differ and len(set(digests)) == 1
        unless_found: FoundBy = "harmless" if all(same) else "healed" if is_healed else "nothing"
        return judge(flip, seen.parameter, said, flipped_at, unless_found, max(distances))


def judge(
    flip: Flip,
    parameter: str,
    said: Sequence[list[Said]],
    flipped_at: Sequence[list[int]],
    unless_found: FoundBy,
    distance: float,
) -> Outcome:
    """By what ranks have seen, an entry a rank."""
    ((rank, (step,)),) = [(rank, steps) for rank, steps in enumerate(flipped_at) if steps]
    firsts = tuple({one.kind: one for one in reversed(said[0])}.values())[::-1]
    if not any(said):
        return Outcome(flip, rank, parameter, (), unless_found, None, True, None, None, distance)
    first = min((one for of_rank in said for one in of_rank), key=lambda one: one.told)
    named = next((one.parameter for one in firsts if one.parameter is not None), None)
    return Outcome(
        flip,
        rank,
        parameter,
        firsts,
        first.kind,  # type: ignore[arg-type]
        first.told - step,
        all(of_rank == said[0] for of_rank in said),
        first.ranks == (rank,) or (flip.ranks == 2 and first.ranks == (0, 1) and first.kind == "replicas"),
        None if named is None else named.split(":")[0] == parameter,
        distance,
    )


def measure(flips: Sequence[Flip]) -> list[harness.Row]:
    """Runs these flips on all ranks; every rank returns the same rows."""
    runs = Runs()
    rows = []
    with harness.progress(f"{dist.get_world_size()} ranks", len(flips), show=dist.get_rank() == 0) as advance:
        for flip in flips:
            outcome = runs.outcome(flip)
            rows.append(outcome.row() | {"as_promised": outcome.is_as_promised()})
            advance()
    del runs
    gc.collect()  # what still refers to the process group would let it end too late
    return rows
