"""What may be changed between two windows may be changed after a forward, and after a backward that raised, too."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastddp
from fastddp import comm_hooks
from models import Expected
from on_ranks import gradients, on_ranks
from parts import Parts


def after_a_forward(model: Any, rank: int) -> None:
    model(torch.tensor(7.0))


def after_a_backward_that_raised(model: Any, rank: int, raising: tuple[int, ...] = (0, 1)) -> None:
    with contextlib.suppress(Expected, RuntimeError):  # of the other rank: that one has failed
        model(torch.tensor(7.0), fails=rank in raising).backward()
        raise AssertionError("backward did not raise")
    model.zero_grad()


def after_one_that_raised_on_a_rank(model: Any, rank: int) -> None:
    after_a_backward_that_raised(model, rank, raising=(0,))


def another_hook(model: Any) -> None:
    model.register_comm_hook(None, comm_hooks.fp16_compress_hook)


def a_sharded_optimizer(model: Any) -> Any:
    return fastddp.ShardedOptimizer(model, torch.optim.SGD, lr=1.0)


def a_step_that_is_discarded(model: Any) -> None:
    model.discard_step()


@pytest.mark.parametrize("change", [another_hook, a_sharded_optimizer, a_step_that_is_discarded])
@pytest.mark.parametrize("moment", [after_a_forward, after_a_backward_that_raised, after_one_that_raised_on_a_rank])
@on_ranks(2)
def test_training_goes_on(rank: int, moment: Callable[..., None], change: Callable[[Any], Any]) -> None:
    warnings.simplefilter("ignore")
    model = fastddp.DistributedDataParallel(Parts("ab", sizes=(3, 4)), bucket_cap_mb=0)
    model(torch.tensor(1.0)).backward()
    model.zero_grad()
    moment(model, rank)
    changed = change(model)
    for _ in range(2):
        model.zero_grad()
        model(torch.tensor(rank + 1.0)).backward()
    if changed is None:
        assert [gradient.tolist() for gradient in gradients(model)] == [[1.5] * 3, [1.5] * 4]
    else:
        changed.step()
        assert [parameter.tolist() for parameter in model.parameters()] == [[-0.5] * 3, [-0.5] * 4]
