"""The reference with everything that a random training program may ask for: the obvious way to do each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

from fastddp.reference import ReferenceDataParallel
from fastddp.window.gradient_average import GradientAverage


class Oracle(ReferenceDataParallel):
    """Also sparse gradients, which are averaged as dense ones and made sparse again; ``gradient_average``; optimizers
    that step in backward; and uneven inputs.

    For the last, a caller says before each forward who runs it (:meth:`begin_batch`). A rank that does not calls
    :meth:`take_part` in place of a forward and a backward.
    """

    def __init__(self, module: nn.Module, gradient_average: GradientAverage = "mean", **options: Any) -> None:
        super().__init__(module, **options)
        self._gradient_average = gradient_average
        self._sparse = {child.weight for child in module.modules() if isinstance(child, nn.Embedding)}
        self._source, self._divisor, self._weight = 0, self._group.size(), 1.0
        self._averaged: list[Tensor] = []  # in this backward
        self._shared: set[Tensor] = set()  # whose gradient is a sum over ranks
        for parameter in self._parameters_to_sync:
            parameter.register_hook(lambda incoming, parameter=parameter: self._leave_to_rank_0(parameter))
        for parameter in self._parameters_to_sync:  # optimizers that would step when the gradient comes
            for handle in param_to_optim_hook_handle_map.get(parameter, []):
                handle.remove()

    def begin_batch(self, ranks: Sequence[int], divide_by_initial_world_size: bool) -> None:
        """Only ``ranks`` have inputs for what follows; the last of them has the buffers that count."""
        self._source = ranks[-1]
        self._divisor = self._group.size() if divide_by_initial_world_size else len(ranks)

    def take_part(self, synchronises: bool) -> None:
        """What this rank does without inputs while others run a forward, and a backward if that ``synchronises``."""
        self._sync_buffers()
        self._last_forward_synced = synchronises
        if synchronises:
            self._weight = 0.0
            for parameter in self._parameters_to_sync:
                if not self._find_unused_parameters or self._is_used_anywhere(False):
                    self._average(parameter)
            self._step_averaged()
            self.end_window()

    def end_batches(self, ranks: Sequence[int]) -> None:
        """Nobody has inputs any more: all get what the last of ``ranks`` has, which had them to the end."""
        buffers = self._buffers_to_sync() if self._forward_sync_buffers else []
        for tensor in [*self.module.parameters(), *buffers]:
            self._broadcast(tensor, ranks[-1])
        self.begin_batch(range(self._group.size()), True)  # also for buffers: so it is under torch's DDP from now on

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        average, weight = self._gradient_average, self._weight
        if self._syncs and torch.is_grad_enabled():
            weight = 1.0 if isinstance(average, str) else float(average() if callable(average) else average)
        output = super().forward(*args, **kwargs)
        self._weight = weight  # a forward that raises leaves that of the one before
        return output

    def _sync_buffers(self, source: int = 0) -> None:
        super()._sync_buffers(self._source)

    def _scale(self) -> float:
        return self._weight / self._sum_of_weights()

    def _leave_to_rank_0(self, parameter: Tensor) -> None:
        """What is a sum already counts once, in the sum that it is added to."""
        if parameter in self._shared and dist.get_rank() > 0 and parameter.grad is not None:
            parameter.grad.zero_()
        self._shared.discard(parameter)

    def _sum_of_weights(self) -> float:
        if self._gradient_average == "mean":
            return self._divisor
        if self._gradient_average == "sum":
            return 1.0
        total = torch.tensor(self._weight, dtype=torch.float64, device=self._parameters_to_sync[0].device)
        dist.all_reduce(total, group=self._group)
        return total.item()

    def _at_end_of_backward(self) -> None:
        super()._at_end_of_backward()
        self._step_averaged()

    def _step_averaged(self) -> None:
        while self._averaged:
            parameter = self._averaged.pop()
            for optimizer in getattr(parameter, "_in_backward_optimizers", ()):
                optimizer.step()
                parameter.grad = None

    def _average(self, parameter: Tensor) -> None:
        self._averaged.append(parameter)
        if parameter.grad is None and (dtype := getattr(parameter, "grad_dtype", None)):
            parameter.grad = torch.zeros_like(parameter, dtype=dtype)
        if parameter in self._sparse and parameter.grad is not None:
            parameter.grad = parameter.grad.to_dense()
        self._leave_to_rank_0(parameter)  # in a placeholder
        super()._average(parameter)
        if self._gradient_average == "sum":
            self._shared.add(parameter)
        if parameter in self._sparse:
            parameter.grad = parameter.grad.to_sparse(1)  # type: ignore[union-attr]
