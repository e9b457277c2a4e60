"""Who brought NaN: the rank and the parameter of gradients that are not finite after ranks have added them up.

Packing leaves the sum of squares of each rank's own gradients, and how many elements are not finite (note [Local sums],
``csrc/pack/local_sums.h``). A window's status tells all ranks whether one had any. So a step without trouble has no
further collective and no wait. After trouble, one small all-gather says who had what.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fastddp.errors import see
from fastddp.exchange.in_force import InForce
from fastddp.ranks.agreement import gather_numbers
from fastddp.ranks.together import together
from fastddp.watch.corruption import Corruption, OnCorruption, a_scaler_steps, deliver

_log = logging.getLogger("fastddp")

_MOST_OF_A_RANK = 16
_MOST_LISTED = 64

_UNDER_A_SCALER = " With a GradScaler a few of these are normal: at the start, and whenever it tries a larger scale."


@dataclass(frozen=True)
class NonFiniteGradient:
    """A rank's own gradient of a parameter, before ranks add theirs up, with elements that are not finite."""

    rank: int
    """Within the model's process group."""
    parameter: str
    """Its name."""
    count: int
    """Elements that are not finite; a complex number counts as two."""
    elements: int
    """The parameter's size, counted in the same way."""


@dataclass(frozen=True)
class NonFinite:
    """Where gradients that are not finite come from."""

    rank: int | None
    """Within the model's process group; the lowest that had it. None: every rank's own gradients were finite, but not
    their casts to the wire's dtype, or not their sum."""
    parameter: str
    """The first one, in the order in which gradients came in the first step."""
    count: int
    """Elements that are not finite in that rank's own gradient; without a rank, in the synchronised one."""
    elements: int
    """The parameter's size; a complex number counts as two."""
    gradients: tuple[NonFiniteGradient, ...]
    """All that were not finite, in the same order: up to 16 of a rank, and 64 in all. Empty without a rank."""
    total: int
    """How many were not finite on all ranks, listed or not; without a rank, how many synchronised ones."""
    largest: tuple[int, str, float]
    """Rank, parameter and 2-norm of the largest finite gradient. The norm is infinite if its square overflows the sum
    of squares: fp64, on a GPU fp32."""
    losses: tuple[int, ...] = ()
    """Ranks where no gradient was finite, apart from gradients that are all zeros. There the loss was not finite, or
    what it was computed from."""
    of_a_loss: int = 0
    """How many gradients such a rank had (the most of any), apart from gradients that are all zeros."""

    def __str__(self) -> str:
        if self.losses:
            return (
                f"all {self.of_a_loss} gradients: the loss was not finite on rank {', '.join(map(str, self.losses))}. "
                "Look at that batch; model.find_non_finite_module() says where it begins in the next forward."
            )
        more = f"; gradients like it: {self.total}" if self.total > 1 else ""
        if self.rank is None:
            rank, parameter, norm = self.largest
            return (
                f"the synchronised gradient of {self.parameter} has {self.count} of {self.elements} elements that are "
                f"not finite{more}. Every rank's own gradients were finite before the cast to the wire and before they "
                f"were added up, so they are too large for these: the largest, of {parameter} on rank {rank}, has the "
                f"norm {norm:.3g}. Let them travel in a wider dtype, clip them, or lower the loss scale."
            )
        ranks = sorted({one.rank for one in self.gradients} - {self.rank})
        also = f", also on rank {', '.join(map(str, ranks))}" if ranks else ""
        return (
            f"rank {self.rank} brought {self.count} of {self.elements} elements that are not finite in its gradient of "
            f"{self.parameter}, the first in the order of backward{more}{also}."
        )


def blame(now: InForce) -> NonFinite | None:
    """See :meth:`fastddp.DistributedDataParallel.blame_non_finite`; gradients must be measured."""
    return _judged(now, _what_all_ranks_had(now))


