"""Checkpoints of a ShardedOptimizer: training goes on as if it had not stopped, on any number of ranks.

All ranks have the same inputs, and there are 1, 2 or 4 of them: averages of equal numbers have the same bits then.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import SGD, AdamW, Muon, Optimizer

import fastddp
from fastddp.sharding.sharded_state import ShardedState
from on_ranks import differences, of_ranks, on_ranks
from ranks import RankPool

Made = tuple[nn.Module, Any]


class Net(nn.Module):
    """On 4 ranks its parts begin and end within rows, and the last rank has none. The convolution is channels_last."""

    def __init__(self, outputs: int = 41) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3).to(memory_format=torch.channels_last)
        self.second = nn.Linear(32, 65)
        self.third = nn.Linear(65, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x).mean((2, 3))).tanh())


def groups(module: nn.Module, of_others: dict[str, Any]) -> list[dict[str, Any]]:
    """Others than matrices come first, so that parameters are in another order than in the model."""
    others, matrices = ([one for one in module.parameters() if (one.ndim == 2) is way] for way in (False, True))
    return [{"params": others, "weight_decay": 0.0, **of_others}, {"params": matrices, "lr": 0.03}]


def made(
    seed: int,
    *,
    kind: Callable[..., Optimizer] = AdamW,
    dtype: torch.dtype = torch.float32,
    net: Callable[[], nn.Module] = Net,
    plain: bool = False,
    of_others: dict[str, Any] | None = None,
    **settings: Any,
) -> Made:
    """A new model and its optimizer, sharded unless it is to be ``plain``."""
    torch.manual_seed(seed)
    module = net().to(dtype)
    if plain:
        return module, kind(groups(module, {}), lr=0.01, **settings)
    model = fastddp.DistributedDataParallel(module, bucket_cap_mb=0.016)
    return model, fastddp.ShardedOptimizer(model, kind, groups(module, of_others or {}), lr=0.01, **settings)


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
        torch.save(values(model), folder / "model")
    dcp.save(states(of), checkpoint_id=folder / "dcp")
    train(of, 3, 6)
    if rank == 0:
        torch.save(values(model), folder / "expected")


def load_dcp(of: Made, folder: Path, **options: Any) -> None:
    found = states(of, **options)
    dcp.load(found, checkpoint_id=folder / "dcp")
    set_states(of, found, **options)


def load(rank: int, of: Made, folder: Path, way: str) -> None:
    if way == "dcp":
        return load_dcp(of, folder)
    model, optimizer = of
    getattr(model, "module", model).load_state_dict(torch.load(folder / "model"))
    return optimizer.load_state_dict(torch.load(folder / (f"part{rank}" if way == "part" else "whole")))


def resume(rank: int, folder: Path, way: str, steps_before: int, how: dict[str, Any]) -> None:
    """Load into another model, which has made some steps or none, and train on."""
    of = made(1, **how)
    train(of, 10, 10 + steps_before)
    load(rank, of, folder, way)
    train(of, 3, 6)
    differing = differences(torch.load(folder / "expected"), values(of[0]))
    assert differing == [], "\n".join(differing)


SOME = {"whole": (2,), "part": (4,), "dcp": (2,)}
OF_ADAMW = {"optimizer_class": AdamW, "lr": 0.01}
MUON = {"kind": Muon, "shard": "parameters", "of_others": OF_ADAMW}
COPIES_ALONE = {"dtype": torch.bfloat16, "of_others": {"optimizer_class": partial(SGD, lr=0.01)}}


def slow(*row: Any) -> Any:
    return pytest.param(*row, marks=pytest.mark.tier("slow"))


@pytest.mark.parametrize(
    ("how", "sizes", "plain"),
    [
        ({}, {"whole": (2,), "part": (4,), "dcp": (2, 1)}, True),
        (COPIES_ALONE, SOME, False),
        slow(MUON, SOME, False),
        slow({}, {"whole": (4, 1), "dcp": (4,)}, False),
        slow({"shard": "parameters"}, {"whole": (1,), "dcp": (4, 1)}, False),
        slow({"kind": SGD}, SOME, True),
        slow({"kind": SGD, "dtype": torch.bfloat16}, {"part": (4,), "dcp": (2,)}, False),
        slow({"kind": SGD, "momentum": 0.9}, SOME, True),
        slow({"kind": torch.optim.Adagrad}, SOME, True),
        slow({"parameter_wire": torch.bfloat16}, SOME, False),
        slow({"kind": torch.optim.Adafactor, "shard": "parameters"}, SOME, False),
    ],
)
def test_training_goes_on_bit_for_bit(
    ranks: RankPool, tmp_path: Path, how: dict[str, Any], sizes: dict[str, tuple[int, ...]], plain: bool
) -> None:
    ranks.run(save, 4, tmp_path, how)
    for way, numbers in sizes.items():
        for size in numbers:
            for steps_before in (0, 1, 3):  # before the first forward, before the second one plans buckets, and later
                ranks.run(resume, size, tmp_path, way, steps_before, how)
    if plain:
        for way in ("whole", "dcp"):
            ranks.run(resume, 1, tmp_path, way, 0, {**how, "plain": True})


@on_ranks(2)
@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({"full_state_dict": True}, {}),
        ({"cpu_offload": True}, {}),
        ({"flatten_optimizer_state_dict": True}, {}),
        ({"flatten_optimizer_state_dict": True}, MUON),
    ],
)
def test_options_of_torchs_state_dicts_work(
    rank: int, tmp_path: Path, options: dict[str, Any], how: dict[str, Any]
) -> None:
    of, other = made(0, **how), made(1, **how)
    train(of, 0, 3)
    dcp.save(states(of, **options), checkpoint_id=tmp_path / "dcp")
    load_dcp(other, tmp_path, **options)
    train(of, 3, 5)
    train(other, 3, 5)
    assert differences(values(of[0]), values(other[0])) == []


@on_ranks(2)
def test_torchs_full_state_dict_has_all(rank: int) -> None:
    of = made(0)
    train(of, 0, 3)
    by_name = states(of, full_state_dict=True)["optimizer"]["state"]
    names = ["first.weight", "first.bias", "second.bias", "third.bias", "second.weight", "third.weight"]
    assert differences([*of[1].full_state_dict()["state"].values()], [by_name[name] for name in names]) == []


@pytest.mark.tier("slow")
@on_ranks(2)
def test_async_save_saves_the_state_of_the_moment(rank: int, tmp_path: Path) -> None:
    of, other = made(0), made(1)
    train(of, 0, 3)
    saving = dcp.async_save(states(of), checkpoint_id=tmp_path / "dcp", process_group=dist.new_group())
    train(of, 3, 5)
    saving.result()
    load_dcp(other, tmp_path)
    train(other, 3, 5)
    assert differences(values(of[0]), values(other[0])) == []


class Halves(Optimizer):
    """Changes parameters whatever their gradients and ``lr``."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["seen"] = parameter.detach().clone()
                parameter.data.mul_(0.5)


