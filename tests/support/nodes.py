"""Nodes on one machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastddp.ranks import placement

STATUS = 102 * 4  # bytes


def on_machines(rank: int, machines: Sequence[int]) -> AbstractContextManager[object]:
    """Inside, this rank finds itself on the machine of that number; ``machines``: of all ranks."""
    return mock.patch.object(placement, "_this_machine", return_value=machines[rank].to_bytes(8))


def nodes_of_two(rank: int) -> AbstractContextManager[object]:
    """Inside, ranks 0 and 1 find themselves on one machine, 2 and 3 on another one, and so on."""
    return on_machines(rank, (0, 0, 1, 1, 2, 2, 3, 3))


def by_messages() -> AbstractContextManager[object]:
    """Inside, no rank finds that it may read another one's memory."""
    return mock.patch.object(placement, "_processes", return_value=())


def by_reads() -> AbstractContextManager[object]:
    """Inside, ranks that may read each other's memory read gradients, however few, and whatever cores are idle."""
    return mock.patch.multiple(placement, _ENOUGH_BYTES=0, _cores_are_taken=lambda group: True)


def share_the_gpu() -> None:
    """NCCL refuses two ranks on one GPU unless they seem to be on two hosts; for correctness only, it is slow."""
    os.environ |= {
        "NCCL_HOSTID": f"r{os.getpid()}",
        "NCCL_NET": "Socket",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
    }


class Traffic(TorchDispatchMode):
    """Bytes of messages, with the rank that each is sent to; and, besides statuses, of what allreduces add up."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[tuple[int, int]] = []
        self.sums: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.send.default:
            self.messages.append((args[2], args[0][0].nbytes))
        elif func is torch.ops.c10d.allreduce_.default and args[0][0].nbytes != STATUS:
            self.sums.append(args[0][0].nbytes)
        return func(*args, **kwargs or {})
