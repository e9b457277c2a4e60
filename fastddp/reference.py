"""The obvious way to train data-parallel: after backward, one allreduce for each parameter.

No buckets, no overlap, no streams: slow, and short enough to be seen to be right. It is what tests compare
``fastddp.DistributedDataParallel`` with, and what benches call the floor of effort.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class ReferenceDataParallel(nn.Module):
    """Average the gradients of ``module`` over all ranks of ``process_group``.

    A backward synchronises if a forward outside ``no_sync`` came before it and no backward has synchronised since. When
    it ends, every parameter that received a gradient since the last synchronisation gets the mean over ranks of what is
    then in ``.grad``. All ranks must have given gradients to the same parameters.

    Construction overwrites parameters and buffers with rank 0's. Unless ``forward_sync_buffers`` is False, buffers are
    overwritten again at the start of each forward that follows a synchronising one (the first forward counts as such).
    Parameters and buffers named in ``module._ddp_params_and_buffers_to_ignore`` are left alone.
    """

    def __init__(
        self, module: nn.Module, process_group: dist.ProcessGroup | None = None, forward_sync_buffers: bool = True
    ) -> None:
        super().__init__()
        self.module = module
        self._group = process_group or dist.group.WORLD
        self._forward_sync_buffers = forward_sync_buffers
        self._syncs = True  # False within no_sync
        self._last_forward_synced = True
        self._armed = False  # the next backward synchronises
        self._will_average = False  # that backward is running, and averages when it ends
        self._received: set[Tensor] = set()  # parameters that received a gradient since the last synchronisation

        self._ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        parameters = [p for name, p in module.named_parameters() if name not in self._ignored]
        for tensor in [*parameters, *self._buffers_to_sync()]:
            self._broadcast(tensor)
        self._parameters_to_sync = [p for p in parameters if p.requires_grad]
        for parameter in self._parameters_to_sync:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards in here ask for no synchronisation: gradients accumulate on each rank."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._forward_sync_buffers and self._last_forward_synced:
            for buffer in self._buffers_to_sync():
                self._broadcast(buffer)
        output = self.module(*args, **kwargs)
        self._last_forward_synced = self._syncs and torch.is_grad_enabled()
        if self._last_forward_synced:
            self._armed = True
            self._will_average = False  # a backward that raised has not reached its end
        return output

    def _on_gradient(self, parameter: Tensor) -> None:
        self._received.add(parameter)
        if self._armed and not self._will_average:
            self._will_average = True
            torch.autograd.Variable._execution_engine.queue_callback(self._at_end_of_backward)

    def _at_end_of_backward(self) -> None:
        self._armed = self._will_average = False
        for parameter in self._parameters_to_sync:
            if parameter in self._received and parameter.grad is not None:
                self._average(parameter.grad)
        self._received.clear()

    @torch.no_grad()
    def _average(self, gradient: Tensor) -> None:
        """Scale, then sum. Half precision is scaled in fp32, then rounded once."""
        scale = 1.0 / self._group.size()
        if gradient.dtype in (torch.float16, torch.bfloat16):
            wire = (gradient.float() * scale).to(gradient.dtype)
        else:
            wire = gradient * scale
        wire = wire.contiguous()
        dist.all_reduce(wire, group=self._group)
        gradient.copy_(wire)

    @torch.no_grad()
    def _broadcast(self, tensor: Tensor) -> None:
        # A graph from an earlier forward may have saved this tensor: it can still run backward.
        with torch.autograd._unsafe_preserve_version_counter(tensor):
            wire = tensor.detach().clone(memory_format=torch.contiguous_format)
            dist.broadcast(wire, group=self._group, group_src=0)
            tensor.copy_(wire)

    def _buffers_to_sync(self) -> list[Tensor]:
        return [buffer for name, buffer in self.module.named_buffers() if name not in self._ignored]
