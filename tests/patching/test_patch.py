"""Scripts that know nothing of fastddp run under it, and nothing is left of it afterwards."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fastddp
from fastddp import __main__ as command
from fastddp import comm_hooks, wrapper
from ranks import RankPool

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
        assert wrapper.TorchDDP is torchs
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


def instances(rank: int) -> None:
    """Models of both classes and of subclasses of both are torch's; under a patch torch's are fastddp's too."""
    ours = fastddp.DistributedDataParallel
    models = [kind(torch.nn.Linear(1, 1)) for kind in (TorchDDP, OwnDDP, ours, torch.nn.Sequential)]

    def ask(of_fastddp: list[bool]) -> None:
        all_but_the_last = [True, True, True, False]
        assert [isinstance(m, torch.nn.parallel.DistributedDataParallel) for m in models] == all_but_the_last
        assert [isinstance(m, ours) for m in models] == of_fastddp
        assert not any(isinstance(m, OwnFastDDP) for m in models)

    ask([False, False, True, False])
    with fastddp.patch():
        with fastddp.patch():
            pass
        ask([True, True, True, False])
        assert issubclass(OwnDDP, torch.nn.parallel.DistributedDataParallel)
        assert not issubclass(torch.nn.Linear, torch.nn.parallel.DistributedDataParallel)
    ask([False, False, True, False])


def test_models_made_before_the_patch_are_instances_of_what_torchs_name_stands_for(ranks: RankPool) -> None:
    ranks.run(instances, 1)


def keys_of_a_checkpoint(rank: int) -> list[list[str]]:
    before = [TorchDDP(torch.nn.Linear(1, 1)), fastddp.DistributedDataParallel(torch.nn.Linear(1, 1))]
    with fastddp.patch():
        return [list(get_model_state_dict(model)) for model in before]


def test_checkpoints_of_models_made_before_the_patch_have_no_prefix(ranks: RankPool) -> None:
    assert ranks.run(keys_of_a_checkpoint, 1) == [[["weight", "bias"]] * 2]


# ------------------------------------------------------------------------------------------------------- the command

SCRIPT = """
import json, sys
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP
import beside

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(torch.nn.Linear(40, 40))
model.register_comm_hook(PowerSGDState(None, 1, start_powerSGD_iter=2), powerSGD_hook)
for step in range(4):
    model.zero_grad()
    model(torch.full((2, 40), dist.get_rank() + 1.0)).sum().backward()
found = {"class": type(model).__module__, "gradient": model.module.bias.grad[0].item(), "argv": sys.argv[1:],
         "name": __name__, "beside": beside.VALUE}
if dist.get_rank() == 0:
    print(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
"""
FOUND = '{"class": "fastddp.ddp", "gradient": 2.0, "argv": ["--lr", "3", "-m"], "name": "__main__", "beside": 7}'


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("as_module", [False, True], ids=["script", "module"])
def test_torchrun_runs_a_script_that_knows_nothing_of_fastddp(tmp_path: Path, as_module: bool) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    target = ["-m", "train"] if as_module else ["train.py"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = subprocess.run(
        [*torchrun, "-m", "fastddp", *target, "--lr", "3", "-m"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == FOUND


def test_a_script_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        command.main(["trian.py", "--lr", "3"])
    assert ended.value.code == 2
    assert f"there is no script 'trian.py' in {tmp_path} (a module is run with -m)" in capsys.readouterr().err
    assert torch.nn.parallel.DistributedDataParallel is TorchDDP
