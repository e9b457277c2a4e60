"""Parameters that are still on their way when they are read (``gather="forward"``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

_Wait = Callable[[Tensor], None]
_Parameters = dict[str, Any]


class Arriving(_Parameters):
    """A module's parameters. Whoever reads one through the module waits until it is here.

    It stands in the module's ``_parameters`` while parameters are on their way. A hook before each module's forward
    would not be enough: modules read parameters of others (as ``nn.MultiheadAttention`` those of its projection).
    """

    def __init__(self, parameters: _Parameters, wait: _Wait) -> None:
        super().__init__(parameters)
        self._wait = wait

    def _here(self, parameter: Any) -> Any:
        if parameter is not None:
            self._wait(parameter)
        return parameter

    def __getitem__(self, name: str) -> Any:
        """As of a dict; waits."""
        return self._here(super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        """As of a dict; waits."""
        return self._here(super().get(name, default))

    def pop(self, name: str, *default: Any) -> Any:
        """As of a dict; waits."""
        return self._here(super().pop(name, *default))

    def values(self) -> Any:
        """As of a dict; waits for all."""
        for parameter in super().values():
            self._here(parameter)
        return super().values()

    def items(self) -> Any:
        """As of a dict; waits for all."""
        self.values()
        return super().items()

    def copy(self) -> _Parameters:
        """A dict without waits; waits for all."""
        return dict(self.items())

    def __reduce__(self) -> Any:
        """Copies and pickles are plain dicts."""
        return dict, (self.copy(),)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As :meth:`__reduce__`."""
        return self.__reduce__()


class ModulesWithArriving:
    """The modules that have some of these parameters, between the step and the moment when all are here."""

    def __init__(self, model: nn.Module, parameters: Iterable[Tensor]) -> None:
        known = {id(parameter) for parameter in parameters}
        self._modules = [
            module
            for module in model.modules()
            if any(id(parameter) in known for parameter in module._parameters.values())
        ]

    def begin(self, wait: _Wait) -> None:
        """Whoever reads one of the parameters through its module calls ``wait`` with it, from now on."""
        for module in self._modules:
            module.__dict__["_parameters"] = Arriving(module._parameters, wait)

    def end(self) -> None:
        """All parameters are here."""
        for module in self._modules:
            parameters = module.__dict__["_parameters"]
            if isinstance(parameters, Arriving):
                module.__dict__["_parameters"] = dict(dict.items(parameters))
