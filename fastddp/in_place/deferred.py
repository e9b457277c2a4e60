"""A module that gets its wrapper when it is first used."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fastddp.in_place.classes import plain
from fastddp.in_place.hidden_wrapper import HiddenWrapper, is_followed
from fastddp.in_place.local_training import note_end_of, waiting
from fastddp.torch_compat.refusals import REPLICATED


class Deferred:
    """Stands for the wrapper of a module until a forward of it, or of a submodule, needs that.

    Args:
        arguments: of the wrapper's constructor.
        state: of the wrapper that this is a copy of, in place of ``arguments``.
    """

    def __init__(self, arguments: dict[str, Any] | None = None, state: dict[str, Any] | None = None) -> None:
        self._arguments = arguments
        self._state = state
        self._calls: list[tuple[str, tuple[Any, ...]]] = []  # of the wrapper's methods, once it is there
        self._handles: list[RemovableHandle] = []
        self._module: weakref.ref[nn.Module] | None = None

    def attach(self, module: nn.Module) -> None:
        """Belong to ``module``; a method of it that calls a submodule needs the wrapper, too."""
        self._module = weakref.ref(module)
        this = weakref.ref(self)

        def first(submodule: nn.Module, inputs: Any) -> None:
            deferred = this()
            if deferred is not None and not deferred.runs(module_of()):
                deferred.ready(module_of())

        module_of: Any = self._module
        self._handles = [one.register_forward_pre_hook(first) for one in module.modules() if one is not module]
        waiting.add(self)

    def detach(self) -> None:
        """Belong to no module."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        waiting.discard(self)

    def parameters(self) -> list[nn.Parameter]:
        """Of the module that waits."""
        module = None if self._module is None else self._module()
        return [] if module is None else list(module.parameters())

    def when_ready(self, method: str, *args: Any) -> None:
        """Call a method of the wrapper as soon as there is one."""
        self._calls.append((method, args))

    def runs(self, module: nn.Module) -> bool:
        """Whether a forward needs no wrapper. Of a copy, only those that train need it."""
        return not (is_followed() and (self._state is None or torch.is_grad_enabled()))

    def ready(self, module: nn.Module) -> HiddenWrapper:
        """Make the wrapper, on all ranks, and let ``module`` have it."""
        wrapper = HiddenWrapper.__new__(HiddenWrapper)
        with plain(module):
            if self._state is None:
                wrapper.__init__(module, **self._arguments)  # type: ignore[misc]
            else:
                wrapper.module = module
                wrapper.__setstate__(self._state)
        self.detach()
        module.__dict__[REPLICATED] = wrapper
        note_end_of(module, wrapper)
        for method, args in self._calls:
            getattr(wrapper, method)(*args)
        return wrapper

    def is_of_copy(self) -> bool:
        """Whether the module was copied from another one, and nobody has asked for its replication."""
        return self._state is not None

    def to_copy(self) -> dict[str, Any]:
        """The arguments of a :class:`Deferred` of a copy."""
        return {"arguments": self._arguments, "state": self._state}

    def to_pickle(self) -> dict[str, Any]:
        """The same, without what another process cannot have."""
        return self.to_copy()

    def kept_in_copies(self) -> list[Any]:
        """What a copy has in common with the original."""
        return [] if self._arguments is None else list(self._arguments.values())
