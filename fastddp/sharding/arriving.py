"""Parameters that are still on their way when they are read (``gather="forward"``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from fastddp.module.nested import tensors_in
from fastddp.torch_compat.compiling import leave_alone

_Wait = Callable[[Tensor], None]
_Parameters = dict[str, Any]
_OF_MODULES = frozenset(vars(nn.Module()))  # the rest are attributes that users' classes have set


class _Arriving(_Parameters):
    """A module's parameters, as a dict in which whoever reads one waits until it is here.

    It stands in the module's ``_parameters`` while parameters are on their way. A hook before each module's forward
    would not be enough: modules read parameters of others (as ``nn.MultiheadAttention`` those of its projection).
    ``before``: the dict in whose place it stands. Others may hold that one, so it follows.
    """

    def __init__(self, before: _Parameters, wait: _Wait) -> None:
        super().__init__(before)
        self.before, self._wait = before, wait

    def is_of(self, wait: _Wait) -> bool:
        return self._wait is wait

    def _here(self, parameter: Any) -> Any:
        if parameter is not None:
            self._wait(parameter)
        return parameter

    def __getitem__(self, name: str) -> Any:
        return self._here(super().__getitem__(name))

    def __setitem__(self, name: str, parameter: Any) -> None:
        super().__setitem__(name, parameter)
        self.before[name] = parameter

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        del self.before[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self._here(super().get(name, default))

    def pop(self, name: str, *default: Any) -> Any:
        self.before.pop(name, None)
        return self._here(super().pop(name, *default))

    def __iter__(self) -> Any:
        return iter(self.keys())  # without this method, dict(...) and {**...} would not call those above

    def values(self) -> Any:
        for parameter in super().values():
            self._here(parameter)
        return super().values()

    def items(self) -> Any:
        self.values()
        return super().items()

    def copy(self) -> _Parameters:
        return dict(self.items())

    def __reduce__(self) -> Any:
        return dict, (self.copy(),)


class ModulesWithArriving:
    """The modules of ``model`` that have parameters on their way; ``known``: the buckets of those, by identity."""

    def __init__(self, model: nn.Module, known: Mapping[int, int]) -> None:
        leave_alone(_Arriving._here, _Arriving.__getitem__, _Arriving.get, _Arriving.values, where_inlined=False)
        self._modules: list[nn.Module] = []
        elsewhere: list[Any] = []
        seen: set[int] = set()
        for module in model.modules():
            held = module._parameters
            own = {id(parameter) for parameter in held.values()} & known.keys()
            if type(held) is not dict:  # of a module that was traced or scripted
                elsewhere.extend(held.values())
            elif own:
                self._modules.append(module)
                seen |= own
            elsewhere.extend(tensors_in([value for name, value in vars(module).items() if name not in _OF_MODULES]))
        apart = (known.keys() - seen) | ({id(one) for one in elsewhere} & known.keys())
        self.unseen = {known[one] for one in apart}
        """Buckets of parameters that may be read past the dictionaries of modules."""

    def begin(self, wait: _Wait) -> None:
        """Whoever reads one of the parameters through its module calls ``wait`` with it, from now on."""
        self._wait = wait
        for module in self._modules:
            module.__dict__["_parameters"] = _Arriving(module._parameters, wait)

    def end(self) -> None:
        """All parameters are here."""
        for module in self._modules:
            held = module.__dict__["_parameters"]
            if isinstance(held, _Arriving) and held.is_of(self._wait):
                module.__dict__["_parameters"] = held.before
