"""Kernels compiled for a GPU that need not be present: what a C++ launcher loads, and what tests inspect."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Literal

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .pack import TRITON_DTYPES, kernel_constants
from .pack_kernels import CHUNK_ELEMENTS, OPTIONS, pack_kernel, unpack_kernel

Form = Literal["pack", "unpack"]

_KERNELS = {"pack": pack_kernel, "unpack": unpack_kernel}
_WARP_THREADS = 32

# How many null pointers a launch appends to a kernel's own parameters (global scratch, profile scratch), by version.
_SCRATCH_PARAMETERS = {"3.6": 2, "3.7": 2, "3.8": 2, "3.9": 2}


@dataclass(frozen=True)
class CompiledKernel:
    """One form of one kernel for one kind of GPU, with all that a driver needs to launch it.

    Parameters, in order: wire, table, chunks (device pointers), scale (double), then ``scratch_parameters`` null
    pointers. Grid (rows of chunks, 1, 1), block (``32 * num_warps``, 1, 1), ``shared_bytes`` of dynamic shared memory.
    """

    name: str
    """The function's name within the cubin."""
    cubin: bytes
    ptx: str
    capability: int
    """Compute capability without the dot: 90 for an H100."""
    num_warps: int
    shared_bytes: int
    chunk_elements: int
    """Elements one program moves at most; the chunk table must have been cut to it."""
    scratch_parameters: int


@dataclass(frozen=True)
class Resources:
    """What one thread and one block of a compiled kernel occupy."""

    registers: int
    stack_bytes: int
    """Local memory of a thread: registers that were spilled, or arrays that did not fit them."""


def scratch_parameters(version: str) -> int:
    """How many scratch pointers a kernel of this version of Triton takes after its own parameters.

    Raises:
        RuntimeError: that is not known.
    """
    minor = ".".join(version.split(".")[:2])
    if minor not in _SCRATCH_PARAMETERS:
        raise RuntimeError(
            f"fastddp launches Triton's kernels from C++ and does not know how those of Triton {version} are launched; "
            f"install one of {', '.join(_SCRATCH_PARAMETERS)}"
        )
    return _SCRATCH_PARAMETERS[minor]


def compile_kernel(
    form: Form, gradient: torch.dtype, wire: torch.dtype, capability: int, chunk_elements: int = CHUNK_ELEMENTS
) -> CompiledKernel:
    """Compile pack or unpack for gradients and wire of these dtypes.

    The signature is explicit: no pointer is specialised on alignment, because the kernels test it for each chunk.

    Raises:
        ValueError: a pair of dtypes that the kernels do not move.
        RuntimeError: the kernel wants scratch memory, which launchers do not provide; or an unknown version of Triton.
    """
    scratch = scratch_parameters(triton.__version__)
    constants = kernel_constants(gradient, wire, chunk_elements)
    signature = {"wire": f"*{TRITON_DTYPES[wire]}", "table": "*i64", "chunks": "*i64", "scale": "fp64"}
    source = ASTSource(
        _KERNELS[form],
        signature | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, _WARP_THREADS), options=OPTIONS)
    metadata = compiled.metadata
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise RuntimeError(f"{metadata.name} wants scratch memory; launchers pass null for it")
    return CompiledKernel(
        name=metadata.name,
        cubin=compiled.asm["cubin"],
        ptx=compiled.asm["ptx"],
        capability=capability,
        num_warps=metadata.num_warps,
        shared_bytes=metadata.shared,
        chunk_elements=chunk_elements,
        scratch_parameters=scratch,
    )


def resources(kernel: CompiledKernel) -> Resources:
    """Ask the cuobjdump of Triton's wheel what the binary uses.

    Raises:
        RuntimeError: cuobjdump printed no usage for the kernel.
    """
    report = _cuobjdump(kernel, "-res-usage")
    usage = re.search(r"REG:(\d+) STACK:(\d+).* LOCAL:(\d+)", report)
    if usage is None:
        raise RuntimeError(f"cuobjdump printed no resource usage for {kernel.name}:\n{report}")
    return Resources(registers=int(usage[1]), stack_bytes=int(usage[2]) + int(usage[3]))


def disassemble(kernel: CompiledKernel) -> str:
    """The machine code as text (SASS)."""
    return _cuobjdump(kernel, "-sass")


def _cuobjdump(kernel: CompiledKernel, flag: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, flag, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
