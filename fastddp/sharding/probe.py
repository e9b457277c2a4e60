"""How an optimizer can be sharded. Torch's elementwise classes are known; others are tried on small parameters."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastddp.errors import see
from fastddp.sharding.mixed import Make
from fastddp.sharding.parts import Group, carry_over, empty_like, settings_of
from fastddp.sharding.state import is_of_elements

_ELEMENTWISE = {
    getattr(torch.optim, name)
    for name in "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()  # noqa: SIM905
}
_SCALES = (1.0, 1e-2, 100.0, 1.0, 1.0)  # of each step's gradients, for what depends on a norm
_SMALL, _LARGE = 8, 256  # of a dimension: large matrices are factored from 128 on, or quantised in blocks of up to 256
_ALL = (0.0, 1.0)

Part = tuple[float, float]
_Result = tuple[dict[int, tuple[Tensor, dict[str, Any]]], list[dict[str, Any]]]


class Way(NamedTuple):
    """How an optimizer can be sharded, and what was seen of it."""

    shard: str  # as the argument, or "unknown"
    seen: str = ""


def find_way(make: Make, own: Mapping[int, Make], groups: Sequence[Group]) -> Way:
    """Whether an optimizer treats elements by themselves, or parameters; ValueError: it needs all, or a closure."""
    alone = [(own.get(number, make), [group]) for number, group in enumerate(groups)]
    ways = [_way_of(*each) for each in (alone if own else [(make, groups)])]
    return min(ways, key=lambda way: ("parameters", "unknown", "elements").index(way.shard))


def _way_of(make: Any, groups: Sequence[Group]) -> Way:
    kind = getattr(make, "func", make)  # of a functools.partial
    if kind in _ELEMENTWISE:
        return Way("elements")
    name, state = getattr(kind, "__name__", repr(kind)), random.getstate()
    try:
        with (
            torch.random.fork_rng(devices=[]),
            warnings.catch_warnings(),
            torch.no_grad(),
            _WithoutCollectives() as trial,
        ):
            warnings.simplefilter("ignore")
            shard, seen = _Trial(make, groups, _SMALL).way()
            if shard == "elements":
                shard, seen = _Trial(make, groups, _LARGE).way_of_parts()
    finally:
        random.setstate(state)
    if trial.called:
        shard, seen = "neither", "calls collectives in its step, so it shards itself"
    if shard == "neither":
        raise ValueError(
            f"{name} {seen}, and each rank has a part. Use it without ShardedOptimizer, over model.parameters()."
            + see("FD046")
        )
    return Way(shard, f"{name} {seen}")


class _WithoutCollectives(TorchDispatchMode):
    """A trial has other parameters than a step: what ranks exchange in it would be anything, or nothing."""

    called = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # an optimizer may compile its step

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            self.called = True
            raise RuntimeError("a trial has no ranks")
        return func(*args, **(kwargs or {}))


class _Trial:
    """Steps of one class with all parameters, with some of them, and with parts of them."""

    def __init__(self, make: Make, groups: Sequence[Group], most: int) -> None:
        self._make, self._groups = make, groups
        self._generator = torch.Generator().manual_seed(1)
        examples = [(number, like) for number, group in enumerate(groups) for like in _examples(group["params"])]
        # Many large ones would take long.
        largest = {id(one) for one in _examples([like for _, like in examples]) if one.dim() < 3}
        sizes = [most if id(like) in largest else _SMALL for _, like in examples]
        self._parameters = [
            (number, *self._drawn(like, size)) for (number, like), size in [*zip(examples, sizes, strict=True)] * 2
        ]  # the group of each, its values, and its gradients
        self._every = range(len(self._parameters))
        self._whole: _Result = {}, []

    def _drawn(self, like: Tensor, most: int) -> tuple[Tensor, list[Tensor]]:
        shape = [min(max(size, 2), most) for size in like.shape or (2,)]
        drawn = torch.randn(len(_SCALES) + 2, *shape, generator=self._generator, dtype=torch.float64)
        values, common, *rest = drawn.to(like.device)
        # Most gradients keep their signs from step to step, as in training.
        return values, [(common + one) * scale for one, scale in zip(rest, _SCALES, strict=True)]

    def way(self) -> Way:
        try:
            self._whole = self._run()
        except Exception as error:
            if not self._fault("", closure=[lambda: torch.zeros(())]):  # so it does not raise
                return Way("neither", "takes a closure in its step, which computes all gradients again")
            return Way("unknown", f"could not be tried on small parameters in fp64 ({type(error).__name__}: {error})")
        if self._fault("is random"):
            return Way("unknown", "makes other steps each time that it is tried")
        seen, half = "steps parameters in another way together than apart, by a number over all", len(self._every) // 2
        fault = self._fault(seen, self._every[:half]) or self._fault(seen, self._every[half:])
        if fault := fault or self._fault("keeps outside of its state and groups what nobody can move", moves=True):
            return Way("neither", fault)
        if not all(moved.any() for moved, _ in self._whole[0].values()):
            return Way("unknown", f"has left a parameter as it was in {len(_SCALES)} steps")
        return self.way_of_parts()

    def way_of_parts(self) -> Way:
        seen = "steps a parameter in two parts in another way than whole, or has other state for it"
        try:
            self._whole = whole, _ = self._run()
        except Exception as error:  # small ones did well
            return Way("parameters", f"raises {type(error).__name__} with large parameters ({error})")
        can_be_cut = all(_can_be_cut(value, moved) for moved, state in whole.values() for value in state.values())
        fault = "" if can_be_cut else seen
        if fault := fault or self._fault(seen, part=(0.0, 0.4)) or self._fault(seen, part=(0.4, 1.0)):
            return Way("parameters", fault)
        return Way("elements")

    def _fault(self, seen: str, numbers: Sequence[int] | None = None, part: Part = _ALL, **how: Any) -> str:
        """``seen``, if steps with some parameters, or parts of them, differ from those with all; or what they raise."""
        try:
            found = self._run(numbers, part, **how)
        except Exception as error:
            return f"raises {type(error).__name__} with {'parts' if part != _ALL else 'some'} of parameters ({error})"
        expected = {
            number: (
                _cut(moved, part),
                {key: _cut(one, part) if is_of_elements(one, moved) else one for key, one in state.items()},
            )
            for number, (moved, state) in self._whole[0].items()
            if number in found[0]
        }
        return "" if _are_same((expected, self._whole[1]), found) else seen

    def _run(
        self,
        numbers: Sequence[int] | None = None,
        part: Part = _ALL,
        closure: Sequence[object] = (),
        moves: bool = False,
    ) -> _Result:
        """How far parameters are moved, their state, and the optimizer's numbers; ``moves``: another one takes over."""
        holders = {
            number: nn.Parameter(_cut(self._parameters[number][1], part).clone()) for number in numbers or self._every
        }
        groups = [self._group(number, holders) for number in range(len(self._groups))]
        try:
            optimizer: Any = self._make(groups)
        except Exception:  # some classes take no groups
            optimizer = self._make([holder for group in groups for holder in group["params"]])
        getattr(optimizer, "train", lambda: None)()
        for step in range(len(_SCALES)):
            for number, holder in holders.items():
                holder.grad = _cut(self._parameters[number][2][step], part).clone()
            optimizer.step(*closure)
            if moves and step == 0:
                old, optimizer = optimizer, self._make([dict(group) for group in optimizer.param_groups])
                optimizer.state.update(old.state)
                carry_over(old, optimizer)
        of = {}
        for number, holder in holders.items():
            moved = holder.detach() - _cut(self._parameters[number][1], part)
            of[number] = moved, dict(optimizer.state.get(holder, {}))
        places = [*optimizer.param_groups, vars(optimizer)]
        return of, [{key: one for key, one in place.items() if _is_number(one)} for place in places]

    def _group(self, number: int, holders: Mapping[int, Tensor]) -> Group:
        values = [one for of, one, _ in self._parameters if of == number]
        own = [holder for index, holder in holders.items() if self._parameters[index][0] == number]
        return {**copy.deepcopy(settings_of(self._groups[number])), "params": own or [empty_like(values[0])]}


