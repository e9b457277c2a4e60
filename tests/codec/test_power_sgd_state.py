"""What PowerSGD remembers, in checkpoints and pickles, and how it refuses what makes no sense."""

from __future__ import annotations

import io
import pickle
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

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


def without(name: str) -> Any:
    return lambda state: {key: value for key, value in state.items() if key != name}


def having(**changes: Any) -> Any:
    return lambda state: state | changes


def having_in(part: str, name: str, value: Any) -> Any:
    return lambda state: state | {part: state[part] | {name: value}}


def having_error(name: str, value: Any) -> Any:
    return lambda state: state | {"errors": {"rank 0": state["errors"]["rank 0"] | {name: value}}}


BAD_STATES = {
    "of another type": (lambda state: [state], "state must be a dict whose keys are names, not list"),
    "no iter": (without("iter"), "it has no 'iter'"),
    "no qs": (without("qs"), "it has no 'qs'"),
    "no errors": (without("errors"), "it has no 'errors'"),
    "no world_size": (without("world_size"), "it has no 'world_size'"),
    "iter < 0": (having(iter=-1), "iter must be an integer >= 0, not -1"),
    "iter fractional": (having(iter=3.5), "iter must be an integer >= 0, not 3.5"),
    "iter a text": (having(iter="3"), "iter must be an integer >= 0, not '3'"),
    "iter a flag": (having(iter=True), "iter must be an integer >= 0, not True"),
    "rank fractional": (
        having(matrix_approximation_rank=2.0),
        "matrix_approximation_rank must be an integer >= 1, not 2.0",
    ),
    "world_size 0": (having(world_size=0), "world_size must be an integer >= 1, not 0"),
    "total < 0": (
        having(total_numel_before_compression=-5),
        "total_numel_before_compression must be an integer >= 0, not -5",
    ),
    "shapes a list": (having(shapes=["0.weight"]), "shapes must be a dict whose keys are names, not list"),
    "a shape a text": (having_in("shapes", "0.weight", "3"), "shapes['0.weight'] must be a list of sizes, not '3'"),
    "Q no tensor": (having_in("qs", "NAME", [1.0]), "qs['NAME'] must be a tensor, not list"),
    "Q in 16 bits": (
        having_in("qs", "NAME", torch.zeros(2, 27, dtype=torch.float16)),
        "qs['NAME'] must be a dense tensor of float32, not torch.float16",
    ),
    "Q of another shape": (having_in("qs", "NAME", torch.zeros(2, 28)), "qs['NAME'] must be of shape"),
    "Q of nothing": (having_in("qs", "nobody", torch.zeros(2, 3)), "qs['nobody'] must be that of a parameter"),
    "an error in 64 bits": (
        having_error("NAME", torch.zeros(16, 27, dtype=torch.float64)),
        "the error of 'NAME' must be a dense tensor of float32, not torch.float64",
    ),
    "an error of another shape": (having_error("NAME", torch.zeros(5, 5)), "the error of 'NAME' must be of shape"),
    "an error that is none": (having_error("NAME", None), "the error of 'NAME' must be a tensor, not NoneType"),
}


def everything(state: PowerSGDState) -> tuple[Any, ...]:
    tensors = {**state.qs, **{f"error of {name}": error for name, error in state.errors.items()}}
    numbers = (state.iter, *state.compression_stats(), state.was_changed, dict(state._model))
    return numbers, {name: (id(tensor), tensor.tolist()) for name, tensor in tensors.items()}


def loads_bad_states(rank: int) -> dict[str, tuple[str, bool]]:
    """For each what is said, and whether the state is as it was."""
    training = Training(rank, "powerSGD_hook")
    training.run(range(4))
    state = training.state
    name = next(name for name, q in state.qs.items() if q.shape == (2, 27))
    before = everything(state)
    found = {}
    for case, (spoil, _) in BAD_STATES.items():
        saved = dict(state.state_dict())
        saved |= {"iter": 77, "qs": {key: q + 1 for key, q in state.qs.items()}}
        spoiled = spoil(saved)
        if isinstance(spoiled, dict):
            for part in (spoiled.get("qs", {}), spoiled.get("errors", {}).get("rank 0", {})):
                if "NAME" in part:
                    part[name] = part.pop("NAME")
        with pytest.raises(ValueError, match="saved PowerSGD state") as caught:
            state.load_state_dict(spoiled)
        found[case] = (str(caught.value).replace(name, "NAME"), everything(state) == before)
    return found


def test_of_a_saved_state_that_is_damaged_nothing_is_taken(ranks: RankPool) -> None:
    (found,) = ranks.run(loads_bad_states, 1)
    for case, (_, wanted) in BAD_STATES.items():
        said, is_as_before = found[case]
        assert wanted in said, case
        assert is_as_before, case


def refused_before_registration(rank: int) -> None:
    first = Training(rank, "powerSGD_hook")
    first.run(range(4))
    saved = first.state.state_dict()
    state = PowerSGDState(None, **SETTINGS)
    state.load_state_dict(saved | {"qs": {name: q.double() for name, q in saved["qs"].items()}})  # of a model in fp64
    fastddp.DistributedDataParallel(network()).register_comm_hook(state, powerSGD_hook)


def test_a_state_in_other_dtypes_is_refused_when_it_meets_the_model(ranks: RankPool) -> None:
    (error,) = ranks.errors(refused_before_registration, 1)
    assert "must be a dense tensor of float32, not torch.float64" in error.message


