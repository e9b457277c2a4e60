"""Checkpoints of a ShardedOptimizer: training goes on as if it had not stopped, on any number of ranks.

All ranks have the same inputs, and there are 1, 2 or 4 of them: averages of equal numbers have the same bits then.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import AdamW, Optimizer

import fastddp
from fastddp.sharding.sharded_state import ShardedState
from on_ranks import differences, on_ranks
from ranks import RankPool

Made = tuple[nn.Module, Any]
FULL = StateDictOptions(full_state_dict=True)


class Net(nn.Module):
    """On 4 ranks its parts begin and end within rows, and the last rank has none. The convolution is channels_last."""

    def __init__(self, outputs: int = 41) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3).to(memory_format=torch.channels_last)
        self.second = nn.Linear(32, 65)
        self.third = nn.Linear(65, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x).mean((2, 3))).tanh())


def groups(module: nn.Module) -> list[dict[str, Any]]:
    """Biases are in a group of their own, so that parameters are in another order than in the model."""
    parameters = dict(module.named_parameters())
    biases = [parameter for name, parameter in parameters.items() if name.endswith("bias")]
    weights = [parameter for name, parameter in parameters.items() if not name.endswith("bias")]
    return [{"params": biases, "weight_decay": 0.0}, {"params": weights, "lr": 0.03}]


def made(
    seed: int,
    *,
    kind: type[Optimizer] = AdamW,
    dtype: torch.dtype = torch.float32,
    net: Callable[[], nn.Module] = Net,
    plain: bool = False,
    **settings: Any,
) -> Made:
    """A new model and its optimizer, sharded unless it is to be ``plain``."""
    torch.manual_seed(seed)
    module = net().to(dtype)
    if plain:
        return module, kind(groups(module), lr=0.01, **settings)
    model = fastddp.DistributedDataParallel(module, bucket_cap_mb=0.016)
    return model, fastddp.ShardedOptimizer(model, kind, groups(module), lr=0.01, **settings)


def train(of: Made, first: int, last: int) -> None:
    """These steps; each has its own inputs."""
    model, optimizer = of
    for number in range(first, last):
        optimizer.zero_grad()
        x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(number))
        model(x.to(next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()


def values(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters."""
    return {name.removeprefix("module."): parameter.detach().clone() for name, parameter in model.named_parameters()}


def states(of: Made, **options: Any) -> dict[str, Any]:
    """As torch.distributed.checkpoint takes them."""
    return dict(zip(("model", "optimizer"), get_state_dict(*of, options=StateDictOptions(**options)), strict=True))


def set_states(of: Made, found: dict[str, Any], **options: Any) -> None:
    """Give them back."""
    options = {"options": StateDictOptions(**options)}
    set_state_dict(*of, model_state_dict=found["model"], optim_state_dict=found["optimizer"], **options)


def save(rank: int, folder: Path, how: dict[str, Any]) -> None:
    """Save after 3 steps in all ways, and what 3 more steps make of the parameters."""
    of = model, optimizer = made(0, **how)
    train(of, 0, 3)
    torch.save(optimizer.state_dict(), folder / f"part{rank}")
    whole, of_rank0 = optimizer.full_state_dict(), optimizer.full_state_dict(rank0_only=True)
    assert differences(whole if rank == 0 else {}, of_rank0) == []
    if rank == 0:
        torch.save(whole, folder / "whole")
        torch.save({name: value for name, value in values(model).items()}, folder / "model")
    dcp.save(states(of), checkpoint_id=folder / "dcp")
    train(of, 3, 6)
    if rank == 0:
        torch.save(values(model), folder / "expected")


def load_model(model: nn.Module, folder: Path) -> None:
    """From torch's file."""
    getattr(model, "module", model).load_state_dict(torch.load(folder / "model"))


def load_whole(rank: int, of: Made, folder: Path) -> None:
    load_model(of[0], folder)
    of[1].load_state_dict(torch.load(folder / "whole"))


def load_part(rank: int, of: Made, folder: Path) -> None:
    load_model(of[0], folder)
    of[1].load_state_dict(torch.load(folder / f"part{rank}", weights_only=True))


def load_dcp(rank: int, of: Made, folder: Path, **options: Any) -> None:
    found = states(of, **options)
    dcp.load(found, checkpoint_id=folder / "dcp")
    set_states(of, found, **options)


def resume(rank: int, folder: Path, load: Callable[..., None], steps_before: int, how: dict[str, Any]) -> None:
    """Load into another model, which has made some steps or none, and train on."""
    of = made(1, **how)
    train(of, 10, 10 + steps_before)
    load(rank, of, folder)
    train(of, 3, 6)
    differing = differences(torch.load(folder / "expected"), values(of[0]))
    assert differing == [], "\n".join(differing)


SLOW = pytest.mark.tier("slow")
flat = functools.partial(load_dcp, flatten_optimizer_state_dict=True)
WAYS = {"whole": load_whole, "part": load_part, "dcp": load_dcp}


@pytest.mark.parametrize(
    ("how", "sizes", "plain"),
    [
        ({}, {"whole": (4, 2, 1), "part": (4,), "dcp": (4, 2, 1)}, True),
        ({"dtype": torch.bfloat16}, {"whole": (2,), "part": (4,), "dcp": (2,)}, False),
        pytest.param({"kind": torch.optim.SGD}, {"whole": (2,), "part": (4,), "dcp": (2,)}, True, marks=SLOW),
        pytest.param(
            {"kind": torch.optim.SGD, "dtype": torch.bfloat16}, {"part": (4,), "dcp": (2,)}, False, marks=SLOW
        ),
        pytest.param(
            {"kind": torch.optim.SGD, "momentum": 0.9}, {"whole": (2,), "part": (4,), "dcp": (2,)}, True, marks=SLOW
        ),
        pytest.param({"kind": torch.optim.Adagrad}, {"whole": (2,), "part": (4,), "dcp": (2,)}, True, marks=SLOW),
        pytest.param({"shard": "parameters"}, {"whole": (2, 1), "part": (4,), "dcp": (4, 2, 1)}, False, marks=SLOW),
    ],
)
def test_training_goes_on_bit_for_bit(
    ranks: RankPool, tmp_path: Path, how: dict[str, Any], sizes: dict[str, tuple[int, ...]], plain: bool
) -> None:
    ranks.run(save, 4, tmp_path, how)
    for way, numbers in sizes.items():
        for size in numbers:
            for steps_before in (0, 1, 3):  # before the first forward, before the second one plans buckets, and later
                ranks.run(resume, size, tmp_path, WAYS[way], steps_before, how)
    if plain:
        ranks.run(resume, 1, tmp_path, load_whole, 0, {**how, "plain": True})
        ranks.run(resume, 1, tmp_path, load_dcp, 0, {**how, "plain": True})
