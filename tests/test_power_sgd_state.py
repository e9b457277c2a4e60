"""What PowerSGD remembers, in checkpoints and pickles, and how it refuses what makes no sense."""

from __future__ import annotations

import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import fastddp
from fastddp import comm_hooks
from fastddp.comm_hooks import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from ranks import RankPool
from test_power_sgd import loss, network

HOOKS = pytest.mark.parametrize("hook", ["powerSGD_hook", "batched_powerSGD_hook"])
SETTINGS = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2}


class Training:
    """A model that trains under PowerSGD, over buckets of `cap` MiB."""

    def __init__(self, rank: int, hook: str, cap: float = 0.03, **settings: Any) -> None:
        self.rank = rank
        self.state = PowerSGDState(None, **SETTINGS | settings)
        self.model = fastddp.DistributedDataParallel(network(), bucket_cap_mb=cap)
        self.model.register_comm_hook(self.state, getattr(comm_hooks, hook))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def run(self, steps: range) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            loss(self.model, self.rank, step).backward()
            self.optimizer.step()

    def parameters(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])


def saved_by_torch(checkpoint: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(checkpoint, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(rank: int, hook: str, cap: float, warm_up: int) -> bool:
    """Six steps, against three, a checkpoint, and three by another training that did `warm_up` steps of its own."""
    whole = Training(rank, hook)
    whole.run(range(6))
    first = Training(rank, hook)
    first.run(range(3))
    checkpoint = saved_by_torch({"model": first.model.state_dict(), "power_sgd": first.state.state_dict()})
    second = Training(rank, hook, cap)
    second.run(range(10, 10 + warm_up))
    second.model.load_state_dict(checkpoint["model"])
    second.state.load_state_dict(checkpoint["power_sgd"])
    assert second.state.iter == 3
    second.run(range(3, 6))
    assert second.state.iter == 6
    assert second.state.compression_stats() == whole.state.compression_stats()
    return torch.allclose(second.parameters(), whole.parameters(), atol=1e-6)


@HOOKS
@pytest.mark.parametrize("warm_up", [1, 4])
def test_training_goes_on_from_a_checkpoint(ranks: RankPool, hook: str, warm_up: int) -> None:
    assert ranks.run(resumed, 2, hook, 0.03, warm_up) == [True, True]


def test_a_checkpoint_fits_other_buckets(ranks: RankPool) -> None:
    assert ranks.run(resumed, 2, "powerSGD_hook", 0.0, 1) == [True, True]
    assert ranks.run(resumed, 2, "powerSGD_hook", 25.0, 4) == [True, True]


def through_dcp(rank: int, folder: str) -> bool:
    """Each rank has errors of its own, which DCP has to keep apart."""
    whole = Training(rank, "powerSGD_hook")
    whole.run(range(6))
    first = Training(rank, "powerSGD_hook")
    first.run(range(3))
    dcp.save({"model": first.model.state_dict(), "power_sgd": first.state.state_dict()}, checkpoint_id=folder)
    second = Training(rank, "powerSGD_hook")
    second.run(range(1))
    checkpoint = {"model": second.model.state_dict(), "power_sgd": second.state.state_dict()}
    dcp.load(checkpoint, checkpoint_id=folder)
    second.model.load_state_dict(checkpoint["model"])
    second.state.load_state_dict(checkpoint["power_sgd"])
    second.run(range(3, 6))
    return torch.equal(second.parameters(), whole.parameters())


def test_training_goes_on_from_a_distributed_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(through_dcp, 2, str(tmp_path / "checkpoint")) == [True, True]


def state_of(rank: int) -> dict[str, Any]:
    training = Training(rank, "powerSGD_hook")
    training.run(range(4))
    return training.state.state_dict()


def on_more_ranks(rank: int, states: list[dict[str, Any]]) -> tuple[bool, bool, str]:
    """Whether this rank's errors are those saved, whether they are zero, and the warning."""
    training = Training(rank, "powerSGD_hook")
    training.run(range(3))
    saved = states[min(rank, len(states) - 1)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training.state.load_state_dict(saved)
    (warning,) = caught
    errors = saved["errors"].get(f"rank {rank}", {})
    kept = all(torch.equal(error, training.state.errors[name]) for name, error in errors.items())
    training.run(range(3, 5))
    return bool(errors) and kept, not errors, str(warning.message)


def test_on_more_ranks_those_without_errors_begin_with_none_and_a_warning_says_so(ranks: RankPool) -> None:
    states = ranks.run(state_of, 2)
    (kept_0, _, said), (kept_1, _, _), (_, none_2, says) = ranks.run(on_more_ranks, 3, states)
    assert kept_0
    assert kept_1
    assert none_2
    assert said.endswith("saved on 2 ranks and are loaded on 3: rank 0 takes those of its number.")
    assert says.endswith("saved on 2 ranks and are loaded on 3: rank 2 begins with none.")


def pickled(rank: int) -> bool:
    """A copy remembers the same, and goes on counting with a model of its own."""
    first = Training(rank, "powerSGD_hook")
    first.run(range(4))
    state = pickle.loads(pickle.dumps(first.state))
    assert state.process_group is dist.group.WORLD
    remembered = first.state.qs | {f"error of {name}": error for name, error in first.state.errors.items()}
    copied = state.qs | {f"error of {name}": error for name, error in state.errors.items()}
    assert remembered.keys() == copied.keys()
    assert all(torch.equal(tensor, copied[name]) for name, tensor in remembered.items())
    model = fastddp.DistributedDataParallel(network())
    model.register_comm_hook(state, powerSGD_hook)
    loss(model, rank, 4).backward()
    return state.iter == 5 and first.state.iter == 4


def test_a_pickled_state_goes_on_over_the_default_group(ranks: RankPool) -> None:
    assert ranks.run(pickled, 2) == [True, True]


def statistics(rank: int, hook: str) -> tuple[float, int, int]:
    training = Training(rank, hook)
    training.run(range(5))
    return training.state.compression_stats()


def test_statistics_count_the_elements_of_compressed_windows(ranks: RankPool) -> None:
    elements = sum(parameter.numel() for parameter in network().parameters())
    vectors_and_small = 16 + 40 + 40 + 2 + 2 * 40
    factors = 2 * (16 + 27 + 40 + 256 + 40 + 40)
    before, after = 3 * elements, 3 * (vectors_and_small + factors)
    assert ranks.run(statistics, 1, "powerSGD_hook") == [(before / after, before, after)]


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"matrix_approximation_rank": 0}, "matrix_approximation_rank must be 1 to 32, got 0"),
        ({"matrix_approximation_rank": 33}, "must be 1 to 32, got 33"),
        ({"orthogonalization_epsilon": -1e-8}, "orthogonalization_epsilon must be >= 0, got -1e-08"),
        ({"start_powerSGD_iter": 1}, "start_powerSGD_iter must be at least 2 with use_error_feedback or warm_start"),
        ({"start_powerSGD_iter": 1, "warm_start": False}, "must be at least 2"),
        ({"min_compression_rate": 0}, "min_compression_rate must be > 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PowerSGDState(None, **settings)


def without_memory(rank: int) -> bool:
    state = PowerSGDState(None, start_powerSGD_iter=0, use_error_feedback=False, warm_start=False)
    model = fastddp.DistributedDataParallel(network())
    model.register_comm_hook(state, powerSGD_hook)
    for step in range(3):
        model.zero_grad()
        loss(model, rank, step).backward()
    return not state.errors and state.compression_stats()[0] > 1


def test_without_memory_it_may_start_at_once(ranks: RankPool) -> None:
    assert ranks.run(without_memory, 2) == [True, True]


def two_models(rank: int) -> None:
    state = PowerSGDState(None)
    fastddp.DistributedDataParallel(nn.Linear(2, 3)).register_comm_hook(state, powerSGD_hook)
    fastddp.DistributedDataParallel(nn.Linear(4, 3)).register_comm_hook(state, powerSGD_hook)


def test_a_state_of_another_model_is_refused_and_both_are_named(ranks: RankPool) -> None:
    (error,) = ranks.errors(two_models, 1)
    assert "weight [3, 2]" in error.message
    assert "weight [3, 4]" in error.message


def loads(rank: int, changes: dict[str, Any]) -> None:
    training = Training(rank, "powerSGD_hook")
    training.state.load_state_dict(training.state.state_dict() | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 7}, "its format is 7"),
        ({"matrix_approximation_rank": 4}, "has matrix_approximation_rank 4, this one 2"),
        ({"shapes": {"weight": [3, 2]}}, "weight [3, 2]"),
    ],
)
def test_a_saved_state_that_does_not_fit_is_refused(ranks: RankPool, changes: dict[str, Any], message: str) -> None:
    (error,) = ranks.errors(loads, 1, changes)
    assert message in error.message


