"""States of hooks: they outlive their model, go on from files and pickles, and take nothing that makes no sense."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fastddp
from fastddp import comm_hooks
from fastddp.comm_hooks import BlockState, CompressState, PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from hooks_by_name import HOOKS
from on_ranks import on_ranks
from ranks import RankPool
from test_power_sgd import backward, hooked, loss, network


class Training:
    """A model that trains under a hook."""

    def __init__(
        self, rank: int, name: str = "PowerSGD", two_levels: bool = False, cap: float = 0.03, state: Any = None
    ) -> None:
        self.rank = rank
        make, hook = HOOKS[name]
        self.state = state or make()
        mesh = init_device_mesh("cpu", (2, 2)) if two_levels else None
        self.model = fastddp.DistributedDataParallel(network(), bucket_cap_mb=cap, hierarchy=mesh)
        self.model.register_comm_hook(self.state, hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def run(self, *steps: int) -> Training:
        for step in steps:
            backward(self.model, self.rank, step)
            self.optimizer.step()
        return self

    def checkpoint(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "state": self.state.state_dict()}

    def load(self, checkpoint: dict[str, Any]) -> None:
        self.model.load_state_dict(checkpoint["model"])
        self.state.load_state_dict(checkpoint["state"])

    def parameters(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])


# --------------------------------------------------------------------------------------------------------- checkpoints


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.mark.parametrize("is_in_a_cycle", [False, True], ids=["deleted", "collected"])
@pytest.mark.parametrize("name", ["PowerSGD", "int8"])
@on_ranks(2)
def test_a_state_and_its_pickle_know_how_far_its_model_came_and_go_on_with_another_one(
    rank: int, name: str, is_in_a_cycle: bool
) -> None:
    training = Training(rank, name).run(*range(4))
    state: Any = training.state
    twin = copy.deepcopy(state)  # whose iterations are asked for while there is the model
    twin.process_group = None
    pickled = pickle.loads(pickle.dumps(state))
    if is_in_a_cycle:
        training.model.itself = [training.model]
    del training
    gc.collect()
    assert equal(twin.state_dict(), state.state_dict())
    assert equal(pickled.state_dict(), state.state_dict())
    for each in (pickled, state):
        assert [each.iter, Training(rank, name, state=each).run(4, 5).state.iter] == [4, 6]


@pytest.mark.parametrize(
    ("name", "two_levels", "cap", "warm_up"),
    [
        ("PowerSGD", False, 0.0, 1),
        ("PowerSGD", False, 25.0, 4),
        ("batched PowerSGD", False, 0.03, 1),
        ("batched PowerSGD", True, 0.03, 4),
        ("e4m3, drawn", False, 0.03, 4),
    ],
)
@on_ranks(4)
def test_training_goes_on_from_a_file_in_these_or_other_buckets_75666(
    rank: int, name: str, two_levels: bool, cap: float, warm_up: int
) -> None:
    """Six steps, against three, a file, and three by another training that did ``warm_up`` steps of its own."""
    whole = Training(rank, name, two_levels).run(*range(6))
    file = io.BytesIO()
    torch.save(Training(rank, name, two_levels).run(*range(3)).checkpoint(), file)
    file.seek(0)
    second = Training(rank, name, two_levels, cap).run(*range(10, 10 + warm_up))
    second.load(torch.load(file, weights_only=True))
    assert [second.state.iter, second.run(3, 4, 5).state.iter] == [3, 6]
    if isinstance(whole.state, PowerSGDState):
        assert second.state.compression_stats() == whole.state.compression_stats()
    torch.testing.assert_close(second.parameters(), whole.parameters(), rtol=0, atol=1e-6)


@on_ranks(2)
def test_training_goes_on_from_a_distributed_checkpoint(rank: int, tmp_path: Path) -> None:
    """Each rank has errors of its own, which DCP has to keep apart."""
    dcp.save(Training(rank).run(*range(3)).checkpoint(), checkpoint_id=tmp_path / "checkpoint")
    second = Training(rank).run(0)
    checkpoint = second.checkpoint()
    dcp.load(checkpoint, checkpoint_id=tmp_path / "checkpoint")
    second.load(checkpoint)
    assert torch.equal(second.run(3, 4, 5).parameters(), Training(rank).run(*range(6)).parameters())


def saved_state(rank: int) -> dict[str, Any]:
    return Training(rank).run(*range(4)).state.state_dict()


def on_more_ranks(rank: int, states: list[dict[str, Any]]) -> tuple[bool, str]:
    """Whether this rank has errors, those of its number, and the warning."""
    training = Training(rank).run(*range(3))
    with pytest.warns(UserWarning, match="saved on 2 ranks and are loaded on 3") as warned:
        training.state.load_state_dict(states[min(rank, 1)])
    errors = states[min(rank, 1)]["errors"].get(f"rank {rank}", {})
    assert all(torch.equal(error, training.state.errors[name]) for name, error in errors.items())
    assert all(name in errors or not error.any() for name, error in training.state.errors.items())
    training.run(3, 4)
    return bool(errors), str(warned[0].message)


def test_on_more_ranks_those_without_errors_begin_with_none_and_a_warning_says_so(ranks: RankPool) -> None:
    told = ranks.run(on_more_ranks, 3, ranks.run(saved_state, 2))
    assert [has_errors for has_errors, _ in told] == [True, True, False]
    assert "rank 0 takes those of its number" in told[0][1]
    assert "rank 2 begins with none" in told[2][1]


@on_ranks(1)
def test_statistics_count_the_elements_of_compressed_windows(rank: int) -> None:
    before = 3 * sum(parameter.numel() for parameter in network().parameters())
    vectors_and_small, factors = 16 + 40 + 40 + 2 + 2 * 40, 2 * (16 + 27 + 40 + 256 + 40 + 40)
    after = 3 * (vectors_and_small + factors)
    assert Training(rank).run(*range(5)).state.compression_stats() == (before / after, before, after)


# ----------------------------------------------------------------------------------------------- what makes no sense


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (PowerSGDState, {"matrix_approximation_rank": 33}, "matrix_approximation_rank must be .* 1 to 32, got 33"),
        (PowerSGDState, {"orthogonalization_epsilon": -1e-8}, "orthogonalization_epsilon must be >= 0"),
        (PowerSGDState, {"start_powerSGD_iter": 1, "warm_start": False}, "start_powerSGD_iter must be at least 2"),
        (BlockState, {"block_size": 64}, "block_size"),
        (CompressState, {"accumulate": "fp16"}, '"fp32", "wire" or None, got \'fp16\''),
    ],
)
def test_settings_out_of_range_are_refused(make: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(None, **settings)


MISSING = object()
IN_ALL: list[tuple[str, Any, str]] = [  # in a saved state: where, what is there, and what is said
    ("format", 7, "its format is 7"),
    ("iter", MISSING, "it has no 'iter'"),
    ("iter", -1, "iter must be an integer >= 0, not -1"),
    ("world_size", 0, "world_size must be an integer >= 1"),
    ("shapes", ["1.weight"], "shapes must be a dict"),
    ("shapes/1.weight", b"\x03\x02", "a list of sizes"),
    ("shapes/1.weight", [3, 2], "1.weight [3, 2]"),
    ("errors/rank 0/1.weight", torch.zeros(16, 27).double(), "the error of '1.weight' must be a dense tensor of float"),
    ("errors/rank 0/1.weight", torch.zeros(5, 5), "the error of '1.weight' must be of shape"),
    ("errors/rank 0/other", torch.zeros(3), "the error of 'other' must be that of a parameter"),
]
BAD: dict[str, list[tuple[str, Any, str]]] = {
    "int8": IN_ALL,
    "PowerSGD": [
        *IN_ALL,
        ("matrix_approximation_rank", 4, "has matrix_approximation_rank 4, this one 2"),
        ("qs/1.weight", torch.zeros(2, 28), "qs['1.weight'] must be of shape"),
    ],
}


def having(state: dict[str, Any], place: str, value: Any) -> dict[str, Any]:
    name, _, rest = place.partition("/")
    changed = state | {name: having(state[name], rest, value) if rest else value}
    return {key: kept for key, kept in changed.items() if kept is not MISSING}


@pytest.mark.parametrize("name", BAD)
@on_ranks(1)
def test_of_a_saved_state_that_is_damaged_nothing_is_taken(rank: int, name: str) -> None:
    state = Training(rank, name).run(*range(4)).state
    before = copy.deepcopy(state.state_dict())
    good = before | {"iter": 77}
    errors = dict(state.errors)
    for place, value, words in BAD[name]:
        with pytest.raises(ValueError, match=re.escape(words)):
            state.load_state_dict(having(good, place, value))
    with pytest.raises(ValueError, match="state must be a dict whose keys are names, not list"):
        state.load_state_dict([good])
    assert equal(state.state_dict(), before)
    assert all(state.errors[key] is error for key, error in errors.items())


@on_ranks(2)
def test_what_would_fail_a_thousand_steps_later_is_refused_when_it_is_registered(rank: int) -> None:
    pairs = nn.Linear(20, 20, dtype=torch.complex64)
    late = PowerSGDState(None, start_powerSGD_iter=1000)
    others = PowerSGDState(None), BlockState()
    for state, hook in zip(others, (powerSGD_hook, comm_hooks.int8_compress_hook), strict=True):
        hooked(nn.Linear(2, 3), state, hook)
    for words, module, state, hook in [
        ("PowerSGDState, not a builtins.NoneType", nn.Linear(2, 3), None, powerSGD_hook),
        (r"weight \[3, 2\].*weight \[3, 4\]", nn.Linear(4, 3), others[0], powerSGD_hook),
        ("Make a new BlockState", nn.Linear(4, 3), others[1], comm_hooks.int8_compress_hook),
        ("weight are complex", pairs, None, comm_hooks.bf16_compress_hook),
        ("weight is complex; use powerSGD_hook", pairs, late, batched_powerSGD_hook),
        ("8 bits already", nn.Linear(2, 3), None, comm_hooks.bf16_compress_wrapper(comm_hooks.int8_compress_hook)),
    ]:
        with pytest.raises((TypeError, ValueError), match=words):
            hooked(module, state, hook)


@pytest.mark.parametrize("name", ["PowerSGD", "int8"])
def test_a_hook_that_is_called_for_a_bucket_says_who_runs_it(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"run by fastddp\.DistributedDataParallel|cannot be called for a bucket"):
        HOOKS[name][1](None, None)


# ----------------------------------------------------------------------------------- states that differ between ranks


@pytest.mark.parametrize("does", ["loads before", "loads after", "starts later"])
@on_ranks(3)
def test_a_checkpoint_or_a_setting_that_one_rank_alone_has_is_an_error_on_all(rank: int, does: str) -> None:
    saved = saved_state(rank)
    differs = rank == 0
    state = PowerSGDState(None, 2, start_powerSGD_iter=3 if does == "starts later" and differs else 2)
    if does == "loads before" and differs:
        state.load_state_dict(saved)
    model = hooked(network(), state)
    if does == "loads after" and differs:
        state.load_state_dict(saved)
    says = "start_powerSGD_iter is 3 on rank 0; 2" if does == "starts later" else "iter is 4 on rank 0; 0"
    with pytest.raises(RuntimeError, match=f"PowerSGD's states differ between ranks(.|\n)*{says} on rank 1, 2"):
        loss(model, rank, 4)
    if does != "starts later":
        state.load_state_dict(saved)  # all of them, who go on together
        backward(model, rank, 4)
        assert state.iter == 5


@on_ranks(2)
def test_ranks_that_compress_differently_are_stopped(rank: int) -> None:
    int8, fp8 = comm_hooks.int8_compress_hook, comm_hooks.fp8_compress_hook
    for state, hook, says in [
        (BlockState(), (int8, fp8)[rank], "number is"),
        (BlockState(block_size=(256, 128)[rank]), int8, "block_size is"),
    ]:
        model = hooked(nn.Linear(8, 8), state, hook)
        with pytest.raises(RuntimeError, match=f"(?s){says}.*on all ranks"):
            model(torch.ones(1, 8))


@on_ranks(2)
def test_a_rank_that_loads_between_steps_notices_that_others_do_not(rank: int) -> None:
    training = Training(rank).run(*range(3))
    if rank == 0:
        training.state.load_state_dict(training.state.state_dict())
        says = r"changed on rank 0 \(by load_state_dict\(\) or by setting iter\)(.|\n)*within 0.2 s not on rank 1"
        patience = mock.patch("fastddp.compression.power_sgd_agreement._PATIENCE", 0.2)
        with patience, pytest.raises(RuntimeError, match=says):
            training.run(3)
    dist.barrier()


@on_ranks(2)
def test_ranks_compare_once_and_after_a_load_and_never_else(rank: int) -> None:
    """Where buckets are rebuilt, they compare which model it is."""
    training = Training(rank)
    with mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as all_gather:
        counts = []
        for steps in (range(1), range(1, 4)):
            training.run(*steps)
            counts.append(all_gather.call_count)
        training.state.load_state_dict(training.state.state_dict())
        training.run(*range(4, 8))
    assert [*counts, all_gather.call_count] == [1, 2, 3]
    dist.barrier()
    store = dist.distributed_c10d._get_process_group_store(training.model.process_group)
    assert not any(store.check([f"fastddp/power_sgd/1/4/{part}"]) for part in ("arrived", "count", "complete"))
