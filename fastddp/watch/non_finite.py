"""Who brought NaN: of gradients that are not finite when ranks have added them up, the rank and the parameter.

What packs gradients leaves their sums of squares, and how many elements are not finite, as each rank had them (Note
[Local sums], ``csrc/pack/local_sums.h``). Whether a rank had some, ranks tell each other in a window's status, so a
step without trouble has no collective more and waits for nothing. Where there is trouble, one small all-gather says who
had what.
"""

from __future__ import annotations

import logging
import math
import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fastddp.watch.corruption import Corruption, deliver
from fastddp.watch.scaler import a_scaler_steps
from fastddp.wrapper import Wrapper

_log = logging.getLogger("fastddp")

_MOST_OF_A_RANK = 16
_MOST_LISTED = 64

_UNDER_A_SCALER = " With a GradScaler a few of these are normal: at the start, and whenever it tries a larger scale."

_since: weakref.WeakKeyDictionary[Wrapper, tuple[int, int]] = weakref.WeakKeyDictionary()
"""The first and the last of the steps up to now whose gradients were not finite, one after another."""


@dataclass(frozen=True)
class NonFiniteGradient:
    """A rank's gradient of a parameter, as it was before ranks added them up, with elements that are not finite."""

    rank: int
    """Within the model's process group."""
    parameter: str
    count: int
    """Elements that are not finite; a complex number counts as two."""
    elements: int
    """All of the parameter's, counted in the same way."""


@dataclass(frozen=True)
class NonFinite:
    """Where gradients that are not finite come from."""

    rank: int | None
    """Within the model's process group. None: every rank's own gradients were finite, and what they were cast to for
    the wire, or what they add up to, is not."""
    parameter: str
    """The first in the order in which gradients came in the first step; of several ranks, that of the lowest."""
    count: int
    """Elements of its gradient that are not finite: of that rank's own; without a rank, of the synchronised one."""
    elements: int
    """All of the parameter's; a complex number counts as two."""
    gradients: tuple[NonFiniteGradient, ...]
    """All that were not finite, in that order: up to 16 of a rank, and 64 in all. Empty without a rank."""
    total: int
    """How many there were on all ranks, listed or not; without a rank, of synchronised ones."""
    largest: tuple[int, str, float]
    """Rank, parameter and 2-norm of the gradient with the largest norm, of those that were finite; infinite where the
    square of the norm is too large for what adds it up: fp64, on a GPU fp32."""
    losses: tuple[int, ...] = ()
    """Ranks none of whose gradients was finite, but for those that are zeros: the loss was not finite, or what it was
    computed from."""
    of_a_loss: int = 0
    """How many gradients these ranks had, the most of one; without zeros."""

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


def blame(model: Wrapper) -> NonFinite | None:
    """As :meth:`fastddp.DistributedDataParallel.blame_non_finite`."""
    return _judged(model, _what_all_ranks_had(model))


def look(model: Wrapper) -> None:
    """Deliver what was not finite, or too large, in the last window: before a forward, and an optimizer's step.

    Where nothing was this costs a call. Otherwise, where each rank of the exchange knows of it at this moment, they
    gather who had what. A device with streams lets its host know later, each rank at another moment; and a result that
    is not finite, of gradients that were, may have come to this rank alone. Then a rank says what it had itself.

    Raises:
        CorruptionError: ``Watch.corruption`` is "raise"; or whatever the user's callable raises.
    """
    noticed = model.reducer.take_not_finite()
    if noticed is None:
        return _say_that_all_is_well(model)
    corruption = _what_was_wrong(model, *noticed)
    if corruption is None:
        return None
    first, last = _since.get(model, (corruption.step, corruption.step))
    _since[model] = (first, corruption.step)
    # Whoever reads a log wants to know when it began, once, and when it ended.
    if model._watch.corruption != "report" or (last == corruption.step and _speaks(model, corruption, *noticed[1:])):
        deliver(corruption, model._watch.corruption)
    return None


def _speaks(model: Wrapper, corruption: Corruption, by_all: bool, in_result: bool) -> bool:
    """Where all ranks know the same, the first one; where all notice, and each knows its own, those that had it too."""
    rank = model.process_group.rank()
    return rank == 0 or (not by_all and (in_result or rank in corruption.ranks))


def _say_that_all_is_well(model: Wrapper) -> None:
    first, last = _since.get(model, (0, 0))
    if last == 0 or model.reducer.state != "finished" or model.reducer.windows() <= last:
        return
    del _since[model]
    if model._watch.corruption == "report" and model.process_group.rank() == 0:
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        _log.warning("fastddp: gradients are finite again. They were not in %s.", steps)


def _what_was_wrong(model: Wrapper, window: int, by_all: bool, in_result: bool) -> Corruption | None:
    step = window + 1
    if model.reducer.state != "finished" or model.reducer.windows() != step:  # it is not the last one
        return _corruption(step, None, by_all, in_result)
    by_all = by_all and not model._join_config.enable  # a rank without inputs would not take part
    said = _what_all_ranks_had(model) if by_all else [_what_this_rank_had(model).tolist()]
    found = _judged(model, said)
    may_be_spread = model in _since or (found is not None and len(found.losses) == len(said))
    if may_be_spread and (name := _first_parameter_that_is_not_finite(model)) is not None:
        since = ""
        if model in _since:
            since = f": since step {_since[model][0]} an optimizer has stepped with gradients that were not finite"
        message = (
            f"fastddp: gradients of step {step} are not finite, because parameters are not, {name} first{since}. "
            "No rank is to blame for this step. Load the last checkpoint before that."
        )
        return Corruption("non_finite", step, (), name, message)
    if found is None:
        too_large = _too_large(model, step, said)
        keeps_its_own = model._exchange.group(model._setting) is None
        if too_large is not None or by_all or keeps_its_own or model.device.type == "cpu":
            return too_large  # or nothing: large, but not too large; on a device only what is not finite is noticed
    return _corruption(step, found, by_all, in_result)


