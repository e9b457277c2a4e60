"""PowerSGD's Triton kernels behind the methods of :class:`fastddp._C.LowRankKernels`, run by Triton's interpreter.

The tables are those that the launcher in C++ makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastddp import _C
from interpreting import interpreted_copies

low_rank, basis = interpreted_copies("low_rank_kernels", "orthogonalise_kernels")
TRITON_DTYPES = interpreted_copies("pack_kernels")[0].TRITON_DTYPES

Matrix = tuple[Tensor | None, Tensor | None, Tensor, Tensor]


def table(words: Sequence[int], columns: int) -> Tensor:
    return torch.tensor(words, dtype=torch.int64).view(-1, columns)


class Interpreted:
    """All matrices of a call have one dtype, fp32, fp16 or bf16."""

    def compress(self, matrices: Sequence[Matrix], scale: float = 1.0, before: Sequence[Tensor | None] = ()) -> None:
        given = constants(matrices)
        words = tables(matrices, low_rank.compress_rows(given["R"]), before)
        self._run(low_rank.compress_kernel, "compress", words, scale, **given)

    def project(self, matrices: Sequence[Matrix], scale: float = 1.0) -> None:
        words = tables(matrices)
        partials = torch.full((words["partials"][0],), torch.nan)
        self._run(low_rank.project_kernel, "project", words, partials, **constants(matrices))
        self._run(low_rank.sum_partials_kernel, "sums", words, partials, scale)

    def reconstruct(self, matrices: Sequence[Matrix]) -> Tensor:
        words = tables(matrices, low_rank.RECONSTRUCT_TILE[0])
        programs = len(words["reconstruct"]) // low_rank.BLOCK_WORDS
        measured = torch.full((programs, 2), torch.nan, dtype=torch.float64)
        self._run(low_rank.reconstruct_kernel, "reconstruct", words, measured, **constants(matrices))
        return measured.sum(0)

    def orthogonalise(self, bases: Sequence[Tensor], epsilon: float = 0.0, refill: int | None = None) -> None:
        rank = low_rank.padded_rank(max(vectors.shape[1] for vectors in bases))
        words = _C.basis_tables(list(bases), basis.lines(rank))
        given = table(words["bases"], basis.BASIS_WORDS), table(words["blocks"], basis.BLOCK_WORDS)
        first, second = torch.full((2, len(given[1]), rank, rank), torch.nan, dtype=torch.float64)
        grid = (len(given[1]),)
        refills = (int(refill is not None), refill or 0)
        basis.gram_kernel[grid](*given, first, R=rank)
        basis.orthonormalise_kernel[grid](*given, first, second, epsilon, *refills, R=rank, LAST=False)
        basis.orthonormalise_kernel[grid](*given, second, first, 0.0, *refills, R=rank, LAST=True)

    def _run(self, kernel: Any, name: str, words: dict[str, list[int]], *arguments: Any, **constants: Any) -> None:
        programs = table(words[name], low_rank.SUM_WORDS if name == "sums" else low_rank.BLOCK_WORDS)
        if len(programs) > 0:
            kernel[(len(programs),)](table(words["matrices"], low_rank.MATRIX_WORDS), programs, *arguments, **constants)


def tables(matrices: Sequence[Matrix], rows: int = 1, before: Sequence[Tensor | None] = ()) -> dict[str, list[int]]:
    """``rows``: of a program of the kernel that is run, if it depends on them."""
    columns = low_rank.RECONSTRUCT_TILE[1]
    return _C.low_rank_tables(list(matrices), rows, columns, low_rank.STEP, low_rank.ELEMENTS, before)


def constants(matrices: Sequence[Matrix]) -> dict[str, Any]:
    gradient, memory, _, _ = matrices[0]
    given = memory if gradient is None else gradient
    assert given is not None
    return {"DTYPE": TRITON_DTYPES[given.dtype], "R": low_rank.padded_rank(max(m[2].shape[1] for m in matrices))}
