"""Uneven inputs: what a rank does that has no more of them while others train (torch's ``Join``)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook

from fastddp._C import Average
from fastddp.module.parameters import replicated_tensors
from fastddp.module.replicas import broadcast_replicas
from fastddp.wrapper import Wrapper

# Note [Collectives of a forward under join]
# A rank with inputs, and one without, make the same collectives: that a rank is still there (torch's Join), what its
# forward is, all that `DistributedDataParallel._begin_step` does, and where a window ends those of the exchange.


def begin_forward(model: Wrapper, synchronises: bool) -> None:
    """What a rank does first that still has inputs.

    Raises:
        RuntimeError: another rank has none, and ``throw_on_early_termination`` is set.
    """
    Join.notify_join_context(model)
    if not model._join_config.enable:
        return
    _greatest([synchronises, torch.is_grad_enabled()], model)


class JoinedRank(JoinHook):
    """Takes part in the collectives of a model's forwards and backwards, without gradients.

    Args:
        model: what others train.
        divide_by_initial_world_size: gradients are divided by the number of all ranks; else by that of ranks that still
            have inputs: each of those has the weight 1, and a rank without inputs has none.
    """

    def __init__(self, model: Wrapper, divide_by_initial_world_size: bool) -> None:
        super().__init__()
        self._model = model
        model._divide_by_initial_world_size = divide_by_initial_world_size

    def main_hook(self) -> None:
        """One forward and backward of the others."""
        synchronises, grad_enabled = _greatest([False, False], self._model)
        self._model._begin_step(bool(synchronises), bool(grad_enabled), is_shadow=True)
        self._model.require_forward_param_sync = bool(synchronises)
        if synchronises:
            if self._model._adds_up_weights():
                self._model.reducer.set_average(Average.share, 0.0)  # the others have shares, too
            self._model.reducer.shadow_window()

    def post_hook(self, is_last_joiner: bool) -> None:
        """The ranks that trained to the end have the final model."""
        model = self._model
        source = _greatest([model.process_group.rank() if is_last_joiner else -1], model)[0]
        tensors = replicated_tensors(model.module, model.parameters_to_ignore, model.forward_sync_buffers)
        broadcast_replicas([tensor.detach() for _, tensor in tensors], model.process_group, src=source)
        model._set_average()


def source_of_buffers(model: Wrapper, is_shadow: bool) -> int:
    """The rank whose buffers all get: 0, or under join one that still has inputs."""
    if not model._join_config.enable:
        return 0
    return _greatest([-1 if is_shadow else model.process_group.rank()], model)[0]


def _greatest(numbers: list[int], model: Wrapper) -> list[int]:
    wire = torch.tensor(numbers, dtype=torch.int64, device=model.device)
    dist.all_reduce(wire, op=dist.ReduceOp.MAX, group=model.process_group)
    return [int(number) for number in wire.tolist()]
