"""Where NaN begins in a forward: the first module whose output is not finite."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fastddp.exchange.in_force import InForce
from fastddp.module.nested import tensors_in
from fastddp.watch.corruption import Corruption, OnCorruption, deliver


def find_in_next_forward(model: nn.Module, now: InForce, tell: OnCorruption) -> None:
    """See :meth:`fastddp.DistributedDataParallel.find_non_finite_module`."""
    _Search(model, now, tell)


class _Search:
    """Forward hooks on every module, until one is found or the wrapper's forward ends."""

    def __init__(self, model: nn.Module, now: InForce, tell: OnCorruption) -> None:
        self._now = now
        self._tell = tell
        self._names = {module: name for name, module in now.module.named_modules()}
        self._handles = [module.register_forward_hook(self._look, with_kwargs=True) for module in self._names]
        self._handles.append(model.register_forward_hook(lambda *_: self._end(), always_call=True))

    def _look(self, module: nn.Module, inputs: tuple[Any, ...], by_name: dict[str, Any], output: Any) -> None:
        if all(map(_is_finite, tensors_in(output))):
            return
        self._end()
        rank, name = self._now.process_group.rank(), self._names[module] or "the whole module"
        of_inputs = [tensor for tensor in tensors_in((inputs, by_name)) if tensor.is_floating_point()]
        message = (
            f"fastddp: on rank {rank} the output of {name} ({type(module).__name__}) is not finite, the first in this "
            f"forward; {_in_words(of_inputs)}."
        )
        step = self._now.reducer.windows() + 1
        deliver(Corruption("non_finite", step, (rank,), None, message), self._tell or "report")

    def _end(self) -> None:
        for handle in self._handles:
            handle.remove()


def _is_finite(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) or bool(tensor.isfinite().all())


def _in_words(inputs: list[Tensor]) -> str:
    values = [tensor.detach().float() for tensor in inputs]
    finite = [of_tensor for of_tensor in (each[each.isfinite()] for each in values) if of_tensor.numel()]
    of_all, of_finite = sum(each.numel() for each in values), sum(each.numel() for each in finite)
    if not of_all:
        return "it had no inputs of floating point"
    if not finite:
        return "nothing in its input was finite"
    least, most = min(float(each.min()) for each in finite), max(float(each.max()) for each in finite)
    bounds = f"from {least:.4g} to {most:.4g}"
    if of_finite == of_all:
        return f"its input was finite, {bounds}"
    return f"{of_all - of_finite} of {of_all} elements of its input were not finite, the others {bounds}"
