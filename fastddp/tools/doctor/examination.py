"""What one process finds out by itself."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fastddp.tools.doctor import software
from fastddp.tools.doctor.kernel_checks import KernelCheck, check_kernels
from fastddp.tools.doctor.software import Software


@dataclass(frozen=True)
class Examination:
    """The facts of one process."""

    host: str
    software: Software
    device: str  # the one that this process would train on
    gpu_uuid: str | None  # of that device
    kernels: tuple[KernelCheck, ...]
    load: float  # of the machine in the minute before, as uptime says it
    cores: int  # that this process may use

    @property
    def gpu(self) -> tuple[str, str] | None:
        """Machine and UUID of the GPU that this process would train on."""
        return None if self.gpu_uuid is None else (self.host, self.gpu_uuid)


def examine(local_rank: int | None, tell: Callable[[str], None]) -> Examination:
    """Look at everything.

    Args:
        local_rank: this process's number on its machine. Each process looks at one GPU, the first also at the CPU's
            kernels. None: one process looks at everything.
        tell: called with what is about to be done, in words.
    """
    load = os.getloadavg()[0]  # before this process and its kernels' compilers count
    tell("initialising CUDA and loading fastddp")
    installed = software.look()
    count = len(installed.gpus)
    # A launcher may show each rank its own GPU alone.
    own = torch.device("cuda", (local_rank or 0) % count) if count else torch.device("cpu")
    devices = [] if local_rank else [torch.device("cpu")]
    if count:
        devices += [own] if local_rank is not None else [torch.device("cuda", number) for number in range(count)]
    checks: list[KernelCheck] = []
    for device in devices if installed.misfit is None else []:
        tell(f"compiling and checking kernels on {device}")
        checks += check_kernels(device)
    return Examination(
        socket.gethostname(),
        installed,
        str(own),
        str(torch.cuda.get_device_properties(own).uuid) if count else None,
        tuple(checks),
        load,
        len(os.sched_getaffinity(0)),
    )
