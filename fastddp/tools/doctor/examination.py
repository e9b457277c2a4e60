"""What one process finds out by itself."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fastddp.tools.doctor import nvml, software, torch_gpus
from fastddp.tools.doctor.kernel_checks import KernelCheck, check_kernels
from fastddp.tools.doctor.nvml import Machine
from fastddp.tools.doctor.software import Software
from fastddp.tools.doctor.torch_gpus import TorchGpus


@dataclass(frozen=True)
class Examination:
    """The facts of one process. Each machine's first process adds those of the machine."""

    host: str
    software: Software
    machine: Machine | None
    torch_gpus: TorchGpus
    device: str  # the one that this process would train on
    kernels: tuple[KernelCheck, ...]
    hidden_by: str | None  # CUDA_VISIBLE_DEVICES
    load: float  # of the machine in the minute before, as uptime says it
    cores: int  # that this process may use

    @property
    def gpu(self) -> tuple[str, str] | None:
        """Machine and UUID of the GPU that this process would train on."""
        device = torch.device(self.device)
        return (self.host, self.torch_gpus.uuids[device.index]) if device.type == "cuda" else None


def examine(local_rank: int | None, tell: Callable[[str], None]) -> Examination:
    """Look at everything.

    Args:
        local_rank: this process's number on its machine. Each process looks at one GPU, the first also at the machine
            and the CPU's kernels. None: one process looks at everything.
        tell: called with what is about to be done, in words.
    """
    is_first = local_rank is None or local_rank == 0
    load = os.getloadavg()[0]  # before this process and its kernels' compilers count
    tell("asking NVML")
    machine = nvml.read_machine() if is_first else None  # before this process takes memory of a GPU
    tell("initialising CUDA")
    gpus = torch_gpus.look()
    count = len(gpus.uuids)
    # A launcher may show each rank its own GPU alone.
    own = torch.device("cuda", (local_rank or 0) % count) if count else torch.device("cpu")
    numbers = range(count) if local_rank is None else [own.index] if count else []
    devices = [torch.device("cpu")] if is_first else []
    devices += [torch.device("cuda", number) for number in numbers]
    tell("loading fastddp")
    installed = software.look()
    checks: list[KernelCheck] = []
    for device in devices if installed.misfit is None else []:
        tell(f"compiling and checking kernels on {device}")
        checks += check_kernels(device)
    return Examination(
        socket.gethostname(),
        installed,
        machine,
        gpus,
        str(own),
        tuple(checks),
        os.environ.get("CUDA_VISIBLE_DEVICES"),
        load,
        len(os.sched_getaffinity(0)),
    )
