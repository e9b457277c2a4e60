"""What PowerSGD remembers, in checkpoints and pickles, and how it refuses what makes no sense."""

from __future__ import annotations

import io
import pickle
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
from fastddp.comm_hooks import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from on_ranks import on_ranks
from ranks import RankPool
from test_power_sgd import backward, hooked, loss, network

SETTINGS = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2}


class Training:
    """A model that trains under PowerSGD."""

    def __init__(self, rank: int, hook: str = "powerSGD_hook", two_levels: bool = False, cap: float = 0.03) -> None:
        self.rank = rank
        self.state = PowerSGDState(None, **SETTINGS)
        mesh = init_device_mesh("cpu", (2, 2)) if two_levels else None
        self.model = fastddp.DistributedDataParallel(network(), bucket_cap_mb=cap, hierarchy=mesh)
        self.model.register_comm_hook(self.state, getattr(comm_hooks, hook))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def run(self, *steps: int) -> Training:
        for step in steps:
            backward(self.model, self.rank, step)
            self.optimizer.step()
        return self

    def checkpoint(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "power_sgd": self.state.state_dict()}

    def load(self, checkpoint: dict[str, Any]) -> None:
        self.model.load_state_dict(checkpoint["model"])
        self.state.load_state_dict(checkpoint["power_sgd"])

    def parameters(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])


# --------------------------------------------------------------------------------------------------------- checkpoints


def resumed(rank: int, hook: str, two_levels: bool, cap: float, warm_up: int) -> bool:
    """Six steps, against three, a checkpoint, and three by another training that did `warm_up` steps of its own."""
    whole = Training(rank, hook, two_levels).run(*range(6))
    file = io.BytesIO()
    torch.save(Training(rank, hook, two_levels).run(*range(3)).checkpoint(), file)
    file.seek(0)
    second = Training(rank, hook, two_levels, cap).run(*range(10, 10 + warm_up))
    second.load(torch.load(file, weights_only=True))
    assert second.state.iter == 3
    second.run(3, 4, 5)
    assert second.state.iter == 6
    assert second.state.compression_stats() == whole.state.compression_stats()
    return torch.allclose(second.parameters(), whole.parameters(), atol=1e-6)


@pytest.mark.parametrize(
    ("hook", "two_levels", "cap", "warm_up"),
    [
        ("powerSGD_hook", False, 0.03, 4),
        ("powerSGD_hook", False, 0.0, 1),
        ("powerSGD_hook", False, 25.0, 4),
        ("batched_powerSGD_hook", False, 0.03, 1),
        ("batched_powerSGD_hook", False, 0.03, 4),
        ("batched_powerSGD_hook", True, 0.03, 4),
    ],
)
def test_training_goes_on_from_a_checkpoint_in_these_or_other_buckets_75666(
    ranks: RankPool, hook: str, two_levels: bool, cap: float, warm_up: int
) -> None:
    assert all(ranks.run(resumed, 4 if two_levels else 2, hook, two_levels, cap, warm_up))


def through_dcp(rank: int, folder: str) -> bool:
    """Each rank has errors of its own, which DCP has to keep apart."""
    dcp.save(Training(rank).run(*range(3)).checkpoint(), checkpoint_id=folder)
    second = Training(rank).run(0)
    checkpoint = second.checkpoint()
    dcp.load(checkpoint, checkpoint_id=folder)
    second.load(checkpoint)
    return torch.equal(second.run(3, 4, 5).parameters(), Training(rank).run(*range(6)).parameters())


def test_training_goes_on_from_a_distributed_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(through_dcp, 2, str(tmp_path / "checkpoint")) == [True, True]


def saved_state(rank: int) -> dict[str, Any]:
    return Training(rank).run(*range(4)).state.state_dict()


def on_more_ranks(rank: int, states: list[dict[str, Any]]) -> tuple[bool, str]:
    """Whether this rank has errors, those of its number, and the warning."""
    training = Training(rank).run(*range(3))
    with pytest.warns(UserWarning, match="saved on 2 ranks") as warned:
        training.state.load_state_dict(states[min(rank, 1)])
    errors = states[min(rank, 1)]["errors"].get(f"rank {rank}", {})
    assert all(torch.equal(error, training.state.errors[name]) for name, error in errors.items())
    training.run(3, 4)
    return bool(errors), str(warned[0].message)


