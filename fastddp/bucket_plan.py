"""Which gradients travel together, and in which order: a pure function of the parameters.

Nothing here looks at values, processes or devices; the same arguments give the same plan on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

MIB = 2**20
FIRST_BUCKET_BYTES = 1 * MIB
DEFAULT_BUCKET_BYTES = 25 * MIB

BucketPlan = list[list[int]]
"""The parameters' indices in each bucket; buckets in the order of their collectives."""


@dataclass
class _OpenBucket:
    members: list[int] = field(default_factory=list)
    size: int = 0  # bytes
    closed: int = 0  # buckets of this kind closed before


def plan_buckets(parameters: Sequence[Tensor], caps: Sequence[int], order: Sequence[int] | None = None) -> BucketPlan:
    """Divide ``parameters`` into buckets.

    Walks the parameters in ``order``, and closes a bucket as soon as it holds at least as many bytes as its cap says;
    so a bucket exceeds its cap by less than one parameter. A bucket holds one dtype on one device. Buckets are ordered
    by their last parameter: in the order in which they become ready.

    Args:
        parameters: of any shape, dtype and device.
        caps: bytes at which the first, second, ... bucket of a dtype and device is closed; the last cap holds for all
            buckets after it.
        order: a permutation of the parameters' indices, the order in which their gradients are expected. Default: the
            reverse of the given one, because backward runs against the order in which layers are registered.

    Example: four parameters of 4 bytes each with caps [4, 8] give [[3], [2, 1], [0]].
    """
    open_buckets: dict[object, _OpenBucket] = {}
    plan: BucketPlan = []
    for index in order if order is not None else reversed(range(len(parameters))):
        parameter = parameters[index]
        bucket = open_buckets.setdefault((parameter.dtype, parameter.device), _OpenBucket())
        bucket.members.append(index)
        bucket.size += parameter.numel() * parameter.element_size()
        if bucket.size >= caps[min(bucket.closed, len(caps) - 1)]:
            plan.append(bucket.members)
            bucket.members, bucket.size, bucket.closed = [], 0, bucket.closed + 1
    return plan + [bucket.members for bucket in open_buckets.values() if bucket.members]
