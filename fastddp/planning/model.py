"""When the collectives of a step end under a bucket plan, and the plan under which they end first.

The model is that of MG-WFBP (Shi, Chu and Li, "MG-WFBP: Efficient Data Communication for Distributed Synchronous SGD
Algorithms", INFOCOM 2019). A collective of b bytes takes ``latency + b / bandwidth``. Collectives run one after the
other, and a bucket's collective starts when its last gradient is ready and the collective before has ended. So many
buckets pay the latency often, and few buckets start late. Times are seconds from the beginning of the step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter

from fastddp.planning.bucket_plan import Buckets

_MOST_STEPS = 150_000  # of the search, which take less than a second
_TAIL = 16
_LONG = 16  # times the latency: a collective that moves bytes for that long gains nothing by carrying more
_READINESS = attrgetter("ready")


@dataclass(frozen=True)
class Link:
    """What a collective of a process group costs."""

    latency: float  # seconds, whatever travels
    bandwidth: float  # bytes of gradients a second; what moves on the wire may be more

    def seconds(self, size: int) -> float:
        """The time of a collective of ``size`` bytes."""
        return self.latency + size / self.bandwidth

    @property
    def long_bytes(self) -> float:
        """Bytes from which the latency no longer counts."""
        return _LONG * self.latency * self.bandwidth


@dataclass(frozen=True)
class Gradient:
    """What the model knows of one gradient."""

    ready: float  # seconds from the beginning of the step
    bytes: int  # on the wire
    kind: Hashable  # gradients of two kinds (dtype, device) share no bucket


def end_of(plan: Buckets, gradients: Sequence[Gradient], link: Link) -> float:
    """When the last collective of ``plan`` ends. ``plan``: indices into ``gradients``, in the order of collectives."""
    items = _items(gradients)
    return _end([_together([items[index] for index in bucket]) for bucket in plan], link)


def best_plan(gradients: Sequence[Gradient], link: Link, largest: float = math.inf) -> Buckets:
    """The plan whose last collective ends first, of all that keep the order in which gradients of a kind get ready.

    It is exact if there are few enough gradients to search all of these plans (about 500 of one kind). Otherwise small
    gradients that follow each other are put together before the search. Of plans that end at the same time it has few
    buckets: merging two neighbours of a kind would end later, unless the first is long already.

    Why the search is exact: buckets go in the order in which they get ready, since on one machine jobs end first if
    they are taken in the order of their release. After some gradients, the rest depends on two things: where the open
    bucket of each kind began, and when the collectives so far end. For given beginnings, a later end never leads to an
    earlier one, because ``max(end, ready) + latency + bytes / bandwidth`` grows with ``end``, in floating point too. So
    of all ways to one such state only the earliest has to be kept.

    Up to ``largest`` bytes ``link`` is known to hold, and no bucket of several gradients has more. Returned are indices
    into ``gradients``: buckets in the order of their collectives, gradients in that in which they get ready.
    """
    items = _merged(sorted(_items(gradients), key=_READINESS), largest)
    return [list(bucket.members) for bucket in _coarsened(_first_to_end(items, link, largest), link, largest)]


@dataclass(frozen=True)
class _Item(Gradient):
    """Gradients of a kind that stay together."""

    members: tuple[int, ...]  # indices, in the order in which they get ready


def _items(gradients: Sequence[Gradient]) -> list[_Item]:
    return [_Item(one.ready, one.bytes, one.kind, (index,)) for index, one in enumerate(gradients)]


def _together(items: Sequence[_Item]) -> _Item:
    members = tuple(member for item in items for member in item.members)
    return _Item(max(map(_READINESS, items)), sum(item.bytes for item in items), items[0].kind, members)


def _end(buckets: Sequence[_Item], link: Link) -> float:
    end = 0.0
    for bucket in buckets:
        end = max(end, bucket.ready) + link.seconds(bucket.bytes)
    return end


# --------------------------------------------------------------------------------------------------------- the search

_Cuts = tuple[list[_Item], "_Cuts"] | None  # the bucket that was closed last, and the buckets before it


def _first_to_end(items: Sequence[_Item], link: Link, largest: float) -> list[_Item]:
    """The buckets of the best partition."""
    lines: dict[Hashable, list[_Item]] = {}
    for item in items:
        lines.setdefault(item.kind, []).append(item)
    kinds = list(lines)
    bytes_before = {kind: [0, *accumulate(item.bytes for item in line)] for kind, line in lines.items()}
    passed = Counter[Hashable]()
    # Key: for each kind, the item with which its open bucket begins. Value: the earliest end of collectives, and how.
    states: dict[tuple[int, ...], tuple[float, _Cuts]] = {(0,) * len(kinds): (0.0, None)}
    for item in items:
        line, sizes, kind = lines[item.kind], bytes_before[item.kind], kinds.index(item.kind)
        passed[item.kind] += 1
        after = passed[item.kind]
        closed: dict[tuple[int, ...], tuple[float, _Cuts]] = {}
        for begins, (end, cuts) in list(states.items()):
            begin = begins[kind]
            size = sizes[after] - sizes[begin]
            if size > largest and begin < after - 1:
                del states[begins]
                continue
            ends = max(end, item.ready) + link.seconds(size)
            state = (*begins[:kind], after, *begins[kind + 1 :])
            if state not in closed or ends < closed[state][0]:
                closed[state] = ends, (line[begin:after], cuts)
        if after == len(line):
            states = closed  # a bucket of this kind that is still open would never be closed
        else:
            states.update(closed)
    ((_, cuts),) = states.values()
    plan = []
    while cuts is not None:
        bucket, cuts = cuts
        plan.append(_together(bucket))
    return plan[::-1]


def _merged(items: list[_Item], largest: float) -> list[_Item]:
    """The items, with neighbours of a kind merged as little as keeps the search short enough.

    The last items stay alone if possible, since nothing hides what travels then.
    """
    total = sum(item.bytes for item in items)
    for tail in (_TAIL, 0):
        size, head = 1, len(items) - tail
        merged = items
        while _steps(merged) > _MOST_STEPS and size <= total:
            size *= 2
            merged = [*_filled(items[:head], min(size, largest / 2)), *items[head:]]
        if _steps(merged) <= _MOST_STEPS:
            break
    return merged


def _steps(items: Sequence[_Item]) -> int:
    """The most steps of the search: after each item, the number of places where open buckets may have begun."""
    left = Counter(item.kind for item in items)
    begins = dict.fromkeys(left, 1)
    states = steps = 1
    for item in items:
        steps += states
        left[item.kind] -= 1
        before, begins[item.kind] = begins[item.kind], begins[item.kind] + 1 if left[item.kind] else 1
        states = states // before * begins[item.kind]
    return steps


def _filled(items: Sequence[_Item], size: float) -> list[_Item]:
    """The items, with neighbours of a kind merged up to ``size`` bytes; in the order of readiness."""
    filled: list[_Item] = []
    unfinished: dict[Hashable, _Item] = {}
    for item in items:
        before = unfinished.get(item.kind)
        if before is not None and before.bytes + item.bytes <= size:
            item = _together([before, item])
        elif before is not None:
            filled.append(before)
        unfinished[item.kind] = item
    return sorted([*filled, *unfinished.values()], key=_READINESS)


def _coarsened(plan: Sequence[_Item], link: Link, largest: float) -> list[_Item]:
    """The plan with fewer buckets and the same end, since starting a collective costs more than the model knows."""
    plan = list(plan)
    end = _end(plan, link)
    first = 0
    while first < len(plan):
        one = plan[first]
        second = next((n for n in range(first + 1, len(plan)) if plan[n].kind == one.kind), None)
        if second is not None and one.bytes < link.long_bytes:
            both = _together([one, plan[second]])
            without = [*plan[:first], *plan[first + 1 : second], both, *plan[second + 1 :]]
            if both.bytes <= largest and _end(without, link) <= end:
                plan = without
                continue
        first += 1
    return plan