def test_on_more_ranks_those_without_errors_begin_with_none_and_a_warning_says_so(ranks: RankPool) -> None:
    told = ranks.run(on_more_ranks, 3, ranks.run(saved_state, 2))
    assert [has_errors for has_errors, _ in told] == [True, True, False]
    assert "saved on 2 ranks and are loaded on 3: rank 0 takes those of its number" in told[0][1]
    assert "rank 2 begins with none" in told[2][1]


def everything(state: PowerSGDState) -> tuple[Any, ...]:
    tensors = {**state.qs, **{f"error of {name}": error for name, error in state.errors.items()}}
    numbers = (state.iter, *state.compression_stats(), state.was_changed, dict(state._model))
    return numbers, {name: tensor.tolist() for name, tensor in tensors.items()}


def pickled(rank: int) -> bool:
    """A copy remembers the same, and goes on counting with a model of its own."""
    first = Training(rank).run(*range(4)).state
    state = pickle.loads(pickle.dumps(first))
    assert state.process_group is dist.group.WORLD
    assert everything(first)[1] == everything(state)[1]
    backward(hooked(network(), state), rank, 4)
    return state.iter == 5 and first.iter == 4


@pytest.mark.parametrize("hook", ["powerSGD_hook", "batched_powerSGD_hook"])
@on_ranks(4)
def test_between_nodes_a_rank_counts_what_it_exchanges(rank: int, hook: str) -> None:
    """In three windows of a model whose ranks share it with another one of their node."""
    training = Training(rank, hook, two_levels=True).run(*range(5))
    _, before, after = training.state.compression_stats()
    of_node = torch.tensor([before, after])
    dist.all_reduce(of_node)
    elements = sum(parameter.numel() for parameter in training.model.parameters())
    assert of_node[0].item() == 2 * 3 * elements  # two nodes
    assert 0 < of_node[1].item() < of_node[0].item()


def test_a_pickled_state_goes_on_over_the_default_group(ranks: RankPool) -> None:
    assert ranks.run(pickled, 2) == [True, True]


def statistics(rank: int) -> tuple[float, int, int]:
    return Training(rank).run(*range(5)).state.compression_stats()


def test_statistics_count_the_elements_of_compressed_windows(ranks: RankPool) -> None:
    elements = sum(parameter.numel() for parameter in network().parameters())
    vectors_and_small = 16 + 40 + 40 + 2 + 2 * 40
    factors = 2 * (16 + 27 + 40 + 256 + 40 + 40)
    before, after = 3 * elements, 3 * (vectors_and_small + factors)
    assert ranks.run(statistics, 1) == [(before / after, before, after)]


