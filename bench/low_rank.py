"""PowerSGD's four kernels, against the operators of torch's hook and a plain copy of as many bytes.

A bucket holds blocks of GPT-2 (small), 28 MiB of gradients each; where P is made orthogonal, 12 of them, which are 48
matrices. `torch` does what torch's powerSGD_hook does with it, without its copies into flat buffers: an addition and a
product, a product, a product and a subtraction, and torch.linalg.qr of all matrices of one shape at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bench.jobs import FASTDDP, Calls, Family, Job, name_of, plain_copy
from fastddp import _C

BLOCK = ((768, 2304), (768, 768), (768, 3072), (3072, 768))
RANKS = (1, 4)
DTYPES = (torch.float32, torch.bfloat16)
OPERATIONS = ("compress", "project", "reconstruct", "orthogonalise")
TORCH, EACH = "torch", "torch a matrix"

# What is read and written of each element of a gradient, in its own size; what is thin does not count.
_PASSES = {"compress": 3, "project": 1, "reconstruct": 3}


@dataclass(frozen=True)
class Matrices:
    """What one contestant works on."""

    gradients: list[Tensor]
    memories: list[Tensor]
    p: list[Tensor]
    q: list[Tensor]

    @classmethod
    def make(cls, blocks: int, rank: int, dtype: torch.dtype, device: torch.device) -> Matrices:
        """The same numbers each time."""
        generator = torch.Generator().manual_seed(0)

        def random(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
            return torch.randn(rows, columns, generator=generator).to(device, dtype)

        shapes = BLOCK * blocks
        gradients, memories = ([random(*shape, dtype) for shape in shapes] for _ in range(2))
        p = [random(rows, rank, torch.float32) for rows, _ in shapes]
        q = [random(rank, columns, torch.float32) for _, columns in shapes]
        return cls(gradients, memories, p, q)

    @property
    def elements(self) -> int:
        """Of all gradients."""
        return sum(gradient.numel() for gradient in self.gradients)

    @property
    def handed(self) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """As fastddp's kernels want them."""
        return list(zip(self.gradients, self.memories, self.p, self.q, strict=True))

    def payload_bytes(self, operation: str) -> int:
        """What an operation reads and writes at the least."""
        if operation == "orthogonalise":
            return 2 * sum(p.numel() * p.element_size() for p in self.p)
        return _PASSES[operation] * self.elements * self.gradients[0].element_size()


def fastddp_call(kernels: _C.LowRankKernels, operation: str, matrices: Matrices) -> None:
    """One launch an operation, or a few."""
    if operation == "orthogonalise":
        kernels.orthogonalise(matrices.p)
    else:
        getattr(kernels, operation)(matrices.handed)


def torch_call(operation: str, matrices: Matrices) -> None:
    """The operators of torch's hook."""
    for gradient, memory, p, q in matrices.handed if operation != "orthogonalise" else []:
        narrow = gradient.dtype != p.dtype
        if operation == "compress":
            memory.add_(gradient)
            torch.mm(memory.to(p.dtype) if narrow else memory, q.t(), out=p)
        elif operation == "project":
            torch.mm(p.t(), memory.to(p.dtype) if narrow else memory, out=q)
        else:
            gradient.copy_(torch.mm(p, q)) if narrow else torch.mm(p, q, out=gradient)
            memory.sub_(gradient)
    if operation == "orthogonalise":
        for rows in sorted({len(p) for p in matrices.p}):
            same = [p for p in matrices.p if len(p) == rows]
            for p, q in zip(same, torch.linalg.qr(torch.stack(same)).Q, strict=True):
                p.copy_(q)


def torch_call_each(operation: str, matrices: Matrices) -> None:
    """One matrix after another, where that is something else."""
    for p in matrices.p:
        p.copy_(torch.linalg.qr(p).Q)


def contestants(operation: str, device: torch.device) -> dict[str, Callable[[str, Matrices], None]]:
    """Who is measured beside the plain copy."""
    found: dict[str, Callable[[str, Matrices], None]]
    found = {FASTDDP: partial(fastddp_call, _C.LowRankKernels(device)), TORCH: torch_call}
    return found | ({EACH: torch_call_each} if operation == "orthogonalise" else {})


def wrong_contestants(operation: str, rank: int, dtype: torch.dtype, device: torch.device) -> set[str]:
    """Whose result is not that of fp64, within what the dtype can hold."""
    wrong = set()
    for name, call in contestants(operation, device).items():
        matrices, expected = (Matrices.make(1, rank, dtype, device) for _ in range(2))
        call(operation, matrices)
        for (gradient, memory, p, q), given in zip(matrices.handed, expected.handed, strict=True):
            if operation == "compress":
                pairs = [(memory, given[1].double() + given[0].double()), (p, memory.double() @ given[3].t().double())]
            elif operation == "project":
                pairs = [(q, given[2].t().double() @ given[1].double())]
            elif operation == "reconstruct":
                product = given[2].double() @ given[3].double()
                pairs = [(gradient, product), (memory, given[1].double() - gradient.double())]
            else:
                basis = p.double()
                identity = torch.eye(rank, device=device, dtype=torch.float64)
                pairs = [(basis.t() @ basis, identity), (basis @ (basis.t() @ given[2].double()), given[2].double())]
            if not all(_close(found, want, dtype) for found, want in pairs):
                wrong.add(name)
    return wrong


def _close(found: Tensor, want: Tensor, dtype: torch.dtype) -> bool:
    limit = (1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps) * float(want.abs().max())
    return bool(((found.double() - want).abs() <= limit).all())


def _make(operation: str, dtype: torch.dtype, rank: int, blocks: int, device: torch.device) -> list[Job]:
    if device.type != "cpu":
        from fastddp.kernel_loading.launching import load_low_rank_kernels

        load_low_rank_kernels({(device, dtype)}, rank)
    matrices = Matrices.make(blocks, rank, dtype, device)
    payload = matrices.payload_bytes(operation)
    calls: Calls = plain_copy(payload, device)
    calls |= {name: partial(call, operation, matrices) for name, call in contestants(operation, device).items()}
    facts = {"operation": operation, "gradient_dtype": name_of(dtype), "rank": rank}
    facts |= {"gradient_mib": round(matrices.elements * dtype.itemsize / 2**20, 1)}
    facts |= {"gradients": len(matrices.gradients)}
    return [Job(facts, payload, calls, wrong_contestants(operation, rank, dtype, device))]


def _jobs(device: torch.device, quick: bool) -> Iterator[tuple[str, Callable[[], list[Job]]]]:
    # What a bucket of 25 MiB has is about 4 matrices; on a GPU these are 16, and on the CPU so many take long.
    of_products = 1 if quick or device.type == "cpu" else 4
    for operation, dtype, rank in itertools.product(OPERATIONS, DTYPES, RANKS):
        is_last = operation == "orthogonalise"
        if is_last and dtype != torch.float32:
            continue  # P is fp32 whatever the gradients are
        blocks = 12 if is_last and not quick else of_products
        yield f"{operation} of {dtype}, rank {rank}", partial(_make, operation, dtype, rank, blocks, device)


_KEYS = ("operation", "gradient_dtype", "rank", "gradient_mib")
FAMILY = Family("low_rank", "PowerSGD's kernels", "low-rank kernel", _KEYS, _jobs)
