"""Communication hooks of programs that know nothing of fastddp: behind the patch they do what they do without it.

A program is run as it is and then behind the patch, in the same process: names are looked up when it runs.
"""

from __future__ import annotations

import functools
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms import ddp_comm_hooks
from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType, default_hooks, optimizer_overlap_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.optim.functional_sgd import _FunctionalSGD

import fastddp
from fastddp import comm_hooks
from fastddp.exchange.descriptions import PythonHook
from fastddp.exchange.power_sgd import PowerSGD
from ranks import RankPool

Program = Callable[..., list[Tensor]]
HOOKS = pytest.mark.parametrize("hook", ["powerSGD_hook", "batched_powerSGD_hook"])
KEPT = functools.partial(power_sgd.powerSGD_hook)  # in which no patch finds torch's function
SETTINGS = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2}


def model() -> Any:
    torch.manual_seed(1)
    return torch.nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 40)))


def gradients(rank: int, model: nn.Module, steps: int = 5) -> list[Tensor]:
    """Of each step, and in the end the parameters, which a hook may have changed."""
    found = []
    for step in range(steps):
        model.zero_grad()
        model(torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean().backward()
        found += [parameter.grad.clone() for parameter in model.parameters()]
    return found + [parameter.detach().clone() for parameter in model.parameters()]


def as_without(rank: int, program: Program, *args: Any) -> list[bool]:
    """Whether each tensor is the same behind the patch."""
    expected = program(rank, *args)
    with fastddp.patch():
        assert isinstance(model(), fastddp.DistributedDataParallel)
        actual = program(rank, *args)
    assert any(tensor.any() for tensor in expected)
    return [torch.equal(a, b) for a, b in zip(expected, actual, strict=True)]


def assert_as_without(ranks: RankPool, program: Program, *args: Any) -> None:
    for same in ranks.run(as_without, 2, program, *args):
        assert all(same)


# ---------------------------------------------------------------------------------------------------------- wrappers


def users_hook(state, bucket):  # type: ignore[no-untyped-def]  # torch does not read annotations that are strings
    return default_hooks.allreduce_hook(None, bucket)


def around_a_users_hook(rank: int) -> list[Tensor]:
    wrapped = model()
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_wrapper(users_hook))
    return gradients(rank, wrapped)


def within_a_users_hook(rank: int) -> list[Tensor]:
    wrapped = model()
    wrapped.register_comm_hook(
        None, lambda state, bucket: default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)(state, bucket)
    )
    return gradients(rank, wrapped)


@pytest.mark.parametrize("program", [around_a_users_hook, within_a_users_hook])
def test_a_wrapper_around_a_hook_of_ones_own_or_within_it_is_torchs(ranks: RankPool, program: Program) -> None:
    assert_as_without(ranks, program)


def with_an_optimizer(rank: int, make: Callable[[], tuple[object, Callable[..., Any]]]) -> list[Tensor]:
    """The optimizer's steps are part of the hook."""
    wrapped = model()
    state, hook = make()
    optimizer = _FunctionalSGD([], 0.1, _allow_empty_param_list=True)
    of_optimizer = optimizer_overlap_hooks._OptimizerHookState(optimizer, list(wrapped.parameters()))
    wrapped.register_comm_hook(state, optimizer_overlap_hooks._hook_then_optimizer(hook, of_optimizer))
    return gradients(rank, wrapped)


def casting() -> tuple[object, Callable[..., Any]]:
    return None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)


def compressing() -> tuple[object, Callable[..., Any]]:
    return power_sgd.PowerSGDState(None, **SETTINGS), power_sgd.powerSGD_hook


@pytest.mark.parametrize("make", [casting, compressing])
def test_optimizers_run_behind_hooks_as_in_torch(ranks: RankPool, make: Callable[..., Any]) -> None:
    assert_as_without(ranks, with_an_optimizer, make)


def saved_with_a_wrapper(rank: int) -> bool:
    with fastddp.patch():
        wrapped = model()
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_wrapper(users_hook))
        gradients(rank, wrapped, 1)
        copy = pickle.loads(pickle.dumps(wrapped))
        return all(map(torch.equal, gradients(rank, copy, 2), gradients(rank, wrapped, 2)))


def test_a_model_with_a_wrapped_hook_is_pickled_behind_the_patch_too(ranks: RankPool) -> None:
    assert ranks.run(saved_with_a_wrapper, 2) == [True, True]


# ---------------------------------------------------------------------------------------------------------- PowerSGD


def by_enum(rank: int, name: str) -> tuple[bool, int, list[Tensor]]:
    with fastddp.patch():
        wrapped = model()
        DDPCommHookType[name].value(model=wrapped, state=None, start_powerSGD_iter=2)
        found = gradients(rank, wrapped)
    assert isinstance(wrapped._exchange, PowerSGD)
    return wrapped._exchange.batched, wrapped._exchange.state.matrix_approximation_rank, found


@pytest.mark.parametrize("batched", [False, True], ids=["", "batched"])
@pytest.mark.parametrize("rank", [1, 2])
def test_torchs_enum_of_hooks_stands_for_native_power_sgd(ranks: RankPool, batched: bool, rank: int) -> None:
    name = "BATCHED_" * batched + "POWER_SGD" + "_RANK2" * (rank == 2)
    (first_batched, first_rank, first), (_, _, second) = ranks.run(by_enum, 2, name)
    assert (first_batched, first_rank) == (batched, rank)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def registered_by_enum(rank: int, name: str) -> list[Tensor]:
    wrapped = model()
    ddp_comm_hooks.register_ddp_comm_hook(DDPCommHookType[name], wrapped, state=None)
    return gradients(rank, wrapped, 2)