# ----------------------------------------------------------------------------------------------- what makes no sense


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"matrix_approximation_rank": 0}, "matrix_approximation_rank must be an integer, 1 to 32, got 0"),
        ({"matrix_approximation_rank": 33}, "must be an integer, 1 to 32, got 33"),
        ({"matrix_approximation_rank": 2.5}, "must be an integer, 1 to 32, got 2.5"),
        ({"orthogonalization_epsilon": -1e-8}, "orthogonalization_epsilon must be >= 0, got -1e-08"),
        ({"start_powerSGD_iter": 1}, "start_powerSGD_iter must be at least 2 with use_error_feedback or warm_start"),
        ({"start_powerSGD_iter": 1, "warm_start": False}, "must be at least 2"),
        ({"min_compression_rate": 0}, "min_compression_rate must be > 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PowerSGDState(None, **settings)
    state = PowerSGDState(None)
    for value in (-1, 2.5):  # it is a number of synchronisations
        with pytest.raises((ValueError, TypeError)):
            state.iter = value
    assert state.iter == 0


MISSING = object()
BAD: list[tuple[str, Any, str]] = [  # in a saved state: where, what is there, and what is said
    *((name, MISSING, f"it has no '{name}'") for name in ("iter", "qs", "errors", "world_size")),
    *(("iter", value, f"iter must be an integer >= 0, not {value!r}") for value in (-1, 3.5, "3", True)),
    ("format", 7, "its format is 7"),
    ("matrix_approximation_rank", 2.0, "matrix_approximation_rank must be an integer >= 1, not 2.0"),
    ("matrix_approximation_rank", 4, "has matrix_approximation_rank 4, this one 2"),
    ("world_size", 0, "world_size must be an integer >= 1, not 0"),
    ("total_numel_before_compression", -5, "total_numel_before_compression must be an integer >= 0, not -5"),
    ("shapes", ["1.weight"], "shapes must be a dict whose keys are names, not list"),
    ("shapes", {"weight": [3, 2]}, "weight [3, 2]"),
    ("shapes/1.weight", "3", "shapes['1.weight'] must be a list of sizes, not '3'"),
    ("qs/1.weight", [1.0], "qs['1.weight'] must be a tensor, not list"),
    ("qs/1.weight", torch.zeros(2, 27).half(), "must be a dense tensor of float32, not torch.float16"),
    ("qs/1.weight", torch.zeros(2, 28), "qs['1.weight'] must be of shape"),
    ("qs/nobody", torch.zeros(2, 3), "qs['nobody'] must be that of a parameter"),
    ("errors/rank 0/1.weight", torch.zeros(16, 27).double(), "the error of '1.weight' must be a dense tensor"),
    ("errors/rank 0/1.weight", torch.zeros(5, 5), "the error of '1.weight' must be of shape"),
    ("errors/rank 0/1.weight", None, "the error of '1.weight' must be a tensor, not NoneType"),
]


def having(state: dict[str, Any], place: str, value: Any) -> dict[str, Any]:
    name, _, rest = place.partition("/")
    changed = state | {name: having(state[name], rest, value) if rest else value}
    return {key: kept for key, kept in changed.items() if kept is not MISSING}


def loads_bad_states(rank: int) -> list[str]:
    training = Training(rank).run(*range(4))
    state, before = training.state, everything(training.state)
    tensors = [id(tensor) for tensor in (*state.qs.values(), *state.errors.values())]
    saved = state.state_dict() | {"iter": 77, "qs": {key: q + 1 for key, q in state.qs.items()}}
    said = []
    for bad in [[saved], *(having(saved, place, value) for place, value, _ in BAD)]:
        with pytest.raises(ValueError, match="PowerSGD state") as caught:
            state.load_state_dict(bad)
        said.append(str(caught.value))
        assert everything(state) == before
        assert tensors == [id(tensor) for tensor in (*state.qs.values(), *state.errors.values())]
    return said


def test_of_a_saved_state_that_is_damaged_nothing_is_taken(ranks: RankPool) -> None:
    ((of_a_list, *found),) = ranks.run(loads_bad_states, 1)
    assert "state must be a dict whose keys are names, not list" in of_a_list
    for said, (place, _, wanted) in zip(found, BAD, strict=True):
        assert wanted in said, place


def refusals(rank: int) -> dict[str, str]:
    of_pairs = nn.Linear(20, 20, dtype=torch.complex64)
    of_another = PowerSGDState(None)
    hooked(nn.Linear(2, 3), of_another)
    of_64_bits = PowerSGDState(None, **SETTINGS)
    saved = Training(rank).run(*range(4)).state.state_dict()
    of_64_bits.load_state_dict(saved | {"qs": {name: q.double() for name, q in saved["qs"].items()}})
    late = PowerSGDState(None, start_powerSGD_iter=1000)
    tried: dict[str, tuple[nn.Module, Any, Any]] = {
        "no state": (nn.Linear(2, 3), None, powerSGD_hook),
        "another model's": (nn.Linear(4, 3), of_another, powerSGD_hook),
        "loaded of 64 bits": (network(), of_64_bits, powerSGD_hook),
        "pairs in bf16": (of_pairs, None, comm_hooks.bf16_compress_hook),
        "factors in bf16": (of_pairs, late, comm_hooks.bf16_compress_wrapper(powerSGD_hook)),
        "pairs in batches": (of_pairs, late, batched_powerSGD_hook),
    }
    said = {}
    for name, (module, state, hook) in tried.items():
        with pytest.raises((TypeError, ValueError)) as raised:
            hooked(module, state, hook)
        said[name] = str(raised.value)
    return said


def test_what_would_fail_a_thousand_steps_later_is_refused_when_it_is_registered(ranks: RankPool) -> None:
    for said in ranks.run(refusals, 2):
        assert "powerSGD_hook is a fastddp.comm_hooks.PowerSGDState, not a builtins.NoneType" in said["no state"]
        assert "weight [3, 2]" in said["another model's"]
        assert "weight [3, 4]" in said["another model's"]
        assert "must be a dense tensor of float32, not torch.float64" in said["loaded of 64 bits"]
        assert "weight are complex" in said["pairs in bf16"]
        assert "weight are complex" in said["factors in bf16"]
        assert "weight is complex; use powerSGD_hook" in said["pairs in batches"]
    for hook in (powerSGD_hook, batched_powerSGD_hook):
        with pytest.raises(RuntimeError, match=r"run by fastddp\.DistributedDataParallel"):
            hook(None, None)


# ----------------------------------------------------------------------------------- states that differ between ranks


def only_rank_0(rank: int, does: str) -> str:
    """What all are told then; in the end they go on together."""
    saved = saved_state(rank)
    differs = rank == 0
    state = PowerSGDState(None, 2, start_powerSGD_iter=3 if does == "starts later" and differs else 2)
    if does == "loads before" and differs:
        state.load_state_dict(saved)
    model = hooked(network(), state)
    if does == "loads after" and differs:
        state.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="PowerSGD's states differ between ranks") as caught:
        loss(model, rank, 4)
    if does != "starts later":
        state.load_state_dict(saved)  # all of them
        backward(model, rank, 4)
        assert state.iter == 5
    return str(caught.value)


