"""Torch's functions that replicate a module in place: under the patch fastddp's does their work if it can."""

from __future__ import annotations

import importlib
import os
import runpy
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed._composable import replicate

import fastddp
from fastddp.in_place import torchs_replicate
from fastddp.in_place.replicated import Replicated, wrapper_of
from on_ranks import gradients, on_ranks
from ranks import RankPool

# ------------------------------------------------------------------------------------------------------------- scripts

MODEL = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

if not dist.is_initialized():
    dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_replicate",))
with torch.device("meta"):
    model = nn.Sequential(nn.Embedding(20, 8), *(nn.Linear(8, 8) for _ in range(2)), nn.LayerNorm(8), nn.Linear(8, 20))
"""

WITH_DDP = """
from torch.distributed._composable.replicate import replicate
replicate(model, device_mesh=mesh, bucket_cap_mb=100)
"""

WITH_FSDP = """
from torch.distributed.fsdp import FSDPModule
from torch.distributed._composable.replicate_with_fsdp import replicate
for layer in model[1:3]:
    replicate(layer, mesh=mesh)
replicate([model[3], model[4]], mesh=mesh)
replicate(model, mesh=mesh)
for module in model.modules():  # the loss is divided by all ranks' tokens
    if isinstance(module, FSDPModule):
        module.set_gradient_divide_factor(1.0)
"""

TRAINING = """
model.to_empty(device="cpu")
torch.manual_seed(3)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.normal_()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.Generator().manual_seed(dist.get_rank())
for step in range(3):
    optimizer.zero_grad()
    for part in range(2):
        model.set_requires_gradient_sync(part == 1)
        tokens = torch.randint(20, (2, 6), generator=data)
        (nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()) / 2).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=True)
    optimizer.step()
state = {key: getattr(value, "full_tensor", value.clone)() for key, value in model.state_dict().items()}
if dist.get_rank() == 0:
    torch.save([list(model.state_dict()), state], sys.argv[1])
