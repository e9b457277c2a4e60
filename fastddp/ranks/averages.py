"""How a process group averages. The backend's name does not tell, so the group is tried."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fastddp.ranks.together import together


def divides_first(process_group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether ``ReduceOp.AVG`` multiplies what each rank sends by 1 / ranks, and then adds, as NCCL does.

    Numbers near the largest fp32 show this: their sum is infinite, the sum of their shares is not. False where there is
    no average, and for one rank: NCCL runs a kernel for its average, but none for its sum.

    A collective: all ranks of ``process_group`` call it together, and all get the same answer.
    """
    if process_group.size() == 1:
        return False
    number = torch.full((1,), 0.9 * torch.finfo(torch.float32).max, device=device)
    average = number.clone()
    try:
        together(dist.all_reduce, average, dist.ReduceOp.AVG, group=process_group)
    except RuntimeError:
        return False
    return bool(torch.isclose(average, number, rtol=1e-5))
