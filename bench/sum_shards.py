"""What adds up shards of 16 bits, against torch's operators and a plain copy of as many bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch

from bench.jobs import FASTDDP, OPERATORS, Calls, Family, Job, name_of, plain_copy
from fastddp import _C

_MEBIBYTES = 12.5  # a wire of 16 bits of a bucket of 25 MiB
_RANKS = (2, 8)


def _make(dtype: torch.dtype, ranks: int, mebibytes: float, device: torch.device) -> list[Job]:
    from fastddp.kernels.sum_shards_reference import sum_shards

    if device.type != "cpu":
        from fastddp.kernel_loading.launching import load_sum_kernels

        load_sum_kernels([device], dtype)
    elements = int(mebibytes * 2**20) // dtype.itemsize // ranks // 8 * 8
    # Never zeros: some devices move those faster.
    shards = torch.empty(ranks, elements, device=device).uniform_(1, 2).to(dtype)
    target = torch.empty_like(shards[0])
    _C.sum_shards(shards, target)
    wrong = [] if torch.equal(target, sum_shards(shards)) else [FASTDDP]
    payload = shards.nbytes + target.nbytes
    calls: Calls = plain_copy(payload, device) | {
        OPERATORS: lambda: target.copy_(shards.sum(0, dtype=torch.float32)),
        FASTDDP: lambda: _C.sum_shards(shards, target),
    }
    facts = {"operation": "sum_shards", "wire_dtype": name_of(dtype), "world_size": ranks}
    return [Job(facts, payload, calls, wrong)]


def _jobs(device: torch.device, quick: bool) -> Iterator[tuple[str, Callable[[], list[Job]]]]:
    for dtype, ranks in itertools.product((torch.bfloat16, torch.float16), _RANKS):
        what = f"the sum of shards of {dtype} from {ranks} ranks"
        yield what, partial(_make, dtype, ranks, 0.1 if quick else _MEBIBYTES, device)


FAMILY = Family("sum_shards", "sums of shards", "shards kernel", ("operation", "wire_dtype", "world_size"), _jobs)
