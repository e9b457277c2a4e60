"""Where the memory of what travels comes from (``wire_memory=``): memory that NCCL has registered, or its windows."""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from fastddp import _C
from fastddp.exchange.groups import forget_gone

WireMemory = Literal["registered", "symmetric"] | None

_WITHOUT = "Leave wire_memory out for ordinary memory."


def wire_memory_of(choice: WireMemory) -> _C.RegisteredMemory | None:
    """What a reducer takes wires from; None: ordinary memory.

    Without a choice it is what torch's DDP would do: it reads ``DDP_DISABLE_COMM_MEM``, which is 1 unless it is set.
    """
    if choice is None and os.environ.get("DDP_DISABLE_COMM_MEM", "1") == "1":
        return None
    return _C.RegisteredMemory(functools.partial(_allocate, choice), symmetric=choice == "symmetric")


def _allocate(choice: WireMemory, group: dist.ProcessGroup, size: int, device: torch.device) -> Tensor | None:
    """So many bytes of memory that the network of ``group`` knows; None: it has none.

    A collective: all ranks of ``group`` call it together.
    """
    if not _is_offered(group, device):
        lack = (
            f'wire_memory="{choice}": the process group has no memory of its own for {device}. NCCL has, where the '
            f"GPUs of all ranks multicast (NVSwitch, NVLS). {_WITHOUT}"
        )
        if choice == "symmetric":
            raise RuntimeError(lack)
        if choice is not None:
            warnings.warn(lack, stacklevel=2)
        return None
    backend = group._get_backend(device)
    if choice == "symmetric":
        return _in_a_window(group, backend, size, device)
    return backend.allocate_tensor(size, dtype=torch.uint8, device=device)


# Note [First element]
# NCCL makes a communicator when something is sent over it for the first time, and registers no memory before. So one
# element is sent. It also says whether all ranks have such memory, because registering may be a collective.


def _is_offered(group: dist.ProcessGroup, device: torch.device) -> bool:
    forget_gone(_offered)
    if group not in _offered:
        _offered[group] = device.type != "cpu" and _ask(group, device)
    return _offered[group]


def _ask(group: dist.ProcessGroup, device: torch.device) -> bool:
    try:
        backend = group._get_backend(device)
    except RuntimeError:  # a group of somebody's own
        return False
    offers = torch.tensor([int(backend.supports_tensor_alloc(device))], device=device)
    dist.all_reduce(offers, dist.ReduceOp.MIN, group=group)
    return bool(offers)


_offered: dict[dist.ProcessGroup, bool] = {}


def _in_a_window(group: dist.ProcessGroup, backend: Any, size: int, device: torch.device) -> Tensor:
    """Memory in a symmetric window. A window is made of what is in the pool, so that comes first."""
    forget_gone(_pools)
    try:
        with torch.cuda.device(device):
            if group not in _pools:
                _pools[group] = torch.cuda.MemPool(backend.mem_allocator)
            with torch.cuda.use_mem_pool(_pools[group], device):
                memory = torch.empty(size, dtype=torch.uint8, device=device)
        backend.register_mem_pool(_pools[group], True)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise RuntimeError(
            f'wire_memory="symmetric": torch {torch.__version__} with its NCCL could not make a symmetric window of '
            f"{size} bytes on {device}: {error}. It takes NCCL 2.28, ranks whose GPUs NVLink connects, and "
            f"NCCL_WIN_ENABLE not 0. {_WITHOUT}"
        ) from error
    return memory


_pools: dict[dist.ProcessGroup, Any] = {}
