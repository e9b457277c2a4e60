"""Finds parameters that would train on each rank alone, because they changed after the module was wrapped."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from fastddp.errors import see
from fastddp.module.parameters import NamedParameters, trained_parameters

if TYPE_CHECKING:
    from fastddp._C import Reducer

_MOST_LISTED = 10


class ParameterWatch:
    """Notices, before a forward, that a parameter of ``module`` would train without the other ranks.

    Torch's DDP does not notice, and replicas drift apart in silence. Causes are ``load_state_dict(assign=True)`` and
    other replacements of parameters or modules, ``requires_grad_()`` on a frozen parameter, and changes after which
    autograd has lost the reducer's hooks: a cast or a move in place (``model.double()``), a parametrization.

    If nothing has changed, as usual, a check costs about 50 ns a parameter. Those whose names are ``ignored`` stay
    local; ``reducer`` has the gradients of the ``parameters``.
    """

    def __init__(self, module: nn.Module, ignored: set[str], parameters: NamedParameters, reducer: Reducer) -> None:
        self._module = module
        self._ignored = ignored
        self._names = parameters.names
        self._known = set(map(id, parameters.tensors))
        self._reducer = reducer
        self._remember()

    def check(self) -> None:
        """Raise RuntimeError if there are such parameters; it names them."""
        if not self._nothing_has_changed():
            _refuse(self._unknown(), "is not the parameter that was wrapped, or was frozen then")
            self._remember()
        cast = [self._names[index] for index in self._reducer.parameters_without_hook()]
        _refuse(cast, "has lost its gradient hook: it was cast, moved or parametrized in place")

    def _nothing_has_changed(self) -> bool:
        if list(map(len, self._dicts)) != self._sizes or any(parameter.requires_grad for parameter in self._frozen):
            return False
        try:
            return all(map(operator.is_, map(operator.getitem, self._owners, self._keys), self._values))
        except KeyError:
            return False

    def _remember(self) -> None:
        """Note which parameters and submodules are in the module."""
        self._dicts: list[dict[str, Any]] = [
            held for child in self._module.modules() for held in (child._parameters, child._modules)
        ]
        self._sizes = [len(held) for held in self._dicts]
        places = [(held, key, value) for held in self._dicts for key, value in held.items()]
        self._owners = [held for held, _, _ in places]
        self._keys = [key for _, key, _ in places]
        self._values = [value for _, _, value in places]
        self._frozen = [p for p in self._module.parameters() if not p.requires_grad]

    def _unknown(self) -> list[str]:
        trained = trained_parameters(self._module, self._ignored)
        # torch.func.functional_call replaces parameters by plain tensors, whose gradients are the caller's own.
        own = [(name, parameter) for name, parameter in trained if isinstance(parameter, nn.Parameter)]
        return [name for name, parameter in own if id(parameter) not in self._known]


def _refuse(names: Sequence[str], what: str) -> None:
    if not names:
        return
    more = f" and {len(names) - _MOST_LISTED} more" if names[_MOST_LISTED:] else ""
    raise RuntimeError(
        f"fastddp: the module has changed since it was wrapped or replicated: {', '.join(names[:_MOST_LISTED])}{more} "
        f"{what}. Gradients of such a parameter would stay on each rank. Wrap or replicate the module again after "
        "load_state_dict(assign=True), requires_grad_(), .to(dtype or device) or a change of its layers "
        "(load_state_dict without assign=True copies values and needs nothing). Or leave what shall stay local out "
        "with _set_params_and_buffers_to_ignore_for_model before that." + see("FD012")
    )