@pytest.mark.parametrize("name", ["ALLREDUCE", "POWER_SGD", "BATCHED_POWER_SGD_RANK2", "NOOP"])
def test_hooks_registered_by_that_enum_are_torchs(ranks: RankPool, name: str) -> None:
    assert_as_without(ranks, registered_by_enum, name)


def called(rank: int, kept: bool = False) -> list[Tensor]:
    state = power_sgd.PowerSGDState(None, **SETTINGS)
    wrapped = model()
    wrapped.register_comm_hook(state, lambda state, bucket: (KEPT if kept else power_sgd.powerSGD_hook)(state, bucket))
    found = gradients(rank, wrapped)
    return [*found, torch.tensor([state.iter, *state.compression_stats()])]


@pytest.mark.parametrize("kept", [False, True], ids=["by name", "kept before the patch"])
def test_called_by_a_hook_of_ones_own_power_sgd_is_torchs(ranks: RankPool, kept: bool) -> None:
    assert_as_without(ranks, called, kept)


def without_a_patch(rank: int, state: str, names: str) -> tuple[bool, bool]:
    """By fastddp's wrapper: whether a Python hook runs, and whether it is torch's."""
    expected = called(rank)[:-1]
    torch.manual_seed(1)
    wrapped = fastddp.DistributedDataParallel(model().module)
    hook = {"torch's": power_sgd, "fastddp's": comm_hooks}[names].powerSGD_hook
    made = {"torch's": comm_hooks.TorchPowerSGDState, "fastddp's": comm_hooks.PowerSGDState}[state](None, **SETTINGS)
    in_a_hook = state == "fastddp's"  # of one's own
    wrapped.register_comm_hook(made, (lambda state, bucket: hook(state, bucket)) if in_a_hook else hook)
    same = all(map(torch.equal, expected, gradients(rank, wrapped)))
    return isinstance(wrapped._exchange, PythonHook), same


@pytest.mark.parametrize(
    ("state", "names"), [("fastddp's", "fastddp's"), ("torch's", "torch's"), ("torch's", "fastddp's")]
)
def test_so_it_is_without_a_patch_and_with_torchs_state_by_either_name(ranks: RankPool, state: str, names: str) -> None:
    assert ranks.run(without_a_patch, 2, state, names) == [(True, True)] * 2


def test_fastddps_state_has_all_that_torchs_hook_asks_for() -> None:
    state = comm_hooks.PowerSGDState(None)
    public = [name for name in dir(power_sgd.PowerSGDState) if not name.startswith("__")]
    assert [name for name in public if not hasattr(state, name)] == []


# ---------------------------------------------------------------------------------------------------------- pickles


def torchs_pickle(rank: int) -> bytes:
    """A state of torch's, after some steps."""
    state = power_sgd.PowerSGDState(None, random_seed=3, **SETTINGS)
    wrapped = model()
    wrapped.register_comm_hook(state, power_sgd.powerSGD_hook)
    gradients(rank, wrapped)
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def resumed(rank: int, pickles: list[bytes]) -> list[Tensor]:
    state = torch.load(io.BytesIO(pickles[rank]), weights_only=False)
    assert state.iter == 5
    state.start_powerSGD_iter = 7  # when buckets are what they were: torch's memory fits no others
    wrapped = model()
    wrapped.register_comm_hook(state, lambda state, bucket: power_sgd.powerSGD_hook(state, bucket))
    return gradients(rank, wrapped)


def test_torchs_hook_goes_on_from_a_pickle_of_torchs_state(ranks: RankPool) -> None:
    assert_as_without(ranks, resumed, ranks.run(torchs_pickle, 2))


def resumed_natively(rank: int, hook: str, pickles: list[bytes]) -> tuple[str, int, dict[str, int], list[Tensor]]:
    with fastddp.patch():
        state = pickle.loads(pickle.dumps(torch.load(io.BytesIO(pickles[rank]), weights_only=False)))
        wrapped = model()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wrapped.register_comm_hook(state, getattr(power_sgd, hook))
        found = gradients(rank, wrapped, 3)
    assert isinstance(wrapped._exchange, PowerSGD)
    kept = {name: getattr(state, name) for name in [*SETTINGS, "random_seed"]}
    return "\n".join(str(warning.message) for warning in caught), state.iter, kept, found


@HOOKS
def test_fastddps_takes_settings_and_iterations_from_it_and_says_that_errors_are_lost(
    ranks: RankPool, hook: str
) -> None:
    (said, iterations, kept, first), (_, _, _, second) = ranks.run(
        resumed_natively, 2, hook, ranks.run(torchs_pickle, 2)
    )
    assert "errors and Q begin anew" in said
    assert iterations == 5 + 3
    assert kept == SETTINGS | {"random_seed": 0}  # which torch's state does not keep
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def state_dict_of_a_called_state(rank: int) -> bool:
    state = comm_hooks.PowerSGDState(None, **SETTINGS)
    wrapped = fastddp.DistributedDataParallel(nn.Linear(40, 40))
    wrapped.register_comm_hook(state, lambda state, bucket: comm_hooks.powerSGD_hook(state, bucket))
    for _ in range(2):
        wrapped(torch.ones(1, 40)).sum().backward()
    early = state.state_dict()["iter"] == 2
    wrapped(torch.ones(1, 40)).sum().backward()
    with pytest.raises(RuntimeError, match=r"is not in a state_dict\(\)\. Pickle the state"):
        state.state_dict()
    copy = pickle.loads(pickle.dumps(state))
    return early and torch.equal(copy.error_dict[0], state.error_dict[0]) and copy.iter == 3


def test_what_torchs_hook_remembers_is_kept_by_pickles_and_state_dict_says_so(ranks: RankPool) -> None:
    assert ranks.run(state_dict_of_a_called_state, 2) == [True, True]
