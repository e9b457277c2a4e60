"""How an optimizer can be sharded. Torch's elementwise classes are known; others are tried on small parameters."""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastddp.errors import see
from fastddp.sharding.mixed import Make
from fastddp.sharding.parts import Group, carry_over, empty_like, settings_of
from fastddp.sharding.state import is_of_elements

_ELEMENTWISE = {
    getattr(torch.optim, name)
    for name in "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()  # noqa: SIM905
}
_SCALES = (1.0, 1e-2, 100.0, 1.0, 1.0)  # of each step's gradients, for what depends on a norm
_SMALL, _LARGE = 8, 130  # of a dimension: classes that treat large matrices otherwise do so from 128 on


class Way(NamedTuple):
    """How an optimizer can be sharded, and what was seen of it."""

    shard: str
    """As the argument, or "unknown"."""
    seen: str = ""


def find_way(make: Make, own: Mapping[int, Make], groups: Sequence[Group]) -> Way:
    """Whether an optimizer treats each element by itself, or each parameter; arguments as of ``make_optimizer``.

    Raises:
        ValueError: it takes a number over all parameters, or a closure.
    """
    alone = [(own.get(number, make), [group]) for number, group in enumerate(groups)]
    ways = [_way_of(*each) for each in (alone if own else [(make, groups)])]
    return min(ways, key=lambda way: ("parameters", "unknown", "elements").index(way.shard))


def _way_of(make: Any, groups: Sequence[Group]) -> Way:
    kind = getattr(make, "func", make)  # of a functools.partial
    if kind in _ELEMENTWISE:
        return Way("elements")
    name, state = getattr(kind, "__name__", repr(kind)), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            shard, seen = _Trial(make, groups, _SMALL).way()
            if shard == "elements":
                shard, seen = _Trial(make, groups, _LARGE).way_by_parts()
    finally:
        random.setstate(state)
    if shard == "neither":
        raise ValueError(
            f"{name} {seen}, and each rank has a part. Use it without ShardedOptimizer, over model.parameters()."
            + see("FD046")
        )
    return Way(shard, f"{name} {seen}")


class _Result(NamedTuple):
    of: dict[int, tuple[Tensor, dict[str, Any]]]
    """How far each parameter has moved, and its state."""
    numbers: list[dict[str, Any]]
    """In the groups, and on the optimizer itself."""


