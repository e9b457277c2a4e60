"""Who competes in the sections `step` and `wire`: no DDP, torch's DDP and fastddp, each in its modes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from bench.cases import Batch
from bench.contestants import (
    BATCHED,
    REFERENCE,
    VIEW,
    Engine,
    Hook,
    Step,
    hook_named,
    torch_takes,
    wrapped,
)


class GpuStep(Step):
    """A training step without an optimizer: zero_grad, forward, backward."""

    def __init__(self, module: nn.Module, zeroed: bool) -> None:
        super().__init__(module)
        self.zeroed = zeroed

    def clear(self) -> None:
        """zero_grad: gradients become None, or zeros in the memory that they have."""
        self.module.zero_grad(set_to_none=not self.zeroed)

    def run(self, batch: Batch) -> None:
        """All of it."""
        self.clear()
        super().run(batch)


@dataclass(frozen=True)
class Mode:
    """An engine and how it is used. Zeroed: with zero_grad(set_to_none=False). Hooks are the engine's own."""

    name: str
    engine: Engine
    options: Mapping[str, Any] = field(default_factory=dict)
    zeroed: bool = False
    hook: Hook | None = None

    def prepare(self, module: nn.Module) -> GpuStep:
        """A step of this mode on a twin of the module."""
        return GpuStep(wrapped(module, self.engine, self.hook, self.options), self.zeroed)

    @property
    def plain(self) -> str:
        """The name of the mode without a DDP that it is compared with."""
        return "plain-zeroed" if self.zeroed else "plain"


_ALL = (
    Mode("plain", "plain"),
    Mode("plain-zeroed", "plain", zeroed=True),
    Mode(REFERENCE, "torch"),
    # The same once more: how far it is from the first is the noise of the table.
    Mode("torch-again", "torch"),
    Mode("torch-zeroed", "torch", zeroed=True),
    Mode("torch-static", "torch", {"static_graph": True}),
    Mode("torch-batched", "torch", BATCHED),
    Mode("torch-view", "torch", VIEW),
    Mode("torch-view-zeroed", "torch", VIEW, zeroed=True),
    Mode("torch-view-batched", "torch", VIEW | BATCHED),
    Mode("fastddp", "fastddp"),
    Mode("fastddp-zeroed", "fastddp", zeroed=True),
    Mode("fastddp-view", "fastddp", VIEW),
    Mode("fastddp-view-zeroed", "fastddp", VIEW, zeroed=True),
)

_ON_THE_WIRE = ("plain", REFERENCE, "torch-batched", "torch-view", "torch-view-batched", "fastddp", "fastddp-view")


def modes() -> list[Mode]:
    """All that this version of torch has."""
    return [mode for mode in _ALL if mode.engine != "torch" or torch_takes(mode.options)]


HOOKS = ("fp16", "bf16", "int8", "fp8", "powersgd1", "powersgd4")


def hook_modes() -> list[Mode]:
    """Each hook of torch beside fastddp's of the same name, where torch has one that works here."""
    result = [mode for mode in _ALL if mode.name in ("plain", REFERENCE, "torch-again", "fastddp")]
    for hook in filter(None, map(hook_named, HOOKS)):
        if hook.works_in_torch():
            result.append(Mode(f"torch+{hook.name}", "torch", hook=hook))
        result.append(Mode(f"fastddp+{hook.name}", "fastddp", hook=hook))
    return result


def wire_modes() -> list[Mode]:
    """Those that the wire is measured with: how gradients are zeroed does not change what travels when."""
    return [mode for mode in modes() if mode.name in _ON_THE_WIRE]
