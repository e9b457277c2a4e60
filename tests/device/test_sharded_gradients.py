"""The norm, clipping and torch's scaler with sharded gradients: the host does not wait for a device."""

from __future__ import annotations

from typing import Any

import torch

import fake_cuda
import fastddp
from on_device import DEVICE, ORDERS, Case, batch
from on_ranks import on_ranks


@ORDERS
@on_ranks(2, "simulated_ranks")
def test_norm_clipping_and_unscaling_need_no_wait_of_the_host(rank: int, order: str) -> None:
    found = []
    for sharded in (False, True):
        fake_cuda.schedule(order, 1)
        case = Case()
        model = case.wrapped(rank, DEVICE)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if sharded:
            optimizer = fastddp.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0)
        for step in range(4):
            model.zero_grad()
            case.backward(model, scaler.scale(batch(rank, step).to(DEVICE)))
            with fake_cuda.without_waits():
                scaler.unscale_(optimizer)
                found += [fastddp.clip_grad_norm_(model, 1.0), model.found_inf()]
            scaler.step(optimizer)
            scaler.update()
        found += [*model.parameters()]
    found = [tensor.detach().cpu() for tensor in found]
    half = len(found) // 2
    torch.testing.assert_close(found[half:], found[:half])
