"""What a forward may return its loss in: containers that a wrapper looks into, and objects that it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.distributions import Normal


class Slots:
    __slots__ = ("loss",)

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


def kept(loss: Tensor) -> nn.Module:
    """The module itself, which keeps it."""
    module = nn.Module()
    module.kept = loss  # type: ignore[assignment]
    return module


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda loss: loss,
    "containers": lambda loss: {"losses": (loss, [loss])},
    "namespace": lambda loss: SimpleNamespace(loss=loss),
    "slots": Slots,
    "distribution": lambda loss: Normal(loss, 1.0, validate_args=False),
    "set": lambda loss: {loss},
    "generator": lambda loss: iter([loss]),
    "lambda": lambda loss: lambda: loss,
    "module": kept,
}
SEEN = ("tensor", "containers")


def loss_in(output: Any) -> Tensor:
    match output:
        case Tensor():
            return output
        case {"losses": (loss, _)}:
            return loss
        case SimpleNamespace() | Slots():
            return output.loss
        case Normal():
            return output.loc
        case set():
            return output.pop()
        case Iterator():
            return next(output)
        case nn.Module():
            return output.kept  # type: ignore[return-value]
    return output()
