"""Compiles kernels for a GPU that need not be present. A C++ launcher loads them, and tests inspect them."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import block8_kernels, device_table_kernels, low_rank_kernels, orthogonalise_kernels, sum_shards_kernels
from .compiling_once import alone_on_this_node
from .pack_kernels import (
    CHUNK_ELEMENTS,
    OPTIONS,
    TRITON_DTYPES,
    chunk_elements,
    kernel_constants,
    measure_gradients_kernel,
    measure_kernel,
    pack_kernel,
    pack_measuring_kernel,
    unpack_kernel,
)

Form = Literal["pack", "unpack", "pack_measuring"]

LOW_RANK_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of the gradients that PowerSGD's kernels take."""

_WARP_THREADS = 32

# By Triton's version: how many null pointers a launch appends to a kernel's own parameters (global, profile scratch).
_SCRATCH_PARAMETERS = {"3.6": 2, "3.7": 2, "3.8": 2, "3.9": 2}


@dataclass(frozen=True)
class CompiledKernel:
    """One form of one kernel for one kind of GPU, with all that a driver needs to launch it.

    A launch passes the kernel's own parameters, each of 8 bytes, in the order in which its module lists them, then
    ``scratch_parameters`` null pointers. The grid is (rows of a table, 1, 1), the block (``32 * num_warps``, 1, 1),
    with ``shared_bytes`` of dynamic shared memory.
    """

    name: str
    """The function's name within the cubin."""
    cubin: bytes
    ptx: str
    capability: int
    """Compute capability without the dot: 90 for an H100."""
    num_warps: int
    shared_bytes: int
    tile: tuple[int, ...]
    """The most that one program works on. The tables must be cut to it."""
    parameters: int
    scratch_parameters: int


@dataclass(frozen=True)
class Resources:
    """The registers and local memory of one thread of a compiled kernel."""

    registers: int
    stack_bytes: int
    """Local memory of a thread: spilled registers, or arrays that did not fit registers."""


def scratch_parameters(version: str) -> int:
    """How many scratch pointers a kernel of this version of Triton takes after its own parameters.

    Raises:
        RuntimeError: the number is not known for this version.
    """
    minor = ".".join(version.split(".")[:2])
    if minor not in _SCRATCH_PARAMETERS:
        raise RuntimeError(
            f"fastddp launches Triton's kernels from C++ and does not know how those of Triton {version} are launched; "
            f"install one of {', '.join(_SCRATCH_PARAMETERS)}"
        )
    return _SCRATCH_PARAMETERS[minor]


@cache
def compile_pack(
    form: Form, gradient: torch.dtype, wire: torch.dtype, capability: int, chunk: int | None = None
) -> CompiledKernel:
    """Compile pack, pack_measuring or unpack, for gradients and wire of these dtypes; ``chunk``: elements of a program.

    Raises:
        ValueError: see :func:`.kernel_constants`.
        RuntimeError: see :func:`_compile`.
    """
    if chunk is None:
        chunk = chunk_elements(gradient, wire)
    constants = kernel_constants(gradient, wire, chunk)
    signature = {"wire": f"*{TRITON_DTYPES[wire]}", "table": "*i64", "chunks": "*i64", "scale": "fp64"}
    if form != "pack":
        signature["partials"] = "*fp64"
    kernel = {"pack": pack_kernel, "unpack": unpack_kernel, "pack_measuring": pack_measuring_kernel}[form]
    return _compile(kernel, signature, constants, capability, (chunk,))


@cache
def compile_measure_gradients(gradient: torch.dtype, capability: int) -> CompiledKernel:
    """Compile the kernel that measures unpacked gradients of this dtype.

    Raises:
        ValueError: see :func:`.kernel_constants`.
        RuntimeError: see :func:`_compile`.
    """
    constants = kernel_constants(gradient, gradient, CHUNK_ELEMENTS)
    signature = {"table": "*i64", "chunks": "*i64", "partials": "*fp64"}
    return _compile(measure_gradients_kernel, signature, constants, capability, (CHUNK_ELEMENTS,))


@cache
def compile_measure(wire: torch.dtype, capability: int) -> CompiledKernel:
    """Compile the kernel that measures a wire of this dtype.

    Raises:
        RuntimeError: see :func:`_compile`.
    """
    signature = {"wire": f"*{TRITON_DTYPES[wire]}", "count": "i64", "partials": "*fp64"}
    return _compile(measure_kernel, signature, {"CHUNK": CHUNK_ELEMENTS}, capability, (CHUNK_ELEMENTS,))


