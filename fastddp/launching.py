"""Kernels for the reducer: compiled by Triton when a model is wrapped, loaded and launched by C++."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fastddp import _C

# What the kernels are compiled for and tested on begins here; older GPUs get torch's operators.
LEAST_CAPABILITY = 80


def load_kernels(wanted: Iterable[tuple[torch.device, torch.dtype, torch.dtype]]) -> None:
    """Load pack and unpack for each device, dtype of gradients and dtype of the wire, unless they are there already.

    Nothing is loaded for devices without a CUDA driver (the CPU, ROCm), for GPUs older than Ampere, and for dtypes that
    the kernels do not move: there gradients are packed by other means. Complex numbers are pairs of real ones.

    Raises:
        RuntimeError: fastddp does not know how this version of Triton launches kernels.
    """
    for device, gradient, wire in sorted(wanted, key=str):
        gradient, wire = gradient.to_real(), wire.to_real()
        # Asked before Triton is imported, which takes a second and is of no use on the CPU.
        capability = None if device.type == "cpu" else _C.capability(device)
        if capability is not None and capability >= LEAST_CAPABILITY:
            _load(device, gradient, wire, capability)


def _load(device: torch.device, gradient: torch.dtype, wire: torch.dtype, capability: int) -> None:
    from fastddp.kernels.ahead_of_time import compile_kernel
    from fastddp.kernels.pack import moves

    if not moves(gradient, wire):
        return
    for name, form in (("pack", _C.Form.pack), ("unpack", _C.Form.unpack)):
        if _C.has_kernel(device, form, gradient, wire):
            continue
        kernel = compile_kernel(name, gradient, wire, capability)
        _C.load_kernel(
            device,
            form,
            gradient,
            wire,
            kernel.name,
            kernel.cubin,
            kernel.num_warps,
            kernel.shared_bytes,
            kernel.chunk_elements,
            kernel.scratch_parameters,
        )
