"""The patch puts fastddp's names in the place of torch's, and nothing is left of it afterwards."""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fastddp
from fastddp import comm_hooks
from fastddp.torch_compat import surface
from on_ranks import on_ranks

NAMES = [
    (torch.nn.parallel, "DistributedDataParallel", fastddp.DistributedDataParallel),
    (torch.nn.parallel.distributed, "DistributedDataParallel", fastddp.DistributedDataParallel),
    (powerSGD_hook, "PowerSGDState", comm_hooks.PowerSGDState),
    (powerSGD_hook, "powerSGD_hook", comm_hooks.powerSGD_hook),
    (powerSGD_hook, "batched_powerSGD_hook", comm_hooks.batched_powerSGD_hook),
    (default_hooks, "fp16_compress_wrapper", comm_hooks.fp16_compress_wrapper),
    (default_hooks, "bf16_compress_wrapper", comm_hooks.bf16_compress_wrapper),
    (default_hooks, "fp16_compress_hook", default_hooks.fp16_compress_hook),
]


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that imported torch's class, under a name of its own, before anybody thought of fastddp."""
    module: Any = ModuleType("somebody_elses")
    module.DDP = TorchDDP
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_names_stand_for_fastddp_until_the_outer_patch_is_undone(other: Any) -> None:
    before = [getattr(module, name) for module, name, _ in NAMES]
    torchs = TorchDDP  # the name is this module's, and so is replaced as well
    patch = fastddp.patch()
    try:
        with fastddp.patch():
            assert other.DDP is fastddp.DistributedDataParallel
        assert [getattr(module, name) for module, name, _ in NAMES] == [ours for _, _, ours in NAMES]
        assert other.DDP is TorchDDP is fastddp.DistributedDataParallel
        assert surface.TorchDDP is torchs
    finally:
        patch.undo()
    assert [getattr(module, name) for module, name, _ in NAMES] == before
    assert other.DDP is TorchDDP is torchs
    patch.undo()


def test_after_a_block_nothing_is_left_but_what_somebody_else_put_there(other: Any) -> None:
    with contextlib.suppress(ZeroDivisionError), fastddp.patch():
        other.DDP = dict
        1 / 0
    assert other.DDP is dict
    assert torch.nn.parallel.DistributedDataParallel is TorchDDP


class OwnDDP(TorchDDP):
    """A class that somebody derived from torch's before the patch."""


class OwnFastDDP(fastddp.DistributedDataParallel):
    pass


@on_ranks(1)
def test_models_made_before_the_patch_are_instances_of_what_torchs_name_stands_for(rank: int) -> None:
    """Models of both classes and of subclasses of both are torch's; under a patch torch's are fastddp's too."""
    ours = fastddp.DistributedDataParallel
    models = [kind(nn.Linear(1, 1)) for kind in (TorchDDP, OwnDDP, ours, nn.Sequential)]

    def ask(of_fastddp: list[bool]) -> None:
        of_torch = [isinstance(model, torch.nn.parallel.DistributedDataParallel) for model in models]
        assert of_torch == [True, True, True, False]
        assert [isinstance(model, ours) for model in models] == of_fastddp
        assert not any(isinstance(model, OwnFastDDP) for model in models)

    ask([False, False, True, False])
    with fastddp.patch():
        with fastddp.patch():
            pass
        ask([True, True, True, False])
        assert issubclass(OwnDDP, torch.nn.parallel.DistributedDataParallel)
        assert not issubclass(nn.Linear, torch.nn.parallel.DistributedDataParallel)
        for model in (models[0], models[2]):  # whose checkpoints have no prefix
            assert list(get_model_state_dict(model)) == ["weight", "bias"]
    ask([False, False, True, False])
