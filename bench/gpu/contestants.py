"""Who competes in training steps: no DDP, torch's DDP and fastddp, each in its modes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from bench.cases import Batch
from bench.contestants import BATCHED, REFERENCE, VIEW, Engine, Hook, Step, hook_named, torch_takes, wrapped


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
    """An engine and how it is used. Zeroed: with zero_grad(set_to_none=False). Hooks are the engine's own.

    Those that are seldom used are measured after the others, where there is time.
    """

    name: str
    engine: Engine
    options: Mapping[str, Any] = field(default_factory=dict)
    zeroed: bool = False
    hook: Hook | None = None
    seldom: bool = False

    def prepare(self, module: nn.Module) -> GpuStep:
        """A step of this mode on a twin of the module."""
        return GpuStep(wrapped(module, self.engine, self.hook, self.options), self.zeroed)

    @property
    def plain(self) -> str:
        """The name of the mode without a DDP that it is compared with."""
        return "plain-zeroed" if self.zeroed else "plain"


_SELDOM: dict[str, Any] = {"seldom": True}
_ALL = (
    Mode("plain", "plain"),
    Mode(REFERENCE, "torch"),
    # The same once more: how far it is from the first is the noise of the table.
    Mode("torch-again", "torch"),
    Mode("torch-view", "torch", VIEW),
    Mode("fastddp", "fastddp"),
    Mode("fastddp-view", "fastddp", VIEW),
    Mode("plain-zeroed", "plain", zeroed=True, **_SELDOM),
    Mode("torch-zeroed", "torch", zeroed=True, **_SELDOM),
    Mode("torch-view-zeroed", "torch", VIEW, zeroed=True, **_SELDOM),
    Mode("torch-static", "torch", {"static_graph": True}, **_SELDOM),
    Mode("torch-batched", "torch", BATCHED, **_SELDOM),
    Mode("torch-view-batched", "torch", VIEW | BATCHED, **_SELDOM),
    Mode("fastddp-zeroed", "fastddp", zeroed=True, **_SELDOM),
    Mode("fastddp-view-zeroed", "fastddp", VIEW, zeroed=True, **_SELDOM),
)


def modes(seldom: bool) -> list[Mode]:
    """Of those that this version of torch has: the ones that are seldom used, or the others."""
    return [mode for mode in _ALL if mode.seldom == seldom and (mode.engine != "torch" or torch_takes(mode.options))]


HOOKS = ("bf16", "int8", "powersgd4", "fp16", "powersgd1", "fp8")


def hook_modes(names: Sequence[str] = HOOKS) -> list[Mode]:
    """Each of these hooks of torch beside fastddp's of the same name, where torch has one that works here."""
    result = [mode for mode in _ALL if mode.name in ("plain", REFERENCE, "torch-again", "fastddp")]
    for hook in filter(None, map(hook_named, names)):
        if hook.works_in_torch():
            result.append(Mode(f"torch+{hook.name}", "torch", hook=hook))
        result.append(Mode(f"fastddp+{hook.name}", "fastddp", hook=hook))
    return result