@on_ranks(2)
def test_state_to_load_into_is_made_without_a_step(rank: int) -> None:
    of = made(0, kind=Halves)
    before = values(of[0])
    assert of[1].state_dict()["state"] == of[1].full_state_dict()["state"] == {}
    found = states(of)["optimizer"]["state"]
    assert found.keys() == before.keys()
    assert found["first.weight"].keys() <= {"seen"}
    assert differences(before, values(of[0])) == []
    assert all(parameter.grad is None for parameter in of[0].parameters())


@on_ranks(2)
def test_training_does_not_change_a_whole_state(rank: int) -> None:
    of, other = made(0), made(1)
    train(of, 0, 2)
    whole = of[1].full_state_dict()
    before = copy.deepcopy(whole)
    of_state = [value for state in whole["state"].values() for value in state.values()]
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in of_state)  # no views of buckets
    other[1].load_state_dict(whole)
    train(of, 2, 4)
    train(other, 2, 4)
    assert differences(before, whole) == []


@on_ranks(2)
def test_the_state_of_an_optimizer_that_is_not_sharded_can_be_loaded(rank: int) -> None:
    plain, of = made(0, plain=True), made(1)
    train(plain, 0, 3)
    of[0].module.load_state_dict(plain[0].state_dict())  # type: ignore[union-attr, operator]
    of[1].load_state_dict(copy.deepcopy(plain[1].state_dict()))
    train(plain, 3, 5)
    train(of, 3, 5)
    assert differences(values(plain[0]), values(of[0])) == []


@on_ranks(2)
def test_groups_stay_the_same_objects_and_take_saved_settings(rank: int) -> None:
    of, other = made(0), made(1)
    train(of, 0, 1)
    of[1].param_groups[1]["lr"] = 0.5
    kept = list(other[1].param_groups)
    other[1].load_state_dict(of[1].full_state_dict())
    assert all(now is before for now, before in zip(other[1].param_groups, kept, strict=True))
    assert [group["lr"] for group in kept] == [0.01, 0.5]
    assert [group["weight_decay"] for group in kept] == [0.0, 0.01]


def of_another_model(of: Made) -> dict[str, Any]:
    other = made(2, net=lambda: Net(outputs=40))
    train(other, 0, 1)
    return other[1].full_state_dict()


def without_a_parameter(of: Made) -> dict[str, Any]:
    cut = of[1].full_state_dict()
    cut["param_groups"][1]["params"].pop()
    return cut


def without_a_moment(of: Made) -> dict[str, Any]:
    cut = of[1].full_state_dict()
    del cut["state"][4]["exp_avg_sq"]
    return cut


