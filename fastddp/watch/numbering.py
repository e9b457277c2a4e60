"""Which model of its process group a model is: by this, ranks know in the store which one they speak of."""

from __future__ import annotations

import weakref

import torch.distributed as dist

from fastddp.wrapper import Wrapper

_models_of: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_number_of: weakref.WeakKeyDictionary[Wrapper, int] = weakref.WeakKeyDictionary()


def give_number(model: Wrapper) -> None:
    """Give ``model`` the next number of its group: the same on all ranks, which make their models in one order."""
    _number_of[model] = _models_of[model.process_group] = _models_of.get(model.process_group, 0) + 1


def number_of(model: Wrapper) -> int:
    """The number that it was given."""
    return _number_of[model]
