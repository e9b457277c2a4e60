"""Parameter groups that a class of their own steps, as AdamW beside Muon."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

OWN = "optimizer_class"  # in a parameter group as users give it
Make = Callable[[list[Any]], Optimizer]


def without_classes(groups: Sequence[Any]) -> tuple[list[Any], dict[int, Make]]:
    """Parameters or groups as torch takes them; and by number of the group, the class that it names."""
    own = {number: one[OWN] for number, one in enumerate(groups) if isinstance(one, dict) and OWN in one}
    taken = [
        {key: one[key] for key in one if key != OWN} if number in own else one for number, one in enumerate(groups)
    ]
    return taken, own


def make_optimizer(make: Make, own: Mapping[int, Make], groups: list[Any]) -> Optimizer:
    """``make`` makes the optimizer of all groups, unless some have an ``own`` class."""
    if not own:
        return make(groups)
    return _OneForEachGroup([own.get(number, make)([group]) for number, group in enumerate(groups)])


def members(optimizer: Any) -> Sequence[Any]:
    """The optimizers of users' classes in what :func:`make_optimizer` has made."""
    return optimizer.each if isinstance(optimizer, _OneForEachGroup) else [optimizer]


def names_of(inner: Sequence[Optimizer]) -> str:
    """Of the classes of one of these optimizers."""
    return " and ".join(sorted({type(member).__name__ for one in inner[:1] for member in members(one)}))


class _OneForEachGroup(Optimizer):
    """An optimizer for each group, with one ``state``."""

    def __init__(self, each: Sequence[Optimizer]) -> None:
        self.each = each
        super().__init__([group for one in each for group in one.param_groups], {})
        self._share()

    def _share(self) -> None:
        self.param_groups = [group for one in self.each for group in one.param_groups]
        self.state = defaultdict(dict)
        for one in self.each:
            self.state.update(one.state)
            one.state = self.state

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for one in self.each:
            one.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = state_dict["state"]
        for one, group in zip(self.each, state_dict["param_groups"], strict=True):
            own = {number: state[number] for number in group["params"] if number in state}
            one.load_state_dict({"state": own, "param_groups": [group]})
        self._share()
