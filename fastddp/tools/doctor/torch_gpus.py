"""Which GPUs torch can use, and why not others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastddp.tools.doctor.findings import Finding, remark, wrong
from fastddp.tools.doctor.nvml import Gpu, Machine


@dataclass(frozen=True)
class TorchGpus:
    """torch's GPUs in its own order, which CUDA_VISIBLE_DEVICES may have chosen."""

    uuids: tuple[str, ...] = ()  # as NVML writes them
    names: tuple[str, ...] = ()
    capabilities: tuple[int, ...] = ()  # without the dot
    cuda: str | None = None  # what torch was built with; None: without CUDA
    problem: str = ""  # why there are none, in torch's words

    def numbers(self, machine: Machine) -> dict[int, int]:
        """NVML's number of a GPU → torch's, for those that torch sees."""
        numbers = {uuid: number for number, uuid in enumerate(self.uuids)}
        return {gpu.index: numbers[gpu.uuid] for gpu in machine.gpus if gpu.uuid in numbers}

    def used(self, machine: Machine) -> tuple[Gpu, ...]:
        """The GPUs that a job would use: those that torch sees; all, if that is unknown."""
        numbers = self.numbers(machine)
        return tuple(gpu for gpu in machine.gpus if gpu.index in numbers) or machine.gpus


def look() -> TorchGpus:
    """Ask torch, which initialises CUDA."""
    cuda = torch.version.cuda
    if not torch.backends.cuda.is_built():
        return TorchGpus()
    try:
        torch.cuda.init()
    except Exception as error:  # of many types, and their texts say what to do
        return TorchGpus(cuda=cuda, problem=str(error).strip().splitlines()[0])
    found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return TorchGpus(
        tuple(f"GPU-{gpu.uuid}" for gpu in found),
        tuple(gpu.name for gpu in found),
        tuple(10 * gpu.major + gpu.minor for gpu in found),
        cuda,
    )


def findings(seen: TorchGpus, machine: Machine, hidden_by: str | None) -> list[Finding]:
    """Whether torch can use what the machine has.

    Args:
        seen: by torch.
        machine: as NVML tells it.
        hidden_by: CUDA_VISIBLE_DEVICES, if it is set.
    """
    found = []
    if machine.gpus and seen.cuda is None:
        found.append(
            wrong(
                "torch",
                f"This torch was built without CUDA, and the machine has {len(machine.gpus)} GPU(s).",
                "Install a torch built with CUDA (https://pytorch.org/get-started), then build fastddp for it.",
            )
        )
    elif machine.gpus and not seen.uuids and hidden_by is not None:
        found.append(
            remark("torch", f"CUDA_VISIBLE_DEVICES={hidden_by!r} hides all GPUs from torch.", "Unset it to use them.")
        )
    elif machine.gpus and not seen.uuids:
        what = f"torch cannot use the machine's GPUs: {seen.problem.rstrip('.') or 'it sees none'}."
        look = "Check the driver with nvidia-smi; in a container, start it with GPUs (docker run --gpus all)."
        found.append(wrong("torch", what, look))
    return found + _driver_findings(seen, machine)


def _driver_findings(seen: TorchGpus, machine: Machine) -> list[Finding]:
    """CUDA's compatibility rules: https://docs.nvidia.com/deploy/cuda-compatibility."""
    if machine.driver_cuda is None or seen.cuda is None:
        return []
    needed = tuple(int(part) for part in seen.cuda.split(".")[:2])
    runs = ".".join(map(str, machine.driver_cuda))
    what = (
        f"Driver {machine.driver or '(version not told)'} runs CUDA up to {runs}, and torch was built with {seen.cuda}."
    )
    if machine.driver_cuda[0] < needed[0]:
        return [
            wrong("driver", what, f"Install a driver for CUDA {seen.cuda} or newer, or a torch built with CUDA {runs}.")
        ]
    if machine.driver_cuda < needed:
        return [
            remark(
                "driver",
                f"{what} Within one major version of CUDA that works, but for what is compiled from PTX when it runs.",
                "Install a newer driver if something fails with an unsupported PTX version.",
            )
        ]
    return []