def _too_large(model: Wrapper, step: int, said: list[list[float]]) -> Corruption | None:
    """Of gradients that are all finite; note [Too large], ``csrc/reducer/local_gradients.h``."""
    headers = [of_rank[:_HEADER] for of_rank in said]
    ranks = tuple(int(rank) for rank, _, _, index, norm in headers if norm >= model.reducer.too_large(int(index)))
    if not ranks:
        return None
    rank, name, norm = _largest(model, said)
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
        remedy = "model.blame_non_finite(), called on all ranks behind a backward, tells who brought them."
        message = f"{opening}, on another rank than this. {remedy}{under_a_scaler}"
        return Corruption("non_finite", step, (), None, message)
    ranks = tuple(sorted({one.rank for one in found.gradients}))
    elsewhere = "" if by_all else " What other ranks had is not known to this one."
    parameter = None if found.losses else found.parameter
    return Corruption("non_finite", step, ranks, parameter, f"{opening}: {found}{elsewhere}{under_a_scaler}")


def _first_parameter_that_is_not_finite(model: Wrapper) -> str | None:
    """Its name; the host waits for the device."""
    named = zip(model._setting.names, model._parameters_to_reduce.tensors, strict=True)
    return next((name for name, parameter in named if _not_finite(parameter.detach())), None)


def _what_all_ranks_had(model: Wrapper) -> list[list[float]]:
    said = _what_this_rank_had(model)
    group = model._exchange.group(model._setting) or model.process_group
    of_all = [torch.empty_like(said) for _ in range(group.size())]
    dist.all_gather(of_all, said, group=group)
    return [rank.tolist() for rank in of_all]


# What a rank says, numbers in fp64: rank, number of gradients that are not finite, and of all that are not zeros,
# parameter and norm of its largest one, and for each of the first of those that are not finite its place in the order,
# its parameter, and how many elements.
_HEADER = 5
_WORDS = 3


def _what_this_rank_had(model: Wrapper) -> Tensor:
    if model._watch.corruption is None:
        raise RuntimeError(
            "What each rank's gradients were is measured only where it is asked for: wrap the module with "
            'watch=fastddp.Watch(corruption=...): "report", "raise", or a callable.'
        )
    if model.reducer.state != "finished":
        raise RuntimeError(
            "Who brought gradients that are not finite is known between the backward that synchronises them and the "
            "next forward. Ask for it after backward() and before the model is called again."
        )
    squares, counts = model.reducer.local_sums().unbind(1)
    places = _places(model)
    found = sorted((places[index], index, counts[index].item()) for index in counts.nonzero().flatten().tolist())
    largest = int(squares.where(counts == 0, -1.0).argmax())
    there = int(((squares != 0) | (counts != 0)).sum())
    header = [model.process_group.rank(), len(found), there, largest, math.sqrt(max(squares[largest].item(), 0.0))]
    words = [number for one in found[:_MOST_OF_A_RANK] for number in one]
    said = torch.zeros(_HEADER + _WORDS * _MOST_OF_A_RANK, dtype=torch.float64)
    said[: len(header) + len(words)] = torch.tensor([*header, *words], dtype=torch.float64)
    return said.to(model.device)


def _places(model: Wrapper) -> list[int]:
    """By parameter: its place in the order in which gradients came; what did not come in the first step is last."""
    number = len(model._setting.names)
    places = [0] * number
    for place, index in enumerate(dict.fromkeys([*model.reducer.arrival_order(), *reversed(range(number))])):
        places[index] = place
    return places


def _judged(model: Wrapper, said: list[list[float]]) -> NonFinite | None:
    """By what these ranks have said."""
    names, parameters = model._setting.names, model._setting.parameters
    largest = _largest(model, said)
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
    synchronised = _synchronised(model)
    if not synchronised:
        return None
    _, index, count = synchronised[0]
    return NonFinite(None, names[index], count, _elements(parameters[index]), (), len(synchronised), largest)


def _largest(model: Wrapper, said: list[list[float]]) -> tuple[int, str, float]:
    """Rank, parameter and norm."""
    rank, _, _, index, norm = max((of_rank[:_HEADER] for of_rank in said), key=lambda header: header[4])
    return int(rank), model._setting.names[int(index)], norm


def _synchronised(model: Wrapper) -> list[tuple[int, int, int]]:
    """Of synchronised gradients that are not finite: place, parameter, count."""
    places = _places(model)
    counts = model.reducer.synchronised_not_finite()
    if counts is None:
        counts = torch.tensor(
            [_not_finite(model._main_gradients.gradient_of(p)) for p in model._parameters_to_reduce.tensors]
        )
    return sorted((places[index], index, int(counts[index])) for index in counts.nonzero().flatten().tolist())


def _not_finite(gradient: Tensor | None) -> int:
    if gradient is None:
        return 0
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    return int(values.isfinite().logical_not().sum())


def _elements(parameter: Tensor) -> int:
    return parameter.numel() * (2 if parameter.is_complex() else 1)
