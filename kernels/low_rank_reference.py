"""PowerSGD's kernels in plain torch, for one matrix; :class:`fastddp._C.LowRankKernels` computes the same.

Shape letters:

    N  rows of the gradient as a matrix
    M  its columns
    R  rank: vectors in each factor, at most min(N, M)
"""

import torch
from torch import Tensor

DEPENDENT = 2e-7
"""A vector counts as a combination of the vectors before it if no more than this share of it is orthogonal to them."""


def compress(gradient: Tensor | None, memory: Tensor | None, q: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return (matrix, P): ``memory + gradient`` in the dtype of memory, and ``scale * matrix @ q.T``.

    Args:
        gradient: [N, M]; None stands for zeros.
        memory: [N, M], the error of earlier windows. None: the matrix is the gradient.
        q: [R, M].
        scale: of P.

    Example: gradient [[1, 2], [3, 4]], memory [[1, 0], [0, 0]] and q [[1, 1]] give the matrix [[2, 2], [3, 4]] and
    P [[4], [7]].
    """
    if memory is None:
        assert gradient is not None
        matrix = gradient
    else:
        matrix = memory if gradient is None else (memory.double() + gradient.double()).to(memory.dtype)
    return matrix, scale * matrix.double() @ q.double().T


def project(matrix: Tensor, p: Tensor, scale: float = 1.0) -> Tensor:
    """Return Q [R, M], ``scale * p.T @ matrix``, for a matrix [N, M] and P [N, R].

    Example: the matrix [[2, 2], [3, 4]] and P [[1], [2]] give Q [[8, 10]].
    """
    return scale * p.double().T @ matrix.double()


def reconstruct(matrix: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor, float, int]:
    """Return (gradient, memory, sum of squares, elements that are not finite), the last two of the gradient.

    The gradient is ``p @ q`` in the dtype of the matrix. The memory is the matrix minus the gradient, and 0 where that
    is not finite.

    Example: the matrix [[2, 2], [3, 4]], P [[1], [2]] and Q [[2, 2]] give the gradient [[2, 2], [4, 4]], memory
    [[0, 0], [-1, 0]], 40 and 0.
    """
    gradient = (p.double() @ q.double()).to(matrix.dtype)
    memory = torch.nan_to_num(matrix.double() - gradient.double(), 0, 0, 0).to(matrix.dtype)
    return gradient, memory, float(gradient.double().square().sum()), int((~gradient.isfinite()).sum())


def orthogonalise(vectors: Tensor, epsilon: float = 0.0) -> Tensor:
    """Return an orthonormal basis of the columns of ``vectors``, [length, R], by Gram-Schmidt; dependent ones are zero.

    A column is dependent if no more of it than ``max(epsilon, DEPENDENT * its norm)`` is orthogonal to the ones before.

    Example: [[3, 6, 0], [4, 8, 2]] gives [[0.6, 0, -0.8], [0.8, 0, 0.6]]: the second column is twice the first.
    """
    basis = torch.zeros_like(vectors, dtype=torch.float64)
    for index, vector in enumerate(vectors.double().T):
        rest = vector - basis @ (basis.T @ vector)
        rest = rest - basis @ (basis.T @ rest)
        if rest.norm() > max(epsilon, DEPENDENT * float(vector.norm())):
            basis[:, index] = rest / rest.norm()
    return basis