def test_iter_is_a_number_of_synchronisations() -> None:
    state = PowerSGDState(None)
    for value in (-1, 2.5):
        with pytest.raises((ValueError, TypeError)):
            state.iter = value
    assert state.iter == 0


# ----------------------------------------------------------------------------------- states that differ between ranks


def only_rank_0_loads(rank: int, when: str) -> str:
    first = Training(rank, "powerSGD_hook")
    first.run(range(4))
    saved = first.state.state_dict()
    state = PowerSGDState(None, **SETTINGS)
    model = fastddp.DistributedDataParallel(network(), bucket_cap_mb=0.03)
    if when == "before" and rank == 0:
        state.load_state_dict(saved)
    model.register_comm_hook(state, powerSGD_hook)
    if when == "after" and rank == 0:
        state.load_state_dict(saved)
    with pytest.raises(RuntimeError) as caught:
        loss(model, rank, 4)
    state.load_state_dict(saved)  # all of them
    loss(model, rank, 4).backward()
    assert state.iter == 5
    return str(caught.value)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_checkpoint_that_one_rank_alone_has_found_is_an_error_on_all(ranks: RankPool, when: str) -> None:
    for message in ranks.run(only_rank_0_loads, 3, when):
        assert "PowerSGD's states differ between ranks: iter is 4 on rank 0; 0 on rank 1, 2." in message


def other_settings(rank: int) -> str:
    state = PowerSGDState(None, start_powerSGD_iter=2 + (rank == 1))
    model = fastddp.DistributedDataParallel(network())
    model.register_comm_hook(state, powerSGD_hook)
    with pytest.raises(RuntimeError) as caught:
        loss(model, rank, 0)
    return str(caught.value)


def test_other_settings_on_one_rank_are_an_error_on_all(ranks: RankPool) -> None:
    for message in ranks.run(other_settings, 2):
        assert "start_powerSGD_iter is 2 on rank 0; 3 on rank 1." in message


def one_rank_loads_later(rank: int) -> str:
    training = Training(rank, "powerSGD_hook")
    training.run(range(3))
    if rank == 1:
        dist.barrier()
        return ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastddp.exchange.power_sgd_agreement._PATIENCE", 0.2)
        training.state.load_state_dict(training.state.state_dict())
        with pytest.raises(RuntimeError) as caught:
            training.run(range(3, 4))
    dist.barrier()
    return str(caught.value)


def test_a_rank_that_loads_between_steps_notices_that_others_do_not(ranks: RankPool) -> None:
    message, _ = ranks.run(one_rank_loads_later, 2)
    assert "PowerSGD's state was changed on rank 0 (by load_state_dict() or by setting iter)" in message
    assert "within 0.2 s not on rank 1" in message


def free_in_steady_steps(rank: int) -> tuple[list[int], bool]:
    """Comparisons up to the first step, to the fourth, and after a load; whether the store is clean."""
    training = Training(rank, "powerSGD_hook")
    with mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as all_gather:
        counts = [all_gather.call_count]
        for steps in (range(1), range(1, 4)):
            training.run(steps)
            counts.append(all_gather.call_count)
        training.state.load_state_dict(training.state.state_dict())
        training.run(range(4, 8))
        counts.append(all_gather.call_count)
    dist.barrier()
    store = dist.distributed_c10d._get_process_group_store(training.model.process_group)
    left = [part for part in ("arrived", "count", "complete") if store.check([f"fastddp/power_sgd/1/4/{part}"])]
    return counts, not left


def test_ranks_compare_once_and_after_a_load_and_never_else(ranks: RankPool) -> None:
    assert (
        ranks.run(free_in_steady_steps, 2) == [([0, 1, 2, 3], True)] * 2
    )  # when buckets are rebuilt ranks compare which model it is


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
    assert "takes real gradients only, and weight is complex" in error.message


def refused_at_registration(rank: int) -> dict[str, str]:
    of_a_sum = fastddp.DistributedDataParallel(nn.Linear(20, 20), gradient_average="sum")
    of_pairs = fastddp.DistributedDataParallel(nn.Linear(20, 20, dtype=torch.complex64))
    in_bf16 = comm_hooks.bf16_compress_wrapper(powerSGD_hook)
    tried = {
        "a sum": (of_a_sum, PowerSGDState(None, start_powerSGD_iter=1000), powerSGD_hook),
        "pairs in bf16": (of_pairs, None, comm_hooks.bf16_compress_hook),
        "factors in bf16": (of_pairs, PowerSGDState(None, start_powerSGD_iter=1000), in_bf16),
        "pairs in batches": (of_pairs, PowerSGDState(None, start_powerSGD_iter=1000), batched_powerSGD_hook),
    }
    said = {}
    for name, (model, state, hook) in tried.items():
        with pytest.raises(ValueError, match=r".") as raised:
            model.register_comm_hook(state, hook)
        said[name] = str(raised.value)
    return said


def test_what_would_fail_a_thousand_steps_later_is_refused_when_it_is_registered(ranks: RankPool) -> None:
    for said in ranks.run(refused_at_registration, 2):
        assert 'gradient_average must be "mean" or a weight' in said["a sum"]
        assert "weight are complex" in said["pairs in bf16"]
        assert "weight are complex" in said["factors in bf16"]
        assert "weight is complex; use powerSGD_hook" in said["pairs in batches"]


def test_its_hooks_are_not_called_by_hand() -> None:
    for hook in (powerSGD_hook, batched_powerSGD_hook):
        with pytest.raises(RuntimeError, match=r"run by fastddp\.DistributedDataParallel"):
            hook(None, None)
