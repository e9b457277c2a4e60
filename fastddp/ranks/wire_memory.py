"""The memory of wires (``wire_memory=``): memory that NCCL has registered, or NCCL's symmetric windows."""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from fastddp import _C
from fastddp.errors import see
from fastddp.ranks.agreement import greatest
from fastddp.ranks.groups import once_a_group

WireMemory = Literal["registered", "symmetric"] | None

_WITHOUT = "Leave wire_memory out for ordinary memory."


def wire_memory_of(choice: WireMemory) -> _C.RegisteredMemory | None:
    """The memory from which a reducer takes wires; None: ordinary memory.

    Without a choice, ``DDP_DISABLE_COMM_MEM`` decides, as for torch's DDP. If it is not set it counts as 1: ordinary.
    """
    if choice is None and os.environ.get("DDP_DISABLE_COMM_MEM", "1") == "1":
        return None
    return _C.RegisteredMemory(functools.partial(_allocate, choice), symmetric=choice == "symmetric")


def _allocate(choice: WireMemory, group: dist.ProcessGroup, size: int, device: torch.device) -> Tensor | None:
    """Allocate ``size`` bytes of memory that the network of ``group`` knows; None: the group has none.

    A collective: all ranks of ``group`` call it together.
    """
    if not _is_offered(group, device):
        lack = (
            f'wire_memory="{choice}": the process group has no memory of its own for {device}. NCCL has, where the '
            f"GPUs of all ranks multicast (NVSwitch, NVLS). {_WITHOUT}"
        )
        if choice == "symmetric":
            raise RuntimeError(lack + see("FD029"))
        if choice is not None:
            warnings.warn(lack, stacklevel=2)
        return None
    backend = group._get_backend(device)
    if choice == "symmetric":
        return _in_a_window(group, backend, size, device)
    return backend.allocate_tensor(size, dtype=torch.uint8, device=device)


# Note [First element]
# NCCL makes a communicator when something is first sent over it, and registers no memory before that. So one element is
# sent. It also says whether all ranks have such memory, because registering may be a collective.


@once_a_group
def _is_offered(group: dist.ProcessGroup, device: torch.device) -> bool:
    if device.type == "cpu":
        return False
    try:
        backend = group._get_backend(device)
    except RuntimeError:  # a third-party group
        return False
    return not any(greatest([not backend.supports_tensor_alloc(device)], group, device))


def _in_a_window(group: dist.ProcessGroup, backend: Any, size: int, device: torch.device) -> Tensor:
    """Memory in a symmetric window. A window covers memory that is in the pool already, so it is allocated first.

    Each call makes a window on each rank, since making one is a collective. In a pool that has memory already, ranks on
    which somebody still holds some would make another window, and ranks on which it is free would not.
    """
    try:
        with torch.cuda.device(device):
            pools = _pools_of(group)
            pools[:] = filter(_is_held, pools)
            pools.append(pool := torch.cuda.MemPool(backend.mem_allocator))
            with torch.cuda.use_mem_pool(pool, device):
                memory = torch.empty(size, dtype=torch.uint8, device=device)
        backend.register_mem_pool(pool, True)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise RuntimeError(
            f'wire_memory="symmetric": torch {torch.__version__} with its NCCL could not make a symmetric window of '
            f"{size} bytes on {device}: {error}. It takes NCCL 2.28, ranks whose GPUs NVLink connects, and "
            f"NCCL_WIN_ENABLE not 0. {_WITHOUT}" + see("FD029")
        ) from error
    return memory


@once_a_group
def _pools_of(_: dist.ProcessGroup) -> list[Any]:
    return []


def _is_held(pool: Any) -> bool:
    return any(block["state"] != "inactive" for segment in pool.snapshot() for block in segment["blocks"])
