"""What users of torch's DDP complain about in its tracker, and what happens here; numbers are those of pytorch/pytorch.

Complaints whose behaviour another file tests are there, with the number in the test's name.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fastddp
from hooks_by_name import register
from on_ranks import Wrap, on_ranks, same_under_both
from parts import Parts


@same_under_both()
def test_errors_carry_the_words_that_people_search_logs_for_43259_22049_68803(wrap: Wrap, rank: int) -> Any:
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match="Cannot specify both process_group and device_mesh arguments"):
        wrap(Parts("ab"), process_group=dist.group.WORLD, device_mesh=DeviceMesh("cpu", [0, 1]))
    model = wrap(Parts("ab"))
    model(x).backward()
    with pytest.raises(RuntimeError, match="should be called before training loop starts"):
        model._set_static_graph()
    model = wrap(Parts("ab"))
    model(x, "a").backward()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration") as raised:
        model(x)
    assert f"Parameter indices which did not receive grad for rank {rank}: 1" in str(raised.value)
    model = wrap(Parts("ab"), static_graph=True)
    for _ in range(2):
        model(x, "a").backward()
    with pytest.raises(RuntimeError, match="training graph has changed in this iteration"):
        model(x).backward()


# ------------------------------------------------------------------------------------- what a step does not cost here


def operators_of_a_backward(model: nn.Module, set_to_none: bool) -> set[str]:
    for _ in range(3):
        model.zero_grad(set_to_none=set_to_none)
        loss = model(torch.ones(4, 8)).sum()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            loss.backward()
    return {event.name for event in profile.events() if event.name.startswith("aten::")}


@pytest.mark.parametrize("hook", ["none", "fp16"])
@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(2)
def test_no_operator_divides_gradients_81383(rank: int, set_to_none: bool, hook: str) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    alone = operators_of_a_backward(module, set_to_none)
    ours, torchs = fastddp.DistributedDataParallel(copy.deepcopy(module)), TorchDDP(module)
    register(ours, hook)
    dividing = {"aten::mul", "aten::mul_", "aten::div", "aten::div_"} - alone
    assert operators_of_a_backward(ours, set_to_none) & dividing == set()
    assert operators_of_a_backward(torchs, set_to_none) & dividing != set()
