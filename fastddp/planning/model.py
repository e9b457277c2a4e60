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

from fastddp.bucket_plan import Buckets

_MOST_STEPS = 150_000  # of the search, which take less than a second
_TAIL = 16
_LONG = 16  # times the latency: a collective that moves bytes for that long gains nothing by carrying more


@dataclass(frozen=True)
class Link:
    """What a collective of a process group costs."""

    latency: float
    """Seconds, whatever travels."""
    bandwidth: float
    """Bytes of gradients a second; what moves on the wire may be more."""

    def seconds(self, size: int) -> float:
        """The time of a collective.

        Args:
            size: its bytes.
        """
        return self.latency + size / self.bandwidth

    @property
    def long_bytes(self) -> float:
        """Bytes from which the latency no longer counts."""
        return _LONG * self.latency * self.bandwidth


@dataclass(frozen=True)
class Gradient:
    """What the model knows of one gradient."""

    ready: float
    """Seconds from the beginning of the step."""
    bytes: int
    """On the wire."""
    kind: Hashable
    """Gradients of two kinds (dtype, device) share no bucket."""


def end_of(plan: Buckets, gradients: Sequence[Gradient], link: Link) -> float:
    """When the last collective of ``plan`` ends. ``plan``: indices into ``gradients``, in the order of collectives."""
    return _end([_together([gradients[index] for index in bucket]) for bucket in plan], link)


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

    Args:
        gradients: in any order.
        link: what collectives cost.
        largest: bytes up to which ``link`` is known to hold. No bucket of several gradients has more.

    Returns:
        Indices into ``gradients``; buckets in the order of their collectives, and within a bucket gradients in the
        order in which they get ready.
    """
    order = sorted(range(len(gradients)), key=lambda index: gradients[index].ready)
    items = _merged([[index] for index in order], gradients, largest)
    return _coarsened(_first_to_end(items, gradients, link, largest), gradients, link, largest)


def _together(gradients: Sequence[Gradient]) -> Gradient:
    ready = max(gradient.ready for gradient in gradients)
    return Gradient(ready, sum(gradient.bytes for gradient in gradients), gradients[0].kind)


def _end(buckets: Sequence[Gradient], link: Link) -> float:
    end = 0.0
    for bucket in buckets:
        end = max(end, bucket.ready) + link.seconds(bucket.bytes)
    return end


# --------------------------------------------------------------------------------------------------------- the search

_Cuts = tuple[list[list[int]], "_Cuts"] | None  # the bucket that was closed last, and the buckets before it


def _first_to_end(items: Buckets, gradients: Sequence[Gradient], link: Link, largest: float) -> Buckets:
    """The best partition of ``items``, each of which stays together."""
    whole = [_together([gradients[index] for index in item]) for item in items]
    lines = _lines(whole)
    bytes_before = [[0, *accumulate(whole[number].bytes for number in line)] for line in lines]
    place = {number: (kind, at) for kind, line in enumerate(lines) for at, number in enumerate(line)}
    # Key: for each kind, the item with which its open bucket begins. Value: the earliest end of collectives, and how.
    states: dict[tuple[int, ...], tuple[float, _Cuts]] = {(0,) * len(lines): (0.0, None)}
    for number, item in enumerate(whole):
        kind, at = place[number]
        sizes = bytes_before[kind]
        closed: dict[tuple[int, ...], tuple[float, _Cuts]] = {}
        for begins, (end, cuts) in list(states.items()):
            begin = begins[kind]
            size = sizes[at + 1] - sizes[begin]
            if size > largest and begin < at:
                del states[begins]
                continue
            ends = max(end, item.ready) + link.seconds(size)
            after = (*begins[:kind], at + 1, *begins[kind + 1 :])
            if after not in closed or ends < closed[after][0]:
                closed[after] = ends, ([items[member] for member in lines[kind][begin : at + 1]], cuts)
        if at + 1 == len(lines[kind]):
            states = closed  # a bucket of this kind that is still open would never be closed
        else:
            states.update(closed)
    ((_, cuts),) = states.values()
    plan: Buckets = []
    while cuts is not None:
        bucket, cuts = cuts
        plan.append([index for item in bucket for index in item])
    return plan[::-1]


def _lines(items: Sequence[Gradient]) -> list[list[int]]:
    """The items' numbers, kind by kind."""
    lines: dict[Hashable, list[int]] = {}
    for number, item in enumerate(items):
        lines.setdefault(item.kind, []).append(number)
    return list(lines.values())


def _merged(items: Buckets, gradients: Sequence[Gradient], largest: float) -> Buckets:
    """The items, with neighbours of a kind merged as little as keeps the search short enough.

    The last items stay alone if possible, since nothing hides what travels then.
    """
    total = sum(gradient.bytes for gradient in gradients)
    for tail in (_TAIL, 0):
        size = 1
        merged = items
        while _steps(merged, gradients) > _MOST_STEPS and size <= total:
            size *= 2
            head = len(items) - tail
            merged = [*_filled(items[:head], gradients, min(size, largest / 2)), *items[head:]]
        if _steps(merged, gradients) <= _MOST_STEPS:
            break
    return merged


def _steps(items: Buckets, gradients: Sequence[Gradient]) -> int:
    """The most steps of the search: after each item, the number of places where open buckets may have begun."""
    kinds = [gradients[item[0]].kind for item in items]
    left = Counter(kinds)
    begins = dict.fromkeys(left, 1)
    states = steps = 1
    for kind in kinds:
        steps += states
        left[kind] -= 1
        before, begins[kind] = begins[kind], begins[kind] + 1 if left[kind] else 1
        states = states // before * begins[kind]
    return steps


def _filled(items: Buckets, gradients: Sequence[Gradient], size: float) -> Buckets:
    """The items, with neighbours of a kind merged up to ``size`` bytes; in the order of readiness."""
    filled: Buckets = []
    unfinished: dict[Hashable, list[int]] = {}
    for item in items:
        kind = gradients[item[0]].kind
        together = [*unfinished.get(kind, []), *item]
        if kind in unfinished and sum(gradients[index].bytes for index in together) > size:
            filled.append(unfinished[kind])
            together = [*item]
        unfinished[kind] = together
    return sorted([*filled, *unfinished.values()], key=lambda item: gradients[item[-1]].ready)


def _coarsened(plan: Buckets, gradients: Sequence[Gradient], link: Link, largest: float) -> Buckets:
    """The plan with fewer buckets and the same end, since starting a collective costs more than the model knows."""
    plan = list(plan)
    whole = [_together([gradients[index] for index in bucket]) for bucket in plan]
    end = _end(whole, link)
    first = 0
    while first < len(plan):
        next_of_kind = (n for n in range(first + 1, len(plan)) if whole[n].kind == whole[first].kind)
        second = next(next_of_kind, None)
        if second is not None and whole[first].bytes < link.long_bytes:
            both = _together([whole[first], whole[second]])
            without = [*whole[:first], *whole[first + 1 : second], both, *whole[second + 1 :]]
            if both.bytes <= largest and _end(without, link) <= end:
                plan[second], whole[second] = plan[first] + plan[second], both
                del plan[first], whole[first]
                continue
        first += 1
    return plan