dist.barrier()
"""


def trained_by_torch(rank: int, script: Path) -> None:
    with mock.patch.object(sys, "argv", [str(script), str(script.with_name("theirs.pt"))]):
        runpy.run_path(str(script), run_name="__main__")


def train_under_fastddp(script: Path) -> list[str]:
    """What each of two ranks says on stderr. They have the variables that torchrun sets."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    job = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-m", "fastddp", script.name, "ours.pt"]
    ranks = [
        subprocess.Popen(command, cwd=script.parent, env={**job, "RANK": rank}, stderr=subprocess.PIPE, text=True)
        for rank in ("0", "1")
    ]
    said = [process.communicate(timeout=100)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(said)
    return said


@pytest.mark.tier("slow", but_one_in=2)
@pytest.mark.parametrize("parallelize", [WITH_DDP, WITH_FSDP], ids=["ddp", "fsdp"])
def test_a_script_in_torchtitans_style_trains_bit_for_bit_as_without_fastddp(
    tmp_path: Path, ranks: RankPool, parallelize: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(MODEL + parallelize + TRAINING)
    ranks.run(trained_by_torch, 2, script)
    said = train_under_fastddp(script)
    (our_keys, our_state), (keys, state) = (torch.load(tmp_path / f"{name}.pt") for name in ("ours", "theirs"))
    assert our_keys == keys == list(state)
    assert [key for key in keys if not torch.equal(our_state[key], state[key])] == []
    assert "fastddp: version " in said[0]
    assert "in place of torch's DDP: 2 ranks over gloo, 9 gradients (0.0 MiB) in 1 bucket, " in said[0]


# --------------------------------------------------------------------------------------------------------------- names


NAMES = """
import sys, torch
{first}
import fastddp
patch = fastddp.patch()
loaded = {{"torch.distributed._composable", "torch.distributed.fsdp"}} & set(sys.modules)
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable import replicate_with_fsdp
from fastddp.in_place import torchs_replicate
with fastddp.patch():
    pass
ours, ours_too = torchs_replicate.of_ddp()[1], torchs_replicate.of_fsdp()[1]
names = lambda: [sys.modules["torch.distributed._composable" + name].replicate for name in ["", ".replicate"]]
assert names() == [ours, ours] and (replicate, replicate_with_fsdp.replicate) == (ours, ours_too)
assert ours.state(torch.nn.Linear(1, 1)) is ours_too.state(torch.nn.Linear(1, 1)) is None
patch.undo()
assert names() == [ours.__wrapped__] * 2 and replicate_with_fsdp.replicate is ours_too.__wrapped__
print(len(loaded))
"""


@pytest.mark.tier("slow", but_one_in=2)
@pytest.mark.parametrize("first", ["", "import torch.distributed._composable.replicate_with_fsdp"])
def test_names_stand_for_fastddps_until_the_patch_is_undone(first: str) -> None:
    ended = subprocess.run([sys.executable, "-c", NAMES.format(first=first)], stdout=subprocess.PIPE, check=True)
    assert int(ended.stdout) == (2 if first else 0)


# ------------------------------------------------------------------------------------------------------------ modules


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros(()))

    def loss(self, rank: int) -> torch.Tensor:
        self.calls += rank
        return sum(layer(torch.ones(1, 2)).sum() for layer in (self.first, self.second)) * (rank + 1)


def means(model: Any, rank: int) -> list[float]:
    """Of each gradient, where the loss came by a method: 1.5 if it was averaged, rank + 1 if not."""
    model.zero_grad()
    model.loss(rank).backward()
    return [gradient.mean().item() for gradient in gradients(model)]


def fsdps() -> Any:
    with fastddp.patch():
        return importlib.import_module("torch.distributed._composable.replicate_with_fsdp").replicate


@on_ranks(2)
def test_gradients_of_a_method_are_averaged_but_for_ignored_modules(rank: int) -> None:
    with fastddp.patch():
        whole = replicate(Net(), device_id=torch.device("cpu"))
        part = Net()
        assert replicate(part, [part.second], bucket_cap_mb=1) is part
        with pytest.raises(RuntimeError, match=r"device_id must be an int or a torch\.device, got 'cpu'"):
            replicate(Net(), device_id="cpu")
    for _ in range(2):
        assert means(whole, rank) == [1.5] * 4
        assert means(part, rank) == [1.5, 1.5, rank + 1, rank + 1]
    assert whole.calls.item() == 2 * rank


@on_ranks(2)
def test_blocks_are_absorbed_by_what_is_around_them(rank: int) -> None:
    model = Net()
    assert fsdps()(model.first, ignored_params={model.first.bias}) is model.first
    assert fsdps()(blocks := [model.second, nn.Tanh()]) is blocks
    assert fsdps()(model) is model
    assert [isinstance(part, Replicated) for part in model.modules()] == [True, False, False]
    assert means(model, rank) == [1.5, rank + 1, 1.5, 1.5]
    adds_up = Net()
    fsdps()(adds_up.first).set_gradient_divide_factor(1)
    for again in (model, adds_up):
        with pytest.raises(ValueError, match="is replicated in place already"):
            fsdps()(again)
    assert means(adds_up, rank) == [3.0, 3.0, rank + 1, rank + 1]


@on_ranks(2)
def test_blocks_alone_have_an_engine_each(rank: int) -> None:
    model = Net()
    fsdps()(model.first)
    assert means(model, rank) == [1.5, 1.5, rank + 1, rank + 1]
    fsdps()([model.second])
    assert means(model, rank) == [1.5] * 4
    assert wrapper_of(model.first).engine is not wrapper_of(model.second).engine


@on_ranks(2)
def test_the_state_averages_what_microbatches_have_added_up_as_a_pipeline_asks_for(rank: int) -> None:
    model = fsdps()(nn.Linear(1, 1))
    model.set_requires_gradient_sync(False)
    model(torch.tensor([rank + 1.0])).backward()
    model.set_requires_gradient_sync(True)
    state = fsdps().state(model)
    state._root_post_backward_final_callback()
    assert model.weight.grad.item() == 1.5
    with pytest.raises(NotImplementedError, match=r"has no _fsdp_param_groups\."):
        model.set_all_reduce_hook(print)
    with pytest.raises(NotImplementedError, match="got a factor of 1"):
        model.set_gradient_divide_factor(1)


@on_ranks(1)
def test_what_fastddp_does_not_do_stays_torchs_and_one_warning_says_why(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

    def why(module: nn.Module, **options: Any) -> str:
        torchs_replicate._warned_of.clear()
        with warnings.catch_warnings(record=True) as raised:
            fsdps()(module, **options)
            fsdps()(Net(), mp_policy=in_bf16)
        assert isinstance(module, FSDPModule)
        assert not isinstance(module, Replicated)
        (reason,) = (str(one.message) for one in raised if "stays torch's" in str(one.message))
        return reason.partition("stays torch's: ")[2]

    in_bf16 = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    around, ignoring = Net(), Net()
    assert why(Net(), mp_policy=in_bf16) == "its mp_policy has dtypes."
    assert why(Net(), offload_policy=CPUOffloadPolicy(pin_memory=False)) == "its offload_policy moves parameters."
    fully_shard(around.first, mesh=mesh)
    assert why(around, mesh=mesh) == "its parameters are DTensors."
    fsdps()(ignoring.first, ignored_params={ignoring.first.bias})
    assert why(ignoring, mp_policy=in_bf16) == "its mp_policy has dtypes."
    assert (type(ignoring.first), type(ignoring.first.bias)) == (nn.Linear, nn.Parameter)
    with fastddp.patch():
        fully_shard((sharded := Net()).first, mesh=mesh)
        assert type(replicate(sharded)).__name__ == "DDPNet"
