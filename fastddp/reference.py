"""The simplest way to train data-parallel: after backward, one allreduce for each parameter.

No buckets, no overlap, no streams. It is slow, and so short that one can see that it is right. Tests compare
``fastddp.DistributedDataParallel`` with it, and benches call it the floor of effort.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class ReferenceDataParallel(nn.Module):
    """Average the gradients of ``module`` over all ranks of ``process_group``.

    A window is all backwards since gradients were last averaged. It ends with the first backward for which two things
    hold: a forward outside ``no_sync`` has run in the window, and every parameter has received a gradient in it. When
    that backward ends, each parameter's ``.grad`` becomes its mean over ranks.

    With ``find_unused_parameters`` a window ends with every backward over a forward that ran outside ``no_sync``.
    Parameters that received a gradient on some rank get the mean, to which ranks without a gradient contribute zero.
    The other parameters are left alone.

    Construction overwrites parameters and buffers with rank 0's. Unless ``forward_sync_buffers`` is False, buffers are
    overwritten again at the start of the first forward, and of each forward after a synchronising one. Parameters and
    buffers named in ``module._ddp_params_and_buffers_to_ignore`` are left alone.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        forward_sync_buffers: bool = True,
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__()
        self.module = module
        group = process_group or dist.group.WORLD
        assert group is not None, "call torch.distributed.init_process_group() first"
        self._group = group
        self._forward_sync_buffers = forward_sync_buffers
        self._find_unused_parameters = find_unused_parameters
        self._syncs = True  # False within no_sync
        self._last_forward_synced = True
        self._armed = False  # a forward outside no_sync has run in this window
        self._callback_queued = False  # the running backward may end the window
        self._received: set[Tensor] = set()  # parameters that received a gradient in this window

        self._ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        parameters = [p for name, p in module.named_parameters() if name not in self._ignored]
        for tensor in [*parameters, *self._buffers_to_sync()]:
            self._broadcast(tensor)
        self._parameters_to_sync = [p for p in parameters if p.requires_grad]
        on_gradient = weakref.WeakMethod(self._on_gradient)  # a parameter's hook keeps what it refers to alive
        for parameter in self._parameters_to_sync:
            parameter.register_post_accumulate_grad_hook(lambda p: method(p) if (method := on_gradient()) else None)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients accumulate on each rank: forwards in this context ask for no synchronisation."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; outside ``no_sync``, ask for synchronisation."""
        self._sync_buffers()
        self._callback_queued = False  # if the last backward raised, the callback never ran
        output = self.module(*args, **kwargs)
        self._last_forward_synced = self._syncs and torch.is_grad_enabled()
        if self._last_forward_synced:
            self._armed = True
            # Queued in this backward, not in one that a reentrant checkpoint runs inside it.
            if output.grad_fn is not None:
                output.grad_fn.register_prehook(lambda gradients: self._on_backward())
        return output

    def _on_gradient(self, parameter: Tensor) -> None:
        self._received.add(parameter)
        if self._armed:
            self._on_backward()

    def _on_backward(self) -> None:
        if not self._callback_queued and (self._armed or self._find_unused_parameters):
            self._callback_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._at_end_of_backward)

    def _at_end_of_backward(self) -> None:
        self._callback_queued = False
        has_gradient = [p in self._received and p.grad is not None for p in self._parameters_to_sync]
        if not all(has_gradient) and not self._find_unused_parameters:
            return  # another backward may bring the missing gradients
        for parameter, is_used_here in zip(self._parameters_to_sync, has_gradient, strict=True):
            if not self._find_unused_parameters or self._is_used_anywhere(is_used_here):
                self._average(parameter)
        self.end_window()

    def end_window(self) -> None:
        """Forget the window's gradients. Call this after a backward that raised."""
        self._armed = False
        self._callback_queued = False
        self._received.clear()

    def _is_used_anywhere(self, used_here: bool) -> bool:
        used = torch.tensor(int(used_here), device=self._parameters_to_sync[0].device)
        dist.all_reduce(used, group=self._group)
        return bool(used.item() > 0)

    @torch.no_grad()
    def _average(self, parameter: Tensor) -> None:
        """Scale, then sum. Half precision is scaled in fp32, then rounded once."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        scale = self._scale()
        if gradient.dtype in (torch.float16, torch.bfloat16):
            wire = (gradient.float() * scale).to(gradient.dtype)
        else:
            wire = gradient * scale
        wire = wire.contiguous()
        dist.all_reduce(wire, group=self._group)
        gradient.copy_(wire)

    def _scale(self) -> float:
        return 1.0 / self._group.size()

    def _sync_buffers(self, source: int = 0) -> None:
        if self._forward_sync_buffers and self._last_forward_synced:
            for buffer in self._buffers_to_sync():
                self._broadcast(buffer, source)

    @torch.no_grad()
    def _broadcast(self, tensor: Tensor, source: int = 0) -> None:
        # A graph of an earlier forward may have saved this tensor, and must still be able to run backward.
        with torch.autograd._unsafe_preserve_version_counter(tensor):
            wire = tensor.detach().clone(memory_format=torch.contiguous_format)
            dist.broadcast(wire, group=self._group, group_src=source)
            tensor.copy_(wire)

    def _buffers_to_sync(self) -> list[Tensor]:
        return [buffer for name, buffer in self.module.named_buffers() if name not in self._ignored]
