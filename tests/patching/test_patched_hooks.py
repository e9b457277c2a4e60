"""Communication hooks of programs that know nothing of fastddp: under the patch they do what they do without it.

A program is run as it is and then under the patch, in the same process: names are looked up when it runs.
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
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms import ddp_comm_hooks
from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType, default_hooks, optimizer_overlap_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.optim.functional_sgd import _FunctionalSGD

import fastddp
from fastddp import comm_hooks
from fastddp.compression.power_sgd import PowerSGD
from fastddp.exchange.descriptions import PythonHook
from on_ranks import differences, of_ranks, on_ranks

KEPT = functools.partial(power_sgd.powerSGD_hook)  # in which no patch finds torch's function
SETTINGS = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2}


def model() -> Any:
    torch.manual_seed(1)
    return torch.nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 40)))


def train(model: nn.Module, steps: int = 5) -> list[Tensor]:
    """The gradients of each step, and in the end the parameters, which a hook may have changed."""
    found = []
    for step in range(steps):
        model.zero_grad()
        inputs = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(inputs).square().mean().backward()
        found += [parameter.grad.clone() for parameter in model.parameters()]
    return found + [parameter.detach().clone() for parameter in model.parameters()]


def trained_with(state: object, hook: Callable[..., Any]) -> list[Tensor]:
    wrapped = model()
    wrapped.register_comm_hook(state, hook)
    return train(wrapped)


def of_torch(**settings: Any) -> Any:
    return power_sgd.PowerSGDState(None, **SETTINGS, **settings)


def users_hook(state, bucket):  # type: ignore[no-untyped-def]  # torch does not read annotations that are strings
    return default_hooks.allreduce_hook(None, bucket)


def before_an_optimizer(state: object, hook: Callable[..., Any]) -> list[Tensor]:
    """Whose steps are part of the hook."""
    wrapped = model()
    optimizer = _FunctionalSGD([], 0.1, _allow_empty_param_list=True)
    of_optimizer = optimizer_overlap_hooks._OptimizerHookState(optimizer, list(wrapped.parameters()))
    wrapped.register_comm_hook(state, optimizer_overlap_hooks._hook_then_optimizer(hook, of_optimizer))
    return train(wrapped)


def by_enum(name: str) -> list[Tensor]:
    wrapped = model()
    ddp_comm_hooks.register_ddp_comm_hook(DDPCommHookType[name], wrapped, state=None)
    return train(wrapped, 2)


def called(hook: Callable[..., Any] | None = None) -> list[Tensor]:
    """PowerSGD, by a hook of one's own."""
    state = of_torch()
    found = trained_with(state, lambda state, bucket: (hook or power_sgd.powerSGD_hook)(state, bucket))
    return [*found, torch.tensor([state.iter, *state.compression_stats()])]


def pickled_state() -> bytes:
    state, file = of_torch(random_seed=3), io.BytesIO()
    trained_with(state, power_sgd.powerSGD_hook)
    torch.save(state, file)
    return file.getvalue()


PROGRAMS: dict[str, Callable[[], list[Tensor]]] = {
    "a wrapper around a users hook": lambda: trained_with(None, default_hooks.fp16_compress_wrapper(users_hook)),
    "a wrapper within a users hook": lambda: trained_with(
        None, lambda state, bucket: default_hooks.bf16_compress_wrapper(users_hook)(state, bucket)
    ),
    "an optimizer after a cast": lambda: before_an_optimizer(
        None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    ),
    "an optimizer after PowerSGD": lambda: before_an_optimizer(of_torch(), power_sgd.powerSGD_hook),
    "PowerSGD called by name": called,
    "PowerSGD kept before the patch": lambda: called(KEPT),
    **{f"enum {name}": functools.partial(by_enum, name) for name in ("ALLREDUCE", "POWER_SGD", "NOOP")},
}


