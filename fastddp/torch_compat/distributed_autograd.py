"""torch.distributed.autograd: gradients that belong to a context, not to parameters.

This module refuses a forward inside a context. The reducer notices a context's backward over a forward from outside of
it: a gradient comes that is not in ``parameter.grad``, which is an error whatever the cause.
"""

from __future__ import annotations

import torch
from torch.distributed import rpc

from fastddp.errors import see


def refuse_distributed_autograd() -> None:
    """Raise ``NotImplementedError`` inside a ``torch.distributed.autograd.context()``, which would keep gradients."""
    if rpc.is_available() and rpc._is_current_rpc_agent_set() and _inside_context():
        raise NotImplementedError(
            "fastddp does not support torch.distributed.autograd yet: this forward ran inside one of its contexts, "
            "whose gradients would not be averaged. Run forward outside of the context and call loss.backward(), or "
            "use torch.nn.parallel.DistributedDataParallel." + see("FD038")
        )


def _inside_context() -> bool:
    try:
        torch._C._distributed_autograd._current_context()  # type: ignore[attr-defined]
    except RuntimeError:  # there is none
        return False
    return True
