"""Kernels for the reducer. Triton compiles them when a model is wrapped; C++ loads and launches them.

A kernel that nobody has tried on such a device is tried before it is used (:mod:`.proofs`). Nothing is loaded for
devices without a CUDA driver (the CPU, ROCm), for GPUs older than Ampere, and for dtypes that the kernels do not take:
there torch's operators do the work. To pack and to block8, complex numbers are pairs of real ones. What loads kernels
raises a RuntimeError where fastddp does not know how this version of Triton launches them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from fastddp import _C
from fastddp.kernel_loading import proofs

if TYPE_CHECKING:
    from fastddp.kernel_loading.trials import Trial
    from fastddp.kernels.ahead_of_time import CompiledKernel

LEAST_CAPABILITY = 80  # for which the kernels are compiled and tested; older GPUs get torch's operators


def load_kernels(wanted: Iterable[tuple[torch.device, torch.dtype, torch.dtype]], corruption: bool = False) -> None:
    """Load pack, unpack and measure by device, gradients' and wire's dtype; for ``corruption`` more that measure."""
    for device, gradient, wire in sorted(wanted, key=str):
        if (capability := capability_of(device)) is None:
            continue
        from fastddp.kernel_loading import kernel_cases
        from fastddp.kernels.ahead_of_time import compile_measure, compile_measure_gradients, compile_pack
        from fastddp.kernels.pack_kernels import moves

        _load_tables(device, capability)
        gradient, wire = gradient.to_real(), wire.to_real()
        if moves(gradient, wire):
            _load(device, [compile_pack("pack", gradient, wire, capability)], kernel_cases.pack(gradient, wire))
            _load(device, [compile_pack("unpack", gradient, wire, capability)], kernel_cases.unpack(gradient, wire))
            _load(device, [compile_measure(wire, capability)], kernel_cases.measure(wire))
            if corruption:
                measuring = compile_pack("pack_measuring", gradient, wire, capability)
                _load(device, [measuring], kernel_cases.pack_measuring(gradient, wire))
                measure = compile_measure_gradients(gradient, capability)
                _load(device, [measure], kernel_cases.measure_gradients(gradient))


def load_low_rank_kernels(wanted: Iterable[tuple[torch.device, torch.dtype]], rank: int) -> None:
    """Load PowerSGD's kernels for each device and dtype of gradients, for ranks up to ``rank``."""
    for device, gradient in sorted(wanted, key=str):
        if (capability := capability_of(device)) is None:
            continue
        from fastddp.kernel_loading import codec_cases
        from fastddp.kernels.ahead_of_time import LOW_RANK_DTYPES, compile_low_rank
        from fastddp.kernels.low_rank_kernels import padded_rank

        _load_tables(device, capability)
        if gradient in LOW_RANK_DTYPES:
            compress, project, adder, reconstruct, *basis = compile_low_rank(gradient, rank, capability)
            padded = padded_rank(rank)
            _load(device, [compress], codec_cases.compress(gradient, padded))
            _load(device, [project, adder], codec_cases.project(gradient, padded))
            _load(device, [reconstruct], codec_cases.reconstruct(gradient, padded))
            _load(device, basis, codec_cases.orthogonalise(padded))


def load_block8_kernels(
    wanted: Iterable[tuple[torch.device, torch.dtype]], number: str, block: int, stochastic: bool
) -> None:
    """Load block8's kernels for one format ("int8", "e4m3", "e5m2"); ValueError: they do not have it."""
    for device, gradient in sorted(wanted, key=str):
        if (capability := capability_of(device)) is None:
            continue
        from fastddp.kernel_loading import codec_cases
        from fastddp.kernels.ahead_of_time import compile_block8
        from fastddp.kernels.block8_kernels import DTYPES

        _load_tables(device, capability)
        gradient = gradient.to_real()
        if gradient in DTYPES:
            encode, add, decode = compile_block8(gradient, number, block, stochastic, capability)
            _load(device, [encode], codec_cases.encode(gradient, number, block, stochastic))
            _load(device, [add], codec_cases.add(number, block, stochastic))
            _load(device, [decode], codec_cases.decode(gradient, number, block))


def load_sum_kernels(devices: Iterable[torch.device], dtype: torch.dtype) -> None:
    """Load the kernel that adds up shards of this dtype; ValueError: it does not take the dtype."""
    for device in sorted(devices, key=str):
        if (capability := capability_of(device)) is not None:
            from fastddp.kernel_loading import kernel_cases
            from fastddp.kernels.ahead_of_time import compile_sum_shards

            _load(device, [compile_sum_shards(dtype, capability)], kernel_cases.sum_shards(dtype))


def capability_of(device: torch.device) -> int | None:
    """The device's compute capability; None: no kernels are launched there."""
    # Callers ask this before they import Triton and the cases, which take a second and are of no use on the CPU.
    capability = None if device.type == "cpu" else _C.capability(device)
    return capability if capability is not None and capability >= LEAST_CAPABILITY else None


def _load_tables(device: torch.device, capability: int) -> None:
    """Load the kernel that writes the others' tables: before them, so that none of them is tried with wrong ones."""
    from fastddp.kernel_loading import kernel_cases
    from fastddp.kernels.ahead_of_time import compile_write_words

    _load(device, [compile_write_words(capability)], kernel_cases.write_words())


def _load(device: torch.device, kernels: Sequence[CompiledKernel], trial: Trial) -> None:
    """Load kernels that work together. If the driver refuses one, warn and let torch's operators do its work."""
    for kernel in kernels:
        if _C.trust_in_kernel(device, kernel.name) is None:
            _load_one(device, kernel)
    if all(_C.trust_in_kernel(device, kernel.name) != _C.Trust.given_up for kernel in kernels):
        proofs.prove(kernels, trial, device)


def _load_one(device: torch.device, kernel: CompiledKernel) -> None:
    place, proof = proofs.place_of(device), proofs.proof_of(kernel, device)
    try:
        binary = kernel.name, kernel.cubin, kernel.num_warps, kernel.shared_bytes
        form = kernel.parameters, kernel.scratch_parameters, kernel.tile
        has_passed = os.path.isfile(proof or "")  # noqa: PTH113  # Path's own raises if somebody's folder is closed
        trust = _C.Trust.proven if has_passed else _C.Trust.untried
        _C.load_kernel(device, *binary, *form, place, trust)
    except torch.AcceleratorError:  # of something that ran before: the device loads nothing any more
        raise
    except RuntimeError as error:
        reason = str(error).splitlines()[0].rstrip(".")
        warnings.warn(_C.give_up_kernel(device, kernel.name, place, reason), stacklevel=3)
