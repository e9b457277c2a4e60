"""The run of one rank, in which a bit flips or none does, and what it has seen."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastddp
from bench.bit_flips import flips
from bench.bit_flips.flipping import Damage, Flipping, flip_bit
from bench.bit_flips.flips import BF16_WIRE, FIRST_STEP, FIRST_STEPS, FP16_WIRE, Flip
from fastddp import comm_hooks
from fastddp.exchange import descriptions

AUDIT_EVERY = 20
WITHIN = AUDIT_EVERY + AUDIT_EVERY // 10 + 1
"""Steps in which what differs between replicas, and stays so, has to be found: api.md, and one that tells."""
WITHIN_TWO_ROUNDS = WITHIN + AUDIT_EVERY
"""The same where it may go from a state to its parameter, after the parameter's turn."""
_BUCKET_MB = 0.004
_HOOKS = {BF16_WIRE: comm_hooks.bf16_compress_hook, FP16_WIRE: comm_hooks.fp16_compress_hook}


class Net(nn.Sequential):
    """6,376 parameters in six tensors and several buckets."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))


PARAMETERS = 6
STEPS = FIRST_STEP + FIRST_STEPS + WITHIN
STEPS_OF_TWO_ROUNDS = STEPS + AUDIT_EVERY


@dataclass(frozen=True)
class Said:
    """One corruption, as a rank was told of it."""

    told: int  # in which step, from 0
    kind: str
    step: int  # in which step it says that it was
    ranks: tuple[int, ...]
    parameter: str | None


@dataclass
class Seen:
    """What a rank has seen of one run."""

    parameter: str  # in which the bit flipped
    said: list[Said]
    numbers: list[Tensor]  # parameters at the end, and then the optimizer's state
    flipped_at: list[int]  # the first step, if it happened on this rank; else empty

    def is_like(self, other: Seen) -> bool:
        """Whether all bits at the end are equal."""
        pairs = zip(self.numbers, other.numbers, strict=True)
        return all(torch.equal(_bits(one), _bits(two)) for one, two in pairs)

    def distance(self, other: Seen) -> float:
        """The largest difference between elements of parameters; infinite where one is not finite."""
        pairs = list(zip(self.numbers, other.numbers, strict=True))[:PARAMETERS]
        return max((one.double() - two.double()).abs().nan_to_num(math.inf).max().item() for one, two in pairs)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


class Training:
    """One run over the default process group; made on all ranks alike.

    Args:
        flip: what flips.
        happens: whether it does. Otherwise this is the same training without it.
    """

    def __init__(self, flip: Flip, happens: bool) -> None:
        self._flip, self._happens = flip, happens
        self._rank = dist.get_rank()
        self._step = -1
        self._said: list[Said] = []
        self._flipped_at: list[int] = []
        torch.manual_seed(0)
        module = Net().to(flip.precision.parameters)
        self._model = fastddp.DistributedDataParallel(
            module,
            bucket_cap_mb=_BUCKET_MB,
            watch=fastddp.Watch(audit_every=AUDIT_EVERY, corruption=self._note, stall=None),
        )
        hook = _HOOKS.get(flip.precision)
        if hook is not None:
            self._model.register_comm_hook(None, hook)
        self._optimizer = _optimizer(flip.optimizer, self._model)
        if flip.target != flips.STATE_NOT_AUDITED:
            self._model.audit(self._optimizer)
        self._name, self._parameter = list(module.named_parameters())[flip.parameter]
        self._parameter.register_post_accumulate_grad_hook(self._on_gradient)
        self._wire = Flipping(dist.group.WORLD)  # type: ignore[arg-type]

    def run(self) -> Seen:
        """All steps."""
        for step in range(_steps(self._flip.target)):
            self._step = step
            if step == FIRST_STEP:
                travel_over(self._wire, self._model)
            self._run_step()
        state = self._optimizer.state
        numbers = [p.detach() for p in self._model.parameters()]
        numbers += [value for p in self._model.parameters() for value in state[p].values() if torch.is_tensor(value)]
        return Seen(self._name, self._said, numbers, self._flipped_at)

    def _run_step(self) -> None:
        target = self._flip.target
        self._optimizer.zero_grad()
        if self._flips_now(flips.PARAMETER):
            self._flip_in(self._parameter)
        if self._flips_now(flips.STATE, flips.STATE_NOT_AUDITED):
            self._flip_in(self._state())
        inputs, wanted = self._batch()
        outputs = self._model(inputs)
        self._wire.begin_step(self._damage() if self._happens and target == flips.BACK else None)
        (outputs - wanted).square().mean().backward()
        if self._wire.has_flipped and not self._flipped_at:
            self._flipped_at.append(self._step)
        if self._flips_now(flips.AVERAGED_GRADIENT):
            assert self._parameter.grad is not None
            self._flip_in(self._parameter.grad)
        self._optimizer.step()

    def _batch(self) -> tuple[Tensor, Tensor]:
        chance = torch.Generator().manual_seed(100 * self._step + self._rank)
        inputs = torch.randn(16, 24, generator=chance)
        return inputs.to(self._parameter.dtype), inputs[:, :8].sin().to(self._parameter.dtype)

    # ----------------------------------------------------------------------------------------------------- the flip

    def _flips_now(self, *targets: flips.Target) -> bool:
        flip = self._flip
        return self._happens and flip.target in targets and (flip.step, flip.rank) == (self._step, self._rank)

    def _flip_in(self, tensor: Tensor) -> None:
        flip_bit(tensor, self._flip.bit, self._flip.element(tensor.numel()))
        self._flipped_at.append(self._step)

    def _on_gradient(self, parameter: Tensor) -> None:
        if self._flips_now(flips.LOCAL_GRADIENT):
            assert parameter.grad is not None
            self._flip_in(parameter.grad)

    def _state(self) -> Tensor:
        # Adam's count of steps is left out: with a wrong one it may raise.
        state = self._optimizer.state[self._parameter]
        tensors = [state[name] for name in sorted(state) if torch.is_tensor(state[name]) and state[name].dim() > 0]
        return tensors[self._flip.state % len(tensors)]

    def _damage(self) -> Damage | None:
        """To the wire of the step that begins."""
        flip, setting = self._flip, self._model.engine.now.setting
        if self._step != flip.step:
            return None
        bucket = next(number for number, members in enumerate(setting.plan) if flip.parameter in members)
        before = itertools.takewhile(lambda member: member != flip.parameter, setting.plan[bucket])
        apart = 16 // flip.precision.wire.itemsize  # Note [Aligned members], csrc/bucket/layout.h
        begin = sum(-(-setting.parameters[member].numel() // apart) * apart for member in before)
        element = begin + flip.element(self._parameter.numel())
        return Damage(bucket, element, flip.bit, flip.rank, flip.precision.wire)

    def _note(self, told: fastddp.Corruption) -> None:
        self._said.append(Said(self._step, told.kind, told.step - 1, told.ranks, told.parameter))


def _steps(target: flips.Target) -> int:
    return STEPS_OF_TWO_ROUNDS if target.makes_ranks_differ else STEPS


def travel_over(group: dist.ProcessGroup, model: fastddp.DistributedDataParallel) -> None:
    """The exchange in use, made once more, over `group`."""
    setting = dataclasses.replace(model.engine.now.setting, several_lanes=True)
    by_messages = mock.patch.object(descriptions, "processes_of", return_value=())
    with mock.patch.object(descriptions, "lanes_for", return_value=[group]), by_messages:
        model.reducer.set_way(model.engine.now.exchange.make(setting))


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    kinds: dict[str, Any] = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        "adam": lambda: torch.optim.Adam(model.parameters(), lr=1e-3),
    }
    return kinds[name]()
