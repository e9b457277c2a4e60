"""Uneven inputs (torch's ``Join``) with a sharded optimizer: all ranks step to the end, since each has a part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from fastddp.errors import see
from fastddp.sharding.parts import OfParts


class StepsToTheEnd(OfParts, Joinable):
    """An optimizer that is joined beside its model: ``Join([model, optimizer])``."""

    step: Callable[[], Any]

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What a rank without inputs does beside each step of the others: it steps its part."""
        hook = JoinHook()
        hook.main_hook = self.step  # type: ignore[method-assign]
        return hook

    @property
    def join_device(self) -> torch.device:
        """The model's."""
        return self.parts.now.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The model's."""
        return self.parts.now.process_group

    def _check_joined(self) -> None:
        """Raise RuntimeError if ranks without inputs would not step; tell torch of a step."""
        if self.parts.now.is_uneven and not self._join_config.enable:
            raise RuntimeError(
                "A rank without inputs still has to step with its part of the others' gradients, and this Join has the "
                "model alone. Use Join([model, optimizer]), in this order." + see("FD042")
            )
        Join.notify_join_context(self)
