"""PowerSGD's kernels on the device, launched by C++, against those of the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastddp import _C
from fastddp.exchange.launching import load_low_rank_kernels
from ranks import RankPool

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 1), (3, 15), (64, 147), (130, 16), (200, 260), (9, 3000), (0, 8), (8, 0)]

Matrix = tuple[Tensor | None, Tensor | None, Tensor, Tensor]


def matrices(dtype: torch.dtype, rank: int, device: torch.device, gradient: bool, memory: bool) -> list[Matrix]:
    generator = torch.Generator().manual_seed(rank)
    made: list[Matrix] = []
    for rows, columns in SHAPES:
        least = max(1, min(rows, columns, rank))
        whole = [torch.randn(rows, columns, generator=generator).to(dtype) for _ in range(2)]
        p, q = torch.randn(rows, least, generator=generator), torch.randn(least, columns, generator=generator)
        made.append(
            (
                whole[0].to(device) if gradient else None,
                whole[1].to(device) if memory else None,
                p.to(device),
                q.to(device),
            )
        )
    return made


def difference(ours: Tensor | None, theirs: Tensor | None) -> float:
    """Relative to the largest element."""
    if ours is None or theirs is None or theirs.numel() == 0:
        return 0.0
    largest = float(theirs.double().abs().max().clamp(min=1e-30))
    return float((ours.cpu().double() - theirs.double()).abs().max()) / largest


def a_window(rank: int, dtype: torch.dtype, vectors: int, memory: bool, device: str) -> tuple[list[str], int, int]:
    """What was wrong, launches and uploads."""
    here, cpu = torch.device(device, 0), torch.device("cpu")
    load_low_rank_kernels([(here, dtype)], vectors)
    ours, theirs = matrices(dtype, vectors, here, True, memory), matrices(dtype, vectors, cpu, True, memory)
    kernels, reference = _C.LowRankKernels(here), _C.LowRankKernels(cpu)
    wrong = []

    def compare(what: str) -> None:
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            for name, left, right in zip(("gradient", "memory", "P", "Q"), mine, other, strict=True):
                limit = 2e-5 if name in "PQ" else {torch.float32: 2e-6}.get(dtype, torch.finfo(dtype).eps)
                if difference(left, right) > limit:
                    wrong.append(f"{name} of matrix {index} after {what}: {difference(left, right):.2g}")
                if right is not None and left is not None:
                    left.copy_(right)  # differences do not add up

    for _ in range(2):
        kernels.compress(ours, 0.5)
        reference.compress(theirs, 0.5)
        compare("compress")
        for all_of_them, low_rank in ((ours, kernels), (theirs, reference)):
            low_rank.orthogonalise([matrix[2] for matrix in all_of_them if len(matrix[2])], 0.0)
        compare("orthogonalise P")
        kernels.project(ours, 2.0)
        reference.project(theirs, 2.0)
        compare("project")
        mine, other = kernels.reconstruct(ours), reference.reconstruct(theirs)
        compare("reconstruct")
        if float(mine[0]) != pytest.approx(float(other[0]), rel=1e-3 if dtype != torch.float32 else 1e-5):
            wrong.append(f"norms {mine.tolist()} and {other.tolist()}")
        for all_of_them, low_rank in ((ours, kernels), (theirs, reference)):
            low_rank.orthogonalise([matrix[3].t() for matrix in all_of_them if matrix[3].shape[1]], 0.0, 7)
        compare("orthogonalise Q")
    return wrong, kernels.launches, kernels.uploads


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vectors", [1, 3, 4, 16])
@pytest.mark.parametrize("memory", [True, False])
def test_a_window(gpu_ranks: RankPool, device: str, dtype: torch.dtype, vectors: int, memory: bool) -> None:
    ((wrong, launches, uploads),) = gpu_ranks.run(a_window, 1, dtype, vectors, memory, device)
    assert wrong == []
    # compress, three for P, two for Q, reconstruct, three for the next Q; twice. Addresses and programs of each, once.
    assert (launches, uploads) == (2 * 10, 2 + 2 + 3 + 2 + 2)


def orthogonality(vectors: Tensor) -> float:
    gram = vectors.double().T @ vectors.double()
    return float((gram - torch.eye(len(gram), device=gram.device)).abs().max())


def hard_bases(rank: int, device: str) -> list[str]:
    here = torch.device(device, 0)
    load_low_rank_kernels([(here, torch.float32)], 32)
    kernels = _C.LowRankKernels(here)
    generator = torch.Generator().manual_seed(0)
    wrong = []
    for length, count in ((32, 32), (768, 4), (3000, 16), (50257, 4)):
        left = torch.linalg.qr(torch.randn(length, count, generator=generator, dtype=torch.float64)).Q
        right = torch.linalg.qr(torch.randn(count, count, generator=generator, dtype=torch.float64)).Q
        conditioned = ((left * torch.logspace(0, -6, count)) @ right.T).float()
        basis = conditioned.to(here)
        kernels.orthogonalise([basis])
        if orthogonality(basis) > 1e-5:
            wrong.append(f"{length} x {count}: {orthogonality(basis):.2g}")
    vectors = torch.randn(300, 6, generator=generator)
    vectors[:, 1], vectors[:, 3], vectors[:, 5] = 0, 2 * vectors[:, 0], torch.nan
    zeroed, refilled, second, on_cpu = vectors[:, :5].to(here), vectors.to(here), vectors.to(here), vectors.clone()
    kernels.orthogonalise([zeroed])
    kernels.orthogonalise([refilled, second], refill=7)
    _C.LowRankKernels(torch.device("cpu")).orthogonalise([on_cpu], refill=7)
    if bool(zeroed[:, [1, 3]].any()) or orthogonality(zeroed[:, [0, 2, 4]]) > 1e-5:
        wrong.append("zeroed")
    if orthogonality(refilled) > 1e-5 or torch.allclose(refilled, second):
        wrong.append("refilled")
    if not torch.allclose(refilled[:, :2].cpu(), on_cpu[:, :2], atol=1e-6):
        wrong.append("the CPU draws other vectors")
    return wrong


def test_bases_that_are_hard_to_orthogonalise(gpu_ranks: RankPool, device: str) -> None:
    assert gpu_ranks.run(hard_bases, 1, device) == [[]]


def with_doubles(rank: int, device: str) -> float:
    here = torch.device(device, 0)
    kernels = _C.LowRankKernels(here)
    m, q = torch.randn(20, 30, dtype=torch.float64), torch.randn(2, 30, dtype=torch.float64)
    p = torch.empty(20, 2, dtype=torch.float64, device=here)
    kernels.compress([(m.to(here), None, p, q.to(here))])
    return difference(p, m @ q.T) + kernels.launches


def test_what_no_kernel_takes_goes_to_operators(gpu_ranks: RankPool, device: str) -> None:
    assert gpu_ranks.run(with_doubles, 1, device)[0] < 1e-12
