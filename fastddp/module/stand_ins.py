"""Stand-ins: tensors in the places of a module's parameters while it runs, connected with them by autograd.

Through the stand-ins, gradients reach the parameters. So the reducer need not know of stand-ins, and several forwards,
``no_sync`` and inference need no special cases. Activation checkpointing runs parts of the module again in the
backward. Therefore the stand-ins are in place again from the moment when a backward reaches an output of the module
until it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from fastddp.errors import see
from fastddp.module.backward import is_inside_backward, when_backward_ends, when_backward_reaches

_FIRST_IN_BACKWARD = 2**64 - 1

Step: TypeAlias = Callable[[nn.Parameter, Tensor], Tensor]
"""``step(parameter, tensor)`` makes the parameter's stand-in of ``tensor``, which is the result of earlier steps."""

_Tensors: TypeAlias = dict[nn.Parameter, Tensor]
_Place: TypeAlias = tuple[dict[str, Any], str, nn.Parameter]  # a module's _parameters, a name in it, its parameter


class StandIns:
    """Runs modules with a stand-in, made by ``steps``, in all places of each parameter."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps
        self._in_backward = _Replacement([], {})

    @torch._disable_dynamo(recursive=False)  # the module itself may be compiled
    def run(self, module: nn.Module, call: Callable[..., Any], inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return ``call(*inputs, **kwargs)``, which runs ``module``.

        Also after an exception, the parameters are in their places again.
        """
        self.put_parameters_back()
        tensors: _Tensors = {}
        replacement = self._replace(module, tensors)
        try:
            output = call(*inputs, **kwargs)
        finally:
            replacement.undo()
        self._stand_in_backward_of(output, module, tensors)
        return output

    def put_parameters_back(self) -> None:
        """Undo what a failed backward has left: a device's thread may not have noticed the failure yet."""
        if not is_inside_backward():
            self._in_backward.undo()

    @torch._disable_dynamo
    def _stand_in_backward_of(self, output: Any, module: nn.Module, tensors: _Tensors) -> None:
        """Put ``tensors`` in place when a backward reaches ``output``, and free them when it ends."""

        def begin() -> None:
            if self._in_backward.stands():
                return
            with torch.enable_grad():  # for tensors made anew: another backward of this graph may have freed them
                self._in_backward = replacement = self._replace(module, tensors)

            def end() -> None:
                replacement.undo()
                tensors.clear()

            when_backward_ends(end, also_after_error=True)

        when_backward_reaches(output, begin)

    @torch._disable_dynamo
    def _replace(self, module: nn.Module, tensors: _Tensors) -> _Replacement:
        """Put ``tensors`` in the places of the parameters, and make the missing ones.

        Where a backward runs the whole module once more, stand-ins are there already, and no parameter to replace.
        """
        places = _places_of_parameters(module)
        for _, _, parameter in places:
            if parameter not in tensors:
                tensors[parameter] = self._make(parameter)
        return _Replacement([place for place in places if tensors[place[2]] is not place[2]], tensors)

    def _make(self, parameter: nn.Parameter) -> Tensor:
        tensor: Tensor = parameter
        for step in self._steps:
            tensor = step(parameter, tensor)
        if tensor is parameter:
            return tensor
        # A module may read attributes of its parameters.
        tensor.__dict__.update({name: value for name, value in parameter.__dict__.items() if not hasattr(tensor, name)})
        # Autograd runs the latest operations first. Stand-ins are computed first of all, so their gradients would wait
        # until the end of the backward, and nothing could travel before.
        node = tensor.grad_fn
        while node is not None:
            node._set_sequence_nr(_FIRST_IN_BACKWARD)  # type: ignore[attr-defined]
            node = node.next_functions[0][0] if node.next_functions else None
        return tensor


class _Replacement:
    """Tensors in the places of parameters, until :meth:`undo`."""

    def __init__(self, places: list[_Place], tensors: _Tensors) -> None:
        self._places = places
        for parameters, name, parameter in places:
            parameters[name] = tensors[parameter]

    def stands(self) -> bool:
        return bool(self._places)

    @torch._disable_dynamo
    def undo(self) -> None:
        places, self._places = self._places, []
        for parameters, name, parameter in places:
            parameters[name] = parameter


def _places_of_parameters(module: nn.Module) -> list[_Place]:
    return [
        (owner._parameters, name, parameter)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if isinstance(parameter, nn.Parameter)
    ]


def check_replaceable(module: nn.Module, purpose: str) -> None:
    """Raise ``ValueError`` if part of ``module`` is compiled by TorchScript, where parameters cannot be replaced."""
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            raise ValueError(
                f"{purpose} does not work with modules of TorchScript, and {name or 'the module'} is one. Wrap the "
                "module that it was made of." + see("FD022")
            )
