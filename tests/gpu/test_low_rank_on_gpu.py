"""PowerSGD's kernels on the device, launched by C++, against those of the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastddp import _C
from fastddp.kernel_loading.launching import load_low_rank_kernels
from on_ranks import on_ranks

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 1), (3, 15), (64, 147), (130, 16), (200, 260), (9, 3000), (0, 8), (8, 0)]

Matrix = tuple[Tensor | None, Tensor | None, Tensor, Tensor]


def matrices(dtype: torch.dtype, rank: int, device: torch.device, memory: bool) -> list[Matrix]:
    generator = torch.Generator().manual_seed(rank)
    made: list[Matrix] = []
    for rows, columns in SHAPES:
        least = max(1, min(rows, columns, rank))
        whole = [torch.randn(rows, columns, generator=generator).to(dtype) for _ in range(2)]
        p, q = torch.randn(rows, least, generator=generator), torch.randn(least, columns, generator=generator)
        on_device = [tensor.to(device) for tensor in (*whole, p, q)]
        made.append((on_device[0], on_device[1] if memory else None, on_device[2], on_device[3]))
    return made


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Relative to the largest element."""
    if theirs.numel() == 0:
        return 0.0
    largest = float(theirs.double().abs().max().clamp(min=1e-30))
    return float((ours.cpu().double() - theirs.double()).abs().max()) / largest


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vectors", [1, 3, 4, 16])
@pytest.mark.parametrize("memory", [True, False])
@on_ranks(1, pool="gpu_ranks")
def test_a_window(rank: int, device: str, dtype: torch.dtype, vectors: int, memory: bool) -> None:
    here, cpu = torch.device(device, 0), torch.device("cpu")
    load_low_rank_kernels([(here, dtype)], vectors)
    ours, theirs = matrices(dtype, vectors, here, memory), matrices(dtype, vectors, cpu, memory)
    kernels, reference = _C.LowRankKernels(here), _C.LowRankKernels(cpu)
    of_both = (ours, kernels), (theirs, reference)

    def compare(what: str) -> None:
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            for name, left, right in zip(("gradient", "memory", "P", "Q"), mine, other, strict=True):
                if left is None or right is None:
                    continue
                limit = 2e-5 if name in "PQ" else {torch.float32: 2e-6}.get(dtype, torch.finfo(dtype).eps)
                assert difference(left, right) <= limit, f"{name} of matrix {index} after {what}"
                left.copy_(right)  # differences do not add up

    for _ in range(2):
        for given, low_rank in of_both:
            low_rank.compress(given, 0.5)
        compare("compress")
        for given, low_rank in of_both:
            low_rank.orthogonalise([matrix[2] for matrix in given if len(matrix[2])], 0.0)
        compare("orthogonalise P")
        for given, low_rank in of_both:
            low_rank.project(given, 2.0)
        compare("project")
        mine, other = (low_rank.reconstruct(given) for given, low_rank in of_both)
        compare("reconstruct")
        assert float(mine[0]) == pytest.approx(float(other[0]), rel=1e-3 if dtype != torch.float32 else 1e-5)
        for given, low_rank in of_both:
            low_rank.orthogonalise([matrix[3].t() for matrix in given if matrix[3].shape[1]], 0.0, 7)
        compare("orthogonalise Q")
    # compress, three for P, two for Q, reconstruct, three for the next Q; twice. Addresses and programs of each, once.
    assert (kernels.launches, kernels.uploads) == (2 * 10, 2 + 2 + 3 + 2 + 2)


def orthogonality(vectors: Tensor) -> float:
    gram = vectors.double().T @ vectors.double()
    return float((gram - torch.eye(len(gram), device=gram.device)).abs().max())


@pytest.mark.parametrize(("length", "count"), [(32, 32), (768, 4), (3000, 16), (50257, 4)])
@on_ranks(1, pool="gpu_ranks")
def test_bases_that_are_hard_to_orthogonalise(rank: int, device: str, length: int, count: int) -> None:
    here = torch.device(device, 0)
    load_low_rank_kernels([(here, torch.float32)], 32)
    left = torch.linalg.qr(torch.randn(length, count, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(count, count, dtype=torch.float64)).Q
    basis = ((left * torch.logspace(0, -6, count)) @ right.T).float().to(here)
    _C.LowRankKernels(here).orthogonalise([basis])
    assert orthogonality(basis) <= 1e-5


@on_ranks(1, pool="gpu_ranks")
def test_what_no_kernel_takes_goes_to_operators(rank: int, device: str) -> None:
    here = torch.device(device, 0)
    kernels = _C.LowRankKernels(here)
    m, q = torch.randn(20, 30, dtype=torch.float64), torch.randn(2, 30, dtype=torch.float64)
    p = torch.empty(20, 2, dtype=torch.float64, device=here)
    kernels.compress([(m.to(here), None, p, q.to(here))])
    assert difference(p, m @ q.T) < 1e-12
    assert kernels.launches == 0
