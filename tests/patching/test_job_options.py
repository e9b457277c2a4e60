"""Options without code: what ``-m fastddp`` and ``fastddp.patch`` say about wrappers whose script does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import fastddp
from fastddp import __main__ as command
from fastddp.torch_compat import job_options
from fastddp.watch import presence
from on_ranks import on_ranks


@pytest.mark.parametrize(
    ("options", "given", "added"),
    [
        ({}, {}, {}),
        ({"hierarchy": "node", "main_grads": "grad"}, {}, {"hierarchy": "node", "main_grads": "grad"}),
        ({"gradient_average": "sum"}, {"gradient_average": "mean"}, {}),
        ({"buckets": "auto"}, {}, {"bucket_cap_mb": "auto"}),
        ({"buckets": "plan.json"}, {}, {"buckets": "plan.json"}),
        ({"buckets": "auto"}, {"bucket_cap_mb": 25}, {}),
        ({"on_stall": None, "patience": 3.0}, {}, {"watch": fastddp.Watch(stall=None, patience=3.0)}),
        ({"audit_every": 7}, {}, {"watch": fastddp.Watch(audit_every=7)}),
        ({"on_corruption": "raise"}, {"watch": fastddp.Watch()}, {}),
    ],
    ids=str,
)
def test_options_stand_for_arguments_that_a_script_leaves_out(options: Any, given: Any, added: Any) -> None:
    job_options.check_options(options)
    assert job_options.constructor_arguments(options, given) == added


@pytest.mark.parametrize(
    ("option", "value", "what"),
    [
        ("hook", "int9", "no hook 'int9'. Did you mean 'int8'\\? There are fp16, bf16"),
        ("hook", "powersgd33", "no hook 'powersgd33'"),
        ("hoook", "int8", "no option 'hoook'. Did you mean 'hook'\\? There are hook, buckets"),
        ("on_stall", "rise", "'rise'"),
        ("gradient_average", "median", "'median'"),
        ("hierarchy", "rack", "'rack'"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_patched(option: str, value: str, what: str) -> None:
    with pytest.raises(TypeError if option == "hoook" else ValueError, match=what):
        fastddp.patch(**{option: value})
    assert not job_options.in_force
    assert torch.nn.parallel.DistributedDataParallel is not fastddp.DistributedDataParallel


@on_ranks(2)
def test_a_wrapper_gets_the_options_and_the_scripts_own_hook_wins(rank: int) -> None:
    with fastddp.patch(gradient_average="sum"), fastddp.patch(hook="bf16"):
        model = torch.nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        model.register_comm_hook(None, default_hooks.allreduce_hook)
        with pytest.raises(RuntimeError, match="already registered"):
            model.register_comm_hook(None, default_hooks.allreduce_hook)
    model(torch.ones(1, 2)).sum().backward()
    assert model.module.bias.grad.tolist() == [2.0, 2.0]
    assert not job_options.in_force


@on_ranks(2)
def test_each_wrapper_gets_a_state_of_its_own(rank: int) -> None:
    with fastddp.patch(hook="powersgd2"):
        models = [fastddp.DistributedDataParallel(nn.Linear(2, 2)) for _ in range(2)]
    states: list[Any] = [model._comm_hooks[0][1] for model in models]
    assert [state.matrix_approximation_rank for state in states] == [2, 2]
    assert states[0] is not states[1]


@on_ranks(2)
def test_what_does_not_go_together_is_refused_by_the_constructor(rank: int) -> None:
    with fastddp.patch(hook="int8", buckets="auto"), pytest.raises(ValueError, match='bucket_cap_mb="auto"'):
        fastddp.DistributedDataParallel(nn.Linear(2, 2))


@on_ranks(2)
def test_rank_0_says_once_that_fastddp_is_there(rank: int) -> None:
    presence._pids.clear()
    with fastddp.patch(hook="int8", audit_every=2), pytest.MonkeyPatch.context() as patched:
        said: list[str] = []
        patched.setattr(presence, "_say", said.append)
        patched.setenv("LOCAL_WORLD_SIZE", "1")
        for _ in range(2):
            fastddp.DistributedDataParallel(nn.Linear(2, 2))
    if rank == 1:
        assert not said
        return
    (line,) = said
    parts = [fastddp.__version__, "2 ranks on 2 nodes over gloo", "2 gradients", "1 bucket", "int8_compress_hook"]
    assert all(part in line for part in [*parts, "stalls and corruption and replicas"])


def test_options_of_the_command_are_those_of_patch() -> None:
    of_command = {name.strip("-").replace("-", "_") for name in command._OPTIONS}
    assert of_command == set(job_options.JobOptions.__annotations__)


SPAWNING = """
import json, os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP

def train(rank, port):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(8, 8))
    if rank == 0:
        data = model._get_ddp_logging_data()
        print(json.dumps([type(model).__module__, data["comm_hook"]]))
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__" and len(sys.argv) > 1:
    from torch.distributed import TCPStore
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = str(store.port)
    del store
    mp.start_processes(train, (port,), nprocs=2, start_method=sys.argv[1])
"""


def ran(folder: Path, *arguments: str) -> tuple[str, str]:
    (folder / "train.py").write_text(SPAWNING)
    ended = subprocess.run(
        [sys.executable, "-m", "fastddp", *arguments], cwd=folder, capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, ended.stderr


@pytest.mark.tier("slow")
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_processes_that_a_script_starts_get_the_options_too(tmp_path: Path, method: str) -> None:
    said, errors = ran(tmp_path, "--hook", "int8", "--on-stall=off", "train.py", method)
    assert json.loads(said) == ["fastddp.ddp", "int8_compress_hook"]
    assert "watching for nothing" in errors
    assert "without a DistributedDataParallel" not in errors


@pytest.mark.tier("slow")
def test_a_script_that_makes_no_wrapper_is_told_so(tmp_path: Path) -> None:
    assert "without a DistributedDataParallel" in ran(tmp_path, "train.py")[1]