def wrong_state(rank: int) -> None:
    fastddp.DistributedDataParallel(nn.Linear(2, 3)).register_comm_hook(None, powerSGD_hook)


def test_another_state_than_its_own_is_refused(ranks: RankPool) -> None:
    (error,) = ranks.errors(wrong_state, 1)
    assert "powerSGD_hook is a fastddp.comm_hooks.PowerSGDState, not a builtins.NoneType" in error.message


def complex_model(rank: int, hook: str) -> bool:
    module = nn.Linear(20, 20, dtype=torch.complex64)
    model = fastddp.DistributedDataParallel(module)
    state = PowerSGDState(None, start_powerSGD_iter=2)
    model.register_comm_hook(state, getattr(comm_hooks, hook))
    for _ in range(4):
        model.zero_grad()
        model(torch.full((1, 20), rank + 1j)).abs().sum().backward()
    return not state.qs


def test_complex_gradients_travel_uncompressed_and_batched_not_at_all(ranks: RankPool) -> None:
    assert ranks.run(complex_model, 2, "powerSGD_hook") == [True, True]
    (error, _) = ranks.errors(complex_model, 2, "batched_powerSGD_hook")
    assert "takes real gradients only, and bias is complex" in error.message


def test_its_hooks_are_not_called_by_hand() -> None:
    for hook in (powerSGD_hook, batched_powerSGD_hook):
        with pytest.raises(RuntimeError, match=r"run by fastddp\.DistributedDataParallel"):
            hook(None, None)
