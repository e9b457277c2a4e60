"""Contexts of torch.distributed.autograd, whose gradients do not belong to parameters."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed.autograd as distributed_autograd
from torch import nn
from torch.distributed import rpc

import fastddp
from ranks import RankPool


def in_and_around_a_context(rank: int, folder: Path) -> tuple[str, str, float, list[float]]:
    """What forward and backward inside a context say; a gradient under no_sync there; and those of steps behind it."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/store")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    try:
        model = fastddp.DistributedDataParallel(nn.Linear(1, 1, bias=False))
        x = torch.full((1, 1), rank + 1.0)
        loss = model(x).sum()
        with distributed_autograd.context() as context:
            with pytest.raises(NotImplementedError) as forward:
                model(x)
            with pytest.raises(RuntimeError) as backward:
                distributed_autograd.backward(context, [loss])
        with distributed_autograd.context() as context, model.no_sync():
            distributed_autograd.backward(context, [model(x).sum()])
            own = distributed_autograd.get_gradients(context)[model.module.weight].item()
        averaged = []
        for _ in range(2):
            model.zero_grad()
            model(x).sum().backward()
            averaged.append(model.module.weight.grad.item())
        return str(forward.value), str(backward.value), own, averaged
    finally:
        rpc.shutdown()


def test_what_would_synchronise_inside_a_context_is_refused_and_the_model_stays_usable(ranks: RankPool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = ranks.run(in_and_around_a_context, 2, Path(folder))
    for rank, (forward, backward, own, averaged) in enumerate(results):
        assert "does not support torch.distributed.autograd" in forward
        assert "parameter weight (number 0, bucket 0) got a gradient that is not in parameter.grad" in backward
        assert own == rank + 1
        assert averaged == [1.5, 1.5]
