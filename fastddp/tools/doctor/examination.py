"""What one process finds out by itself."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fastddp.tools.doctor import software
from fastddp.tools.doctor.findings import KernelCheck
from fastddp.tools.doctor.software import Software


@dataclass(frozen=True)
class Examination:
    """The facts of one process."""

    software: Software
    device: str  # the one that this process would train on
    gpu: str | None  # machine and UUID of that device
    kernels: tuple[KernelCheck, ...]


def examine(local_rank: int | None, tell: Callable[[str], None]) -> Examination:
    """Look at everything; ``tell`` is called with what is about to be done, in words.

    Each process of a machine looks at one GPU, the first (``local_rank`` 0) also at the CPU's kernels. None: one
    process looks at everything.
    """
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
        from fastddp.tools.doctor.kernel_checks import check_kernels

        checks += check_kernels(device)
    gpu = f"{socket.gethostname()} {torch.cuda.get_device_properties(own).uuid}" if count else None
    return Examination(installed, str(own), gpu, tuple(checks))
