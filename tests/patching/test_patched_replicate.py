"""Torch's functions that replicate a module in place: under the patch fastddp's does their work if it can."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate, replicate_with_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

import fastddp
from fastddp.in_place import torchs_replicate
from fastddp.in_place.replicated import Replicated
from on_ranks import differences, gradients, on_ranks


def with_ddp(model: Any, mesh: Any) -> None:
    replicate(model, device_mesh=mesh, bucket_cap_mb=100)


def with_fsdp(model: Any, mesh: Any) -> None:
    for part in (model[1], model[2], [model[3], model[4]], model):
        replicate_with_fsdp.replicate(part, mesh=mesh)
    for module in model.modules():  # the loss is divided by all ranks' tokens
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)


def trained(parallelize: Callable[[Any, Any], None]) -> list[Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_replicate",))
    with torch.device("meta"):
        layers = [nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 20)]
        model: Any = nn.Sequential(nn.Embedding(20, 8), *layers)
    parallelize(model, mesh)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(dist.get_rank())
    for number in range(6):
        model.set_requires_gradient_sync(number % 2 == 1)
        tokens = torch.randint(20, (12,), generator=data)
        nn.functional.cross_entropy(model(tokens), tokens).backward()
        if number % 2 == 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    state = {key: getattr(value, "full_tensor", value.clone)() for key, value in model.state_dict().items()}
    return [isinstance(model, Replicated), state]


@pytest.mark.parametrize("parallelize", [with_ddp, with_fsdp])
@on_ranks(2)
def test_training_is_bit_for_bit_as_without_fastddp(rank: int, parallelize: Any) -> None:
    is_replicated, expected = trained(parallelize)
    with fastddp.patch():
        assert differences([not is_replicated, expected], trained(parallelize)) == []


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


@pytest.mark.tier("slow")
@pytest.mark.parametrize("first", ["", "import torch.distributed._composable.replicate_with_fsdp"])
def test_names_stand_for_fastddps_until_the_patch_is_undone(first: str, tmp_path: Path) -> None:
    code = NAMES.format(first=first)
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, check=True)
    assert int(ended.stdout) == (2 if first else 0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, rank: int, *names: str) -> torch.Tensor:
        self.calls += rank
        return sum(getattr(self, name)(torch.ones(1, 2)).sum() for name in names) * (rank + 1)


def means(model: Any, rank: int, *names: str) -> list[Any]:
    """Of each gradient, where the loss came by a method: 1.5 if it was averaged, rank + 1 if not."""
    model.zero_grad()
    model.forward(rank, *(names or ("first", "second"))).backward()
    return [None if gradient is None else gradient.mean().item() for gradient in gradients(model)]


def fsdps() -> Any:
    with fastddp.patch():
        return replicate_with_fsdp.replicate


@on_ranks(2)
def test_gradients_of_a_method_are_averaged_but_for_ignored_modules(rank: int) -> None:
    part, whole = Net(), Net()
    with fastddp.patch():
        replicate(whole, device_id="cpu")
        assert replicate(part, [part.second], bucket_cap_mb=1) is part
    for _ in range(2):
        assert means(whole, rank) == [1.5] * 4
        assert means(part, rank) == [1.5, 1.5, rank + 1, rank + 1]
    whole(rank, "first")
    assert whole.calls.item() == 3 * rank


@on_ranks(2)
def test_blocks_are_absorbed_by_what_is_around_them(rank: int) -> None:
    model = Net()
    fsdps()(model.first, ignored_params={model.first.bias})
    assert fsdps()(blocks := [model.second, nn.Tanh()]) is blocks
    fsdps()(model)
    assert means(model, rank) == [1.5, rank + 1, 1.5, 1.5]
    with pytest.raises(ValueError, match="replicated in place already"):
        fsdps()(model)


@on_ranks(2)
def test_blocks_alone_have_the_methods_of_fsdp2_that_are_not_for_shards(rank: int) -> None:
    model = Net()
    (block := fsdps()(model.first)).set_gradient_divide_factor(1)
    with pytest.raises(NotImplementedError, match="told how to divide"):
        fsdps()(model)
    block.reshard()
    block.set_requires_gradient_sync(False)
    assert means(model, rank) == [rank + 1] * 4
    block.set_requires_gradient_sync(True)
    fsdps()([model.second])
    assert means(model, rank) == [3.0, 3.0, 1.5, 1.5]
    with pytest.raises(NotImplementedError, match="for what it shards or moves"):
        block.set_all_reduce_hook(print)
    with pytest.raises(NotImplementedError, match="got a factor of 2"):
        block.set_gradient_divide_factor(2)


@on_ranks(2)
def test_blocks_that_no_backward_reaches_are_left_alone(rank: int) -> None:
    model = fsdps()(Net())
    assert means(model, rank, "first") == [1.5, 1.5, None, None]
    assert means(model, rank, ("first", "second")[rank]) == [0.5, 0.5, 1.0, 1.0]


@on_ranks(1)
def test_what_fastddp_does_not_do_stays_torchs_and_one_warning_says_why(rank: int) -> None:
    def why(module: nn.Module, **options: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as raised:
            warnings.simplefilter("always")
            fsdps()(module, **options)
        assert (isinstance(module, FSDPModule), isinstance(module, Replicated)) == (True, False)
        return [
            str(one.message).partition("stays torch's: ")[2] for one in raised if "stays torch's" in str(one.message)
        ]

    torchs_replicate._warn_once.cache_clear()
    in_bf16 = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    mesh, around, ignoring, sharded = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), Net(), Net(), Net()
    assert why(Net(), mp_policy=in_bf16) == ["its mp_policy has dtypes."]
    assert why(Net(), offload_policy=CPUOffloadPolicy(pin_memory=False)) == ["its offload_policy moves parameters."]
    fully_shard(around.first, mesh=mesh)
    assert why(around, mesh=mesh) == ["its parameters are DTensors."]
    fsdps()(ignoring.first, ignored_params={ignoring.first.bias})
    assert why(ignoring, mp_policy=in_bf16) == []
    assert (type(ignoring.first), type(ignoring.first.bias)) == (nn.Linear, nn.Parameter)
    with fastddp.patch():
        fully_shard(sharded.first, mesh=mesh)
        assert type(replicate(sharded)).__name__ == "DDPNet"