def of_another_rank(of: Made) -> dict[str, Any]:
    return of_ranks(of[1].state_dict())[1 - dist.get_rank()]


@on_ranks(2)
@pytest.mark.parametrize(
    ("unfit", "said"),
    [
        (of_another_model, r"of parameter third.* has shape .*40.*41.*same model.*FD043"),
        (without_a_parameter, r"groups of \[4, 1\] parameters, and the optimizer has \[4, 2\].*FD043"),
        (without_a_moment, r"of parameter second.weight has no exp_avg_sq.*FD043"),
        (of_another_rank, r"lacks elements \d+ to \d+ of parameter .*full_state_dict\(\).*FD043"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    rank: int, unfit: Callable[[Made], dict[str, Any]], said: str
) -> None:
    of = made(0)
    train(of, 0, 3)
    state = unfit(of)
    before = values(of[0]), of[1].full_state_dict()
    state["param_groups"][0]["lr"] = 7.0
    with pytest.raises(ValueError, match=said):
        of[1].load_state_dict(state)
    assert differences(before, (values(of[0]), of[1].full_state_dict())) == []


@on_ranks(2)
def test_a_part_is_not_taken_for_the_whole(rank: int) -> None:
    of, plain = made(0), made(0, plain=True)
    train(of, 0, 1)
    plain[1].load_state_dict(of[1].state_dict())
    with pytest.raises(RuntimeError, match=r"one rank's part.*full_state_dict\(\).*FD043"):
        train(plain, 1, 2)


@on_ranks(2)
def test_a_part_may_be_one_number(rank: int) -> None:
    """The second rank's, of 1,025."""
    of, plain = (made(0, net=lambda: nn.Linear(5, 205, bias=False), plain=plain) for plain in (False, True))
    train(of, 0, 2)
    train(plain, 0, 2)
    theirs, ours = plain[1].state_dict()["state"][0], of[1].full_state_dict()["state"][0]
    assert differences(sorted(theirs.items()), sorted(ours.items())) == []


# ---------------------------------------------------------------------------------------------------- copies in fp32


def mains(of: Made) -> list[Tensor]:
    """The whole copies in fp32."""
    return [state["fastddp.main"] for state in of[1].full_state_dict()["state"].values()]


def as_mains(of: Made) -> list[Tensor]:
    """The parameters as such copies."""
    return [parameter.detach().float() for group in of[1].param_groups for parameter in group["params"]]


@on_ranks(2)
def test_copies_in_fp32_are_parameters_where_the_state_has_none(rank: int) -> None:
    of, other = made(0, dtype=torch.bfloat16), made(1, dtype=torch.bfloat16)
    train(of, 0, 3)
    train(other, 0, 3)
    whole = of[1].full_state_dict()
    for state in whole["state"].values():
        del state["fastddp.main"]
    other[1].load_state_dict(whole)
    assert differences(as_mains(other), mains(other)) == []


@on_ranks(2)
@pytest.mark.parametrize("saves_part", [False, True])
def test_saved_copies_in_fp32_follow_parameters_that_were_written(rank: int, saves_part: bool) -> None:
    of = made(0, dtype=torch.bfloat16)
    train(of, 0, 3)
    with torch.no_grad():
        of[0].module.second.bias.add_(1.0)  # type: ignore[union-attr, operator]
    if saves_part:
        part = of[1].state_dict()["state"][2].get("fastddp.main")
        assert part is None or part.part.equal(as_mains(of)[2][part.begin : part.end])
    follow = [main.equal(parameter) for main, parameter in zip(mains(of), as_mains(of), strict=True)]
    assert follow == [False, False, True, False, False, False]


# ------------------------------------------------------------------------------------------------------- rectangles


def test_a_part_has_its_elements_in_the_same_order_of_memory() -> None:
    like = torch.empty(2, 3, 4, 5)
    part = ShardedState.of(torch.empty(20), like, 30, 50)
    assert part.has(like, 31, 50)
    assert not part.has(like, 29, 50)
    assert not part.has(like, 31, 51)
    assert not part.has(like.to(memory_format=torch.channels_last), 31, 50)


@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 4), (3, 1, 2), (2, 2, 2, 3)], ids=str)
def test_rectangles_of_a_part_are_its_elements_once_each(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(math.prod(shape))
    for order in itertools.permutations(range(len(shape))):
        parameter = numbers.view([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(shape))])
        for begin, end in itertools.combinations(range(len(numbers) + 1), 2):
            if end - begin < len(numbers):
                boxes = list(ShardedState.of(numbers[begin:end], parameter, begin, end).boxes())
                for offsets, sizes, part in boxes:
                    place = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
                    assert part.equal(parameter[place])
                assert sum(part.numel() for _, _, part in boxes) == end - begin
                assert len(boxes) <= 2 * len(shape) - 1
