"""What is known of a collective: which operation, over which process group, of which dtype."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

OTHER = "other"  # neither torch nor the kernel's name says what it is
ALL_REDUCE = "all_reduce"
MESSAGES = ("send", "recv")  # between two ranks: no others join them


@dataclass(frozen=True, slots=True)
class Collective:
    """What ranks do together; None: not known."""

    operation: str  # one of _OPERATIONS' values, or OTHER
    group: str | None = None  # the same on all its ranks
    group_size: int | None = None  # ranks
    wire: str | None = None  # dtype


# By a part of the name, in small letters and without "_"; the first match counts.
_OPERATIONS = {
    "allreduce": ALL_REDUCE,
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "sendrecv": "send/recv",
    "barrier": "barrier",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
    "send": "send",
    "recv": "recv",
}

# Kernels of NCCL (ncclDevKernel_..., ncclSymkDevKernel_..., ncclKernel_...) and of RCCL, which adds MSCCL's. A
# demangled name: "void ncclKernel_AllReduce...".
_KERNEL = re.compile(r"(?:void )?(?:nccl|rccl|msccl)\w*Kernel")
_TEMPLATE = re.compile(r"\(.*|<.*")
_WIRES = {
    "f16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "f32": "float32",
    "float": "float32",
    "f64": "float64",
    "double": "float64",
}


@lru_cache(maxsize=1 << 12)
def is_collective_kernel(name: str) -> bool:
    """Whether a kernel is one of NCCL's or RCCL's."""
    return _KERNEL.match(name) is not None


@lru_cache(maxsize=1 << 12)
def operation_of(name: str) -> str:
    """``all_reduce`` of ``allreduce_coalesced``, ``gloo:all_reduce``, ``ncclDevKernel_AllReduce_Sum_f32_RING_LL``."""
    plain = _TEMPLATE.sub("", name).replace("_", "").lower()
    return next((operation for part, operation in _OPERATIONS.items() if part in plain), OTHER)


@lru_cache(maxsize=1 << 12)
def wire_of(kernel: str) -> str | None:
    """The dtype in a kernel's name."""
    words = _TEMPLATE.sub("", kernel).split("_")
    return next((_WIRES[word] for word in words if word in _WIRES), None)


def bus_bytes(operation: str, size: float, ranks: int) -> float:
    """Bytes that a collective of ``ranks`` moves over each link of a ring, if ``size`` bytes go in on each rank."""
    if operation == ALL_REDUCE:
        return size * 2 * (ranks - 1) / ranks
    if operation == "all_gather":
        return size * (ranks - 1)
    if operation in ("reduce_scatter", "all_to_all"):
        return size * (ranks - 1) / ranks
    return size