def _examples(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The largest of each number of dimensions; of none, a matrix."""
    largest = {one.dim(): one for one in sorted(parameters, key=Tensor.numel)}
    return [*largest.values()] or [torch.empty(_SMALL, _SMALL)]


def _cut(one: Tensor, part: Part) -> Tensor:
    begin, end = (int(one.numel() * at) for at in part)
    return one if part == _ALL else one.flatten()[begin:end]


def _can_be_cut(value: Any, moved: Tensor) -> bool:
    """Not a tensor of another shape, which could not be told from a part, nor an object."""
    if isinstance(value, Tensor):
        return is_of_elements(value, moved) or value.dim() == 0
    return value is None or isinstance(value, (int, float, str, list, tuple))


def _is_number(one: Any) -> bool:
    return one.numel() == 1 if isinstance(one, Tensor) else isinstance(one, (int, float))


def _are_same(some: Any, others: Any) -> bool:
    """To rounding. Objects count as the same."""
    if isinstance(some, Mapping) and isinstance(others, Mapping):
        return some.keys() == others.keys() and all(_are_same(some[key], others[key]) for key in some)
    if isinstance(some, (list, tuple)) and isinstance(others, (list, tuple)):
        return len(some) == len(others) and all(map(_are_same, some, others))
    if not isinstance(some, (int, float, Tensor)) or not isinstance(others, (int, float, Tensor)):
        return type(some) is type(others)
    one, other = torch.as_tensor(some).double(), torch.as_tensor(others).double()
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-6, atol=1e-13, equal_nan=True)