class NonFiniteWatch:
    """Tells of gradients that were not finite, or too large, in a model's last window."""

    def __init__(self, now: InForce, tell: OnCorruption) -> None:
        self._now = now
        self._tell = tell
        self._since: tuple[int, int] | None = None
        """First and last step of the current series of steps whose gradients were not finite."""

    def look(self) -> None:
        """Look at the last window; before a forward, and before an optimizer's step.

        If nothing was wrong this costs one call. If something was, and all ranks of the exchange know it now, they
        gather who had what. They may not all know: a device with streams tells its host later, at another moment on
        each rank, and the sum of finite gradients may be non-finite on this rank alone. Then a rank reports only what
        it had itself. CorruptionError: ``Watch.corruption`` is "raise". The user's callable may raise any error.
        """
        noticed = self._now.reducer.take_not_finite()
        if noticed is None:
            return self._say_that_all_is_well()
        corruption = self._what_was_wrong(*noticed)
        if corruption is None:
            return None
        first, last = self._since or (corruption.step, corruption.step)
        self._since = (first, corruption.step)
        # The log says once when it began, and once when it ended.
        if self._tell != "report" or (last == corruption.step and self._speaks(corruption, *noticed[1:])):
            deliver(corruption, self._tell)
        return None

    def _speaks(self, corruption: Corruption, by_all: bool, in_result: bool) -> bool:
        """Whether this rank logs it: rank 0 does. Unless all know the same, so does each that had it or got it."""
        rank = self._now.process_group.rank()
        return rank == 0 or (not by_all and (in_result or rank in corruption.ranks))

    def _say_that_all_is_well(self) -> None:
        reducer = self._now.reducer
        if self._since is None or reducer.state != "finished" or reducer.windows() <= self._since[1]:
            return
        first, last = self._since
        self._since = None
        if self._tell == "report" and self._now.process_group.rank() == 0:
            steps = f"step {first}" if first == last else f"steps {first} to {last}"
            _log.warning("fastddp: gradients are finite again. They were not in %s.", steps)

    def _what_was_wrong(self, window: int, by_all: bool, in_result: bool) -> Corruption | None:
        now = self._now
        step = window + 1
        if now.reducer.state != "finished" or now.reducer.windows() != step:  # not the last one
            return _corruption(step, None, by_all, in_result)
        by_all = by_all and not now.is_uneven  # a rank without inputs would not take part
        said = _what_all_ranks_had(now) if by_all else [_what_this_rank_had(now)]
        found = _judged(now, said)
        may_be_spread = self._since is not None or (found is not None and len(found.losses) == len(said))
        if may_be_spread and (name := _first_parameter_that_is_not_finite(now)) is not None:
            since = ""
            if self._since is not None:
                since = f": since step {self._since[0]} an optimizer has stepped with gradients that were not finite"
            message = (
                f"fastddp: gradients of step {step} are not finite, because parameters are not, {name} first{since}. "
                "No rank is to blame for this step. Load the last checkpoint before that."
            )
            return Corruption("non_finite", step, (), name, message)
        if found is None:
            too_large = _too_large(now, step, said)
            keeps_its_own = now.exchange.group(now.setting) is None
            if too_large is not None or by_all or keeps_its_own or now.device.type == "cpu":
                return too_large  # None: large, but not too large; devices notice only what is not finite
        return _corruption(step, found, by_all, in_result)


def _too_large(now: InForce, step: int, said: list[list[float]]) -> Corruption | None:
    """Whether finite gradients are too large: note [Too large], ``csrc/reducer/local_gradients.h``."""
    headers = [of_rank[:_HEADER] for of_rank in said]
    ranks = tuple(int(rank) for rank, _, _, index, norm in headers if norm >= now.reducer.too_large(int(index)))
    if not ranks:
        return None
    rank, name, norm = _largest(now, said)
    message = (
        f"fastddp: gradients of step {step} are too large to work with: that of {name} on rank {rank} has the norm "
        f"{norm:.3g}. Either the loss has exploded or, if others are as usual, a bit has flipped on that rank. "
        "An optimizer's step with it may do lasting damage: leave it out, and check that machine."
    )
    return Corruption("too_large", step, ranks, name, message)


def _corruption(step: int, found: NonFinite | None, by_all: bool, in_result: bool) -> Corruption:
    opening = f"fastddp: gradients of step {step} are not finite"
    under_a_scaler = _UNDER_A_SCALER if a_scaler_steps() else ""
    if found is None or (found.rank is None and not by_all and not in_result):
        remedy = "model.blame_non_finite(), called on all ranks after a backward, tells who brought them."
        message = f"{opening}, on another rank than this. {remedy}{under_a_scaler}"
        return Corruption("non_finite", step, (), None, message)
    ranks = tuple(sorted({one.rank for one in found.gradients}))
    elsewhere = "" if by_all else " What other ranks had is not known to this one."
    parameter = None if found.losses else found.parameter
    return Corruption("non_finite", step, ranks, parameter, f"{opening}: {found}{elsewhere}{under_a_scaler}")


def _first_parameter_that_is_not_finite(now: InForce) -> str | None:
    """Its name; the host waits for the device."""
    named = zip(now.setting.names, now.parameters.tensors, strict=True)
    return next((name for name, parameter in named if _not_finite(parameter.detach())), None)


