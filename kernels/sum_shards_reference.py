"""The sum of shards in plain torch.

Shape letters:

    R  ranks, in the order of the sum
    E  elements of one rank's part of a wire
"""

import torch
from torch import Tensor


def sum_shards(shards: Tensor) -> Tensor:
    """Return the sum over ranks: in fp32, from 0, in the order of ranks, and rounded once.

    Args:
        shards: [R, E], fp16 or bf16.

    Returns:
        [E], of the same dtype.

    >>> sum_shards(torch.tensor([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]], dtype=torch.bfloat16))
    tensor([111., 222.], dtype=torch.bfloat16)
    """
    sums = torch.zeros(shards.shape[1:], dtype=torch.float32, device=shards.device)
    for shard in shards:
        sums += shard
    return sums.to(shards.dtype)
