"""Makes torch.compile cut a model's graph at its buckets.

All gradients of a compiled graph come at once. So dynamo cuts the graph of the model whose forward runs into one for
each bucket (``torch/_dynamo/backends/distributed.py``). It walks the parameters from the last used to the first, as
``plan_buckets`` does, and asks the model for one cap, ``bucket_bytes_cap``. It takes the first bucket's cap from a
constant of ``torch.distributed`` (1 MiB), and fails if the other cap is smaller.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

_CONSTANT = "_DEFAULT_FIRST_BUCKET_BYTES"


class ActiveModel:
    """Within this context, dynamo cuts the graphs that it compiles at the buckets of ``model``, whose forward runs.

    The first bucket's cap is not more than the model's ``bucket_bytes_cap``.
    """

    def __init__(self, model: TorchDDP, first_bucket_bytes: int) -> None:
        self._now = (model, first_bucket_bytes)

    @torch._disable_dynamo
    def __enter__(self) -> None:
        self._before = (TorchDDP._active_ddp_module, getattr(dist, _CONSTANT))
        _set(*self._now)

    @torch._disable_dynamo
    def __exit__(self, *exception: Any) -> None:
        _set(*self._before)


def _set(model: TorchDDP | None, first_bucket_bytes: int) -> None:
    TorchDDP._active_ddp_module = model
    setattr(dist, _CONSTANT, first_bucket_bytes)