@pytest.mark.parametrize("program", [*PROGRAMS, "PowerSGD from a pickle"])
@on_ranks(2)
def test_a_program_does_what_it_does_without_the_patch(rank: int, program: str) -> None:
    pickled = pickled_state()

    def resumed() -> list[Tensor]:
        state = torch.load(io.BytesIO(pickled), weights_only=False)
        assert state.iter == 5
        state.start_powerSGD_iter = 7  # when buckets are what they were: torch's memory fits no others
        return trained_with(state, lambda state, bucket: power_sgd.powerSGD_hook(state, bucket))

    run = PROGRAMS.get(program, resumed)
    expected = run()
    assert any(tensor.any() for tensor in expected)
    with fastddp.patch():
        assert isinstance(model(), fastddp.DistributedDataParallel)
        assert differences(expected, run()) == []


# ------------------------------------------------------------------------------------------------------ native PowerSGD


@pytest.mark.parametrize("batched", [False, True], ids=["", "batched"])
@pytest.mark.parametrize("number", [1, 2])
@on_ranks(2)
def test_torchs_enum_of_hooks_stands_for_native_power_sgd(rank: int, batched: bool, number: int) -> None:
    with fastddp.patch():
        wrapped = model()
        hook = DDPCommHookType["BATCHED_" * batched + "POWER_SGD" + "_RANK2" * (number == 2)]
        hook.value(model=wrapped, state=None, start_powerSGD_iter=2)
        train(wrapped)
    exchange = wrapped.engine.now.exchange
    assert isinstance(exchange, PowerSGD)
    assert (exchange.batched, exchange.state.matrix_approximation_rank) == (batched, number)


@pytest.mark.parametrize(
    ("state", "names"), [("fastddp's", "fastddp's"), ("torch's", "torch's"), ("torch's", "fastddp's")]
)
@on_ranks(2)
def test_without_a_patch_a_users_hook_and_torchs_state_run_torchs_power_sgd(rank: int, state: str, names: str) -> None:
    expected = called()[:-1]
    torch.manual_seed(1)
    wrapped = fastddp.DistributedDataParallel(model().module)
    hook = {"torch's": power_sgd, "fastddp's": comm_hooks}[names].powerSGD_hook
    made = {"torch's": comm_hooks.TorchPowerSGDState, "fastddp's": comm_hooks.PowerSGDState}[state](None, **SETTINGS)
    wrapped.register_comm_hook(made, hook if state == "torch's" else lambda state, bucket: hook(state, bucket))
    assert differences(expected, train(wrapped)) == []
    assert isinstance(wrapped.engine.now.exchange, PythonHook)


@pytest.mark.parametrize("hook", ["powerSGD_hook", "batched_powerSGD_hook"])
@on_ranks(2)
def test_a_pickle_of_torchs_state_gives_all_but_errors_and_says_so(rank: int, hook: str) -> None:
    pickled = pickled_state()
    with fastddp.patch(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = pickle.loads(pickle.dumps(torch.load(io.BytesIO(pickled), weights_only=False)))
        wrapped = model()
        wrapped.register_comm_hook(state, getattr(power_sgd, hook))
        first, second = of_ranks(train(wrapped, 3))
    assert isinstance(wrapped.engine.now.exchange, PowerSGD)
    assert any("errors and Q begin anew" in str(warning.message) for warning in caught)
    assert state.iter == 5 + 3
    assert {name: getattr(state, name) for name in SETTINGS} == SETTINGS
    assert state.random_seed == 0  # which torch's state does not keep
    assert differences(first, second) == []


@on_ranks(2)
def test_what_torchs_hook_remembers_is_kept_by_pickles_and_state_dict_says_so(rank: int) -> None:
    state = comm_hooks.PowerSGDState(None, **SETTINGS)
    wrapped = fastddp.DistributedDataParallel(nn.Linear(40, 40))
    wrapped.register_comm_hook(state, lambda state, bucket: comm_hooks.powerSGD_hook(state, bucket))
    for step in range(3):
        assert state.state_dict()["iter"] == step
        wrapped(torch.ones(1, 40)).sum().backward()
    with pytest.raises(RuntimeError, match=r"is not in a state_dict\(\)\. Pickle the state"):
        state.state_dict()
    copy = pickle.loads(pickle.dumps(state))
    assert copy.iter == 3
    assert torch.equal(copy.error_dict[0], state.error_dict[0])