@cache
def compile_low_rank(dtype: torch.dtype, rank: int, capability: int) -> list[CompiledKernel]:
    """Compile PowerSGD's kernels for gradients of this dtype and ranks up to ``rank``, or the next power of two.

    Raises:
        ValueError: a dtype or a rank that the kernels do not take.
        RuntimeError: see :func:`_compile`.
    """
    if dtype not in LOW_RANK_DTYPES:
        raise ValueError(f"the gradients have dtype {dtype}; supported are {', '.join(map(str, LOW_RANK_DTYPES))}")
    if not 1 <= rank <= low_rank_kernels.LARGEST_RANK:
        raise ValueError(f"the rank is {rank}; supported are 1 to {low_rank_kernels.LARGEST_RANK}")
    rank = low_rank_kernels.padded_rank(rank)
    low, basis = low_rank_kernels, orthogonalise_kernels
    matrices = {"matrices": "*i64", "blocks": "*i64"}
    bases = {"bases": "*i64", "blocks": "*i64", "grams": "*fp64"}
    both = {"DTYPE": TRITON_DTYPES[dtype], "R": rank}
    next_grams = {"next_grams": "*fp64", "epsilon": "fp64", "refill": "i64", "seed": "i64"}
    in_flight = (basis.lines(rank), rank)
    # Fused products take registers that more vectors need. With so few of them, five programs fit a multiprocessor.
    compress = {"num_warps": low.TILE_WARPS, "enable_fp_fusion": rank <= 8}
    reconstruct = {"num_warps": low.TILE_WARPS, "maxnreg": 96 if rank <= 4 else None}
    wanted: list[tuple[Any, ...]] = [
        (low.compress_kernel, matrices | {"scale": "fp64"}, both, (low.compress_rows(rank),), compress),
        (low.project_kernel, matrices | {"partials": "*fp32"}, both, (low.STEP,), {"num_warps": low.PROJECT_WARPS}),
        (
            low.sum_partials_kernel,
            {"matrices": "*i64", "sums": "*i64", "partials": "*fp32", "scale": "fp64"},
            {},
            (low.ELEMENTS,),
        ),
        (low.reconstruct_kernel, matrices | {"partials": "*fp64"}, both, low.RECONSTRUCT_TILE, reconstruct),
        (basis.gram_kernel, bases, {"R": rank}, in_flight),
        (basis.orthonormalise_kernel, bases | next_grams, {"R": rank, "LAST": False}, in_flight),
        (basis.orthonormalise_kernel, bases | next_grams, {"R": rank, "LAST": True}, in_flight),
    ]
    return [_compile(kernel, signature, constants, capability, *rest) for kernel, signature, constants, *rest in wanted]


@cache
def compile_block8(
    gradient: torch.dtype, number: str, block: int, stochastic: bool, capability: int
) -> list[CompiledKernel]:
    """Compile block8's kernels for gradients of this dtype, and for one format and rounding.

    Raises:
        ValueError: a dtype or a format that the kernels do not have.
        RuntimeError: see :func:`_compile`.
    """
    form = block8_kernels.format_constants(number, block)
    both = block8_kernels.gradient_constants(number, block, gradient)
    rounding = {"STOCHASTIC": stochastic}
    wire, tables = {"wire": "*u8"}, {"gradients": "*i64", "runs": "*i64"}
    error, scale, key = {"error": "*fp32"}, {"scale": "fp64"}, {"key": "i64"}
    before = {"before": "*fp32"}
    shards, places = {"shards": "*i64", "count": "i64", "target": "*u8"}, {"blocks": "i64", "first_element": "i64"}
    wanted: list[tuple[Any, dict[str, str], dict[str, Any]]] = [
        (block8_kernels.block8_encode_kernel, wire | before | error | tables | scale | key, both | rounding),
        (block8_kernels.block8_add_kernel, shards | error | places | key, form | rounding),
        (block8_kernels.block8_decode_kernel, wire | tables | {"partials": "*fp64"}, both),
    ]
    return [
        _compile(kernel, signature, constants, capability, (block8_kernels.ELEMENTS,))
        for kernel, signature, constants in wanted
    ]


@cache
def compile_sum_shards(dtype: torch.dtype, capability: int) -> CompiledKernel:
    """Compile the kernel that adds up shards of this dtype.

    Raises:
        ValueError: a dtype that the kernel does not add up.
        RuntimeError: see :func:`_compile`.
    """
    constants = sum_shards_kernels.dtype_constants(dtype)
    pointer = f"*{TRITON_DTYPES[dtype]}"
    signature = {"shards": pointer, "ranks": "i64", "elements": "i64", "target": pointer}
    kernel: Any = sum_shards_kernels.sum_shards_kernel
    return _compile(kernel, signature, constants, capability, (sum_shards_kernels.ELEMENTS,))


@cache
def compile_write_words(capability: int) -> CompiledKernel:
    """Compile the kernel that writes tables.

    Raises:
        RuntimeError: see :func:`_compile`.
    """
    tables = device_table_kernels
    signature = {"target": "*i64", "count": "i64", "words": ("i64",) * tables.WORDS}
    kernel: Any = tables.write_words_kernel
    options = {"num_warps": tables.WARPS}
    return _compile(kernel, signature, {}, capability, (tables.WORDS, tables.GROUP), options)


def _compile(
    kernel: Any,
    signature: dict[str, Any],
    constants: dict[str, Any],
    capability: int,
    tile: tuple[int, ...],
    options: dict[str, Any] | None = None,
) -> CompiledKernel:
    """Compile one kernel. No pointer is specialised on alignment, because the kernels test it themselves.

    If several processes of a node want the kernel at the same time, one compiles: Note [Compiled once a node].

    Raises:
        RuntimeError: the kernel wants scratch memory, which launchers do not provide; or Triton's version is unknown.
    """
    scratch = scratch_parameters(triton.__version__)
    source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constexprs=constants, attrs={})
    options = OPTIONS | (options or {})
    identity = (kernel.__name__, signature, constants, capability, options, triton.__version__)
    with alone_on_this_node(Path(triton.knobs.cache.dir), repr(identity)):
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, _WARP_THREADS), options=options)
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
        tile=tile,
        parameters=sum(len(kind) if isinstance(kind, tuple) else 1 for kind in signature.values()),
        scratch_parameters=scratch,
    )


def resources(kernel: CompiledKernel) -> Resources:
    """Ask the cuobjdump in Triton's wheel for the resources of the binary.

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