class _Trial:
    """Steps of one class with all parameters, with some of them, and with parts of them."""

    def __init__(self, make: Make, groups: Sequence[Group], most: int) -> None:
        self._make, self._groups, self._most = make, groups, most
        self._generator = torch.Generator().manual_seed(1)
        placed = [(number, group["params"]) for number, group in enumerate(groups)]
        self._parameters = [(number, *self._drawn(like)) for number, held in placed for like in _examples(held)]
        self._every = range(len(self._parameters))

    def _drawn(self, like: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Values, and gradients of each step, most of which keep their signs, as in training."""
        most = self._most if like.dim() < 3 else _SMALL
        shape = [min(max(size, 2), most) for size in like.shape or (2,)]
        drawn = torch.randn(len(_SCALES) + 2, *shape, generator=self._generator, dtype=torch.float64)
        values, common, *rest = drawn.to(like.device)
        return values, [(common + one) * scale for one, scale in zip(rest, _SCALES, strict=True)]

    def way(self) -> Way:
        every = self._every
        try:
            whole, again = self._run(every), self._run(every)
        except Exception as error:
            return self._after(error)
        if not _are_alike(whole, again):
            return Way("unknown", "makes other steps each time that it is tried")
        try:
            seen = "steps parameters in another way together than apart, by a number over all" * (
                not _are_alike(whole, self._run(every[::2]), self._run(every[1::2]))
            ) or "keeps what it needs outside of its state and groups, so that nobody can move it" * (
                not _are_alike(whole, self._run(every, moves=True))
            )
        except Exception as error:  # as of norms of no parameters
            seen = f"raises {type(error).__name__} with some of its parameters ({error})"
        if seen:
            return Way("neither", seen)
        if not all(moved.any() for moved, _ in whole.of.values()):
            return Way("unknown", f"has left a parameter as it was in {len(_SCALES)} steps")
        return self.way_by_parts()

    def way_by_parts(self) -> Way:
        every = self._every
        try:
            is_elementwise = _is_made_of(self._run(every), self._run(every, (0.0, 0.4)), self._run(every, (0.4, 1.0)))
        except Exception as error:  # as of a class that takes matrices alone
            return Way("parameters", f"raises {type(error).__name__} with parts of parameters ({error})")
        seen = "steps a parameter in two parts in another way than whole, or has other state for it"
        return Way("elements") if is_elementwise else Way("parameters", seen)

    def _after(self, error: Exception) -> Way:
        """It has raised with all parameters."""
        try:
            self._run(self._every, closure=(lambda: torch.zeros(()),))
        except Exception:
            return Way("unknown", f"could not be tried on small parameters in fp64 ({type(error).__name__}: {error})")
        return Way("neither", "takes a closure in its step, which computes all gradients again")

    def _run(
        self,
        numbers: Sequence[int],
        part: tuple[float, float] = (0.0, 1.0),
        closure: tuple[Callable[[], Tensor], ...] = (),
        moves: bool = False,
    ) -> _Result:
        """``part``: of each parameter; ``moves``: when the first step is done, another optimizer takes over."""

        def cut(one: Tensor) -> Tensor:
            begin, end = (int(one.numel() * at) for at in part)
            return (one if part == (0.0, 1.0) else one.flatten()[begin:end]).clone()

        before = {number: cut(self._parameters[number][1]) for number in numbers}
        holders = {number: nn.Parameter(values.clone()) for number, values in before.items()}
        optimizer: Any = self._make([self._group(number, holders) for number in range(len(self._groups))])
        getattr(optimizer, "train", lambda: None)()
        for step in range(len(_SCALES)):
            for number, holder in holders.items():
                holder.grad = cut(self._parameters[number][2][step])
            optimizer.step(*closure)
            if moves and step == 0:
                old, optimizer = optimizer, self._make([dict(group) for group in optimizer.param_groups])
                optimizer.state.update(old.state)
                carry_over(old, optimizer)
        states = {number: dict(optimizer.state.get(holder, {})) for number, holder in holders.items()}
        getattr(optimizer, "eval", lambda: None)()
        places = [*optimizer.param_groups, vars(optimizer)]
        numbers_in = [{key: one for key, one in place.items() if _is_number(one)} for place in places]
        of = {number: (holders[number].detach() - values, states[number]) for number, values in before.items()}
        return _Result(of, numbers_in)

    def _group(self, number: int, holders: Mapping[int, Tensor]) -> Group:
        group, values = self._groups[number], [one for of, one, _ in self._parameters if of == number]
        own = [holder for index, holder in holders.items() if self._parameters[index][0] == number]
        return {**copy.deepcopy(settings_of(group)), "params": own or [empty_like(one) for one in values[:1]]}


def _is_number(one: Any) -> bool:
    return one.numel() == 1 if isinstance(one, Tensor) else isinstance(one, (int, float))


def _examples(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The largest of each number of dimensions, twice; of none, matrices."""
    largest = {one.dim(): one for one in sorted(parameters, key=Tensor.numel)} or {2: torch.empty(6, 4)}
    return [one for one in largest.values() for _ in range(2)]


def _are_alike(whole: _Result, *others: _Result) -> bool:
    """Whether others, which have some of the parameters each, move them as far."""
    moved = {number: moved for other in others for number, (moved, _) in other.of.items()}
    are_moved_alike = all(_are_same(one, moved[number]) for number, (one, _) in whole.of.items())
    return are_moved_alike and all(_are_same(whole.numbers, other.numbers) for other in others)


def _is_made_of(whole: _Result, *parts: _Result) -> bool:
    """Whether the parts of each parameter and of its state, one after the other, are those of the whole."""
    for number, (moved, state) in whole.of.items():
        moves, states = zip(*(part.of[number] for part in parts), strict=True)
        if not _are_same(moved.flatten(), torch.cat(moves)) or any(one.keys() != state.keys() for one in states):
            return False
        for key, value in state.items():
            found = [one[key] for one in states]
            if isinstance(value, Tensor) and value.dim() and not is_of_elements(value, moved):
                return False  # it could not be told from a part of other elements
            joined = [torch.cat(found).view_as(moved)] if is_of_elements(value, moved) else found
            if not all(_are_same(value, one) for one in joined):
                return False
    return all(_are_same(whole.numbers, part.numbers) for part in parts)


def _are_same(some: Any, others: Any) -> bool:
    """To rounding."""
    if isinstance(some, Tensor) and isinstance(others, Tensor):
        return some.shape == others.shape and torch.allclose(
            some.double(), others.double(), rtol=1e-6, atol=1e-13, equal_nan=True
        )
    if isinstance(some, Mapping) and isinstance(others, Mapping):
        return some.keys() == others.keys() and all(_are_same(some[key], others[key]) for key in some)
    if isinstance(some, (list, tuple)) and isinstance(others, (list, tuple)):
        return len(some) == len(others) and all(map(_are_same, some, others))
    return bool(some == others) or (isinstance(some, float) and math.isclose(some, others, rel_tol=1e-6))