def _what_all_ranks_had(now: InForce) -> list[list[float]]:
    group = now.exchange.group(now.setting) or now.process_group
    return gather_numbers(_what_this_rank_had(now), group, now.device)


# What a rank says, in fp64. A header: its rank, how many gradients are not finite, how many are not all zeros, and the
# parameter and norm of the largest finite one. Then, for each of the first gradients that are not finite: its place in
# the order, its parameter, and how many elements.
_HEADER = 5
_WORDS = 3


def _what_this_rank_had(now: InForce) -> list[float]:
    if now.reducer.state != "finished":
        raise RuntimeError(
            "Who brought gradients that are not finite is known between the backward that synchronises them and the "
            "next forward. Ask for it after backward() and before the model is called again." + see("FD014")
        )
    squares, counts = now.reducer.local_sums().unbind(1)
    places = _places(now)
    found = sorted((places[index], index, counts[index].item()) for index in counts.nonzero().flatten().tolist())
    largest = int(squares.where(counts == 0, -1.0).argmax())
    there = int(((squares != 0) | (counts != 0)).sum())
    header = [now.process_group.rank(), len(found), there, largest, math.sqrt(max(squares[largest].item(), 0.0))]
    words = [number for one in found[:_MOST_OF_A_RANK] for number in one]
    return [*header, *words, *[0.0] * (_WORDS * _MOST_OF_A_RANK - len(words))]


def _places(now: InForce) -> list[int]:
    """By parameter: its place in the order in which gradients came in the first step; the rest is last."""
    number = len(now.setting.names)
    places = [0] * number
    for place, index in enumerate(dict.fromkeys([*now.reducer.arrival_order(), *reversed(range(number))])):
        places[index] = place
    return places


def _judged(now: InForce, said: list[list[float]]) -> NonFinite | None:
    """The conclusion from what ranks said."""
    names, parameters = now.setting.names, now.setting.parameters
    largest = _largest(now, said)
    found: list[tuple[int, int, int, int]] = []  # place, rank, parameter, count
    for of_rank in said:
        for first in range(_HEADER, _HEADER + _WORDS * min(int(of_rank[1]), _MOST_OF_A_RANK), _WORDS):
            place, index, count = map(int, of_rank[first : first + _WORDS])
            found.append((place, int(of_rank[0]), index, count))
    gradients = tuple(
        NonFiniteGradient(rank, names[index], count, _elements(parameters[index]))
        for _, rank, index, count in sorted(found)[:_MOST_LISTED]
    )
    if gradients:
        first_of_all = gradients[0]
        total = sum(int(of_rank[1]) for of_rank in said)
        losses = {int(rank): int(there) for rank, bad, there, *_ in said if bad == there > 1}
        return NonFinite(
            first_of_all.rank,
            first_of_all.parameter,
            first_of_all.count,
            first_of_all.elements,
            gradients,
            total,
            largest,
            losses=tuple(losses),
            of_a_loss=max(losses.values(), default=0),
        )
    synchronised = _synchronised(now, all_are_here=len(said) == now.process_group.size())
    if not synchronised:
        return None
    _, index, count = synchronised[0]
    return NonFinite(None, names[index], count, _elements(parameters[index]), (), len(synchronised), largest)


def _largest(now: InForce, said: list[list[float]]) -> tuple[int, str, float]:
    """Rank, parameter and norm."""
    rank, _, _, index, norm = max((of_rank[:_HEADER] for of_rank in said), key=lambda header: header[4])
    return int(rank), now.setting.names[int(index)], norm


def _synchronised(now: InForce, all_are_here: bool) -> list[tuple[int, int, int]]:
    """Place, parameter and count of synchronised gradients that are not finite; sharded: on all ranks, if here."""
    places = _places(now)
    counts = now.reducer.synchronised_not_finite()
    if counts is None:
        counts = torch.tensor([_not_finite(gradient) for gradient in now.reducer.own_gradients()])
    if now.setting.sharding is not None and all_are_here:
        counts = counts.to(now.device)
        together(dist.all_reduce, counts, group=now.setting.sharding_group)
    return sorted((places[index], index, int(counts[index])) for index in counts.nonzero().flatten().tolist())


def _not_finite(gradient: Tensor | None) -> int:
    if gradient is None:
        return 0
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    return int(values.isfinite().logical_not().sum())


def _elements(parameter: Tensor) -> int:
    return parameter.numel() * (2 if parameter.is_complex() else 1)