@pytest.mark.parametrize("does", ["loads before", "loads after", "starts later"])
def test_a_checkpoint_or_a_setting_that_one_rank_alone_has_is_an_error_on_all(ranks: RankPool, does: str) -> None:
    says = "start_powerSGD_iter is 3 on rank 0; 2" if does == "starts later" else "iter is 4 on rank 0; 0"
    for message in ranks.run(only_rank_0, 3, does):
        assert f"{says} on rank 1, 2." in message


def one_rank_loads_later(rank: int) -> str:
    training = Training(rank).run(*range(3))
    said = ""
    if rank == 0:
        training.state.load_state_dict(training.state.state_dict())
        with mock.patch("fastddp.exchange.power_sgd_agreement._PATIENCE", 0.2), pytest.raises(RuntimeError) as caught:
            training.run(3)
        said = str(caught.value)
    dist.barrier()
    return said


def test_a_rank_that_loads_between_steps_notices_that_others_do_not(ranks: RankPool) -> None:
    message, _ = ranks.run(one_rank_loads_later, 2)
    assert "PowerSGD's state was changed on rank 0 (by load_state_dict() or by setting iter)" in message
    assert "within 0.2 s not on rank 1" in message


def free_in_steady_steps(rank: int) -> tuple[list[int], bool]:
    """Comparisons up to the first step, to the fourth, and after a load; whether the store is clean."""
    training = Training(rank)
    with mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as all_gather:
        counts = [all_gather.call_count]
        for steps in (range(1), range(1, 4)):
            training.run(*steps)
            counts.append(all_gather.call_count)
        training.state.load_state_dict(training.state.state_dict())
        training.run(*range(4, 8))
        counts.append(all_gather.call_count)
    dist.barrier()
    store = dist.distributed_c10d._get_process_group_store(training.model.process_group)
    left = [part for part in ("arrived", "count", "complete") if store.check([f"fastddp/power_sgd/1/4/{part}"])]
    return counts, not left


def test_ranks_compare_once_and_after_a_load_and_never_else(ranks: RankPool) -> None:
    # Where buckets are rebuilt, they compare which model it is.
    assert ranks.run(free_in_steady_steps, 2) == [([0, 1, 2, 3], True)] * 2
