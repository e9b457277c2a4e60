"""How training programs (``training_programs.py``) are run by fastddp, and compared with their oracle."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastddp
from fastddp import comm_hooks
from models import Expected, RaisesInBackward
from training_oracle import OPTIMIZERS, Oracle, curvature, factors, first_values, groups_of
from training_programs import LOOK, Op, TrainingProgram, draw_program


class _Layer(nn.Module):
    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.parameter = nn.Parameter(values)


class Model(nn.Module):
    """Each parameter's gradient is a given number for each element, and a part of the parameter."""

    def __init__(self, program: TrainingProgram, rank: int) -> None:
        super().__init__()
        self.program, self.rank = program, rank
        dtype = getattr(torch, program.dtype)
        self.layers = nn.ModuleList([_Layer(values.to(dtype)) for values in first_values(program)])

    def forward(self, number: int, skip: frozenset[int], fails: bool = False) -> Tensor:
        losses = []
        for index, layer in enumerate(self.layers):
            if index not in skip:
                parameter: Any = layer.parameter
                given = factors(self.program, self.rank, number, index).to(parameter.dtype)
                losses.append((parameter * given).sum() + curvature(self.program) / 2 * parameter.square().sum())
        if fails:
            losses[0] = RaisesInBackward.apply(losses[0])
        return torch.stack(losses).sum()


class Execution:
    """The program on one rank."""

    def __init__(self, program: TrainingProgram, rank: int) -> None:
        self.program, self.rank = program, rank
        self.model = fastddp.DistributedDataParallel(
            Model(program, rank),
            gradient_as_bucket_view=program.view,
            bucket_cap_mb=program.bucket_cap_mb,
            find_unused_parameters=program.usage == "find_unused_parameters",
            static_graph=program.usage == "static_graph",
            lazy_bucket_allocation=program.lazy_bucket_allocation,
            watch=fastddp.Watch(stall=None),
        )
        self.parameters: list[Any] = list(self.model.module.parameters())
        self.optimizer: Any = None
        self._saved: Any = None
        self._hook_state: Any = None
        self._forwards = 0

    def run(self, op: Op) -> None:
        getattr(self, op.name)(*op.arguments)

    def _forward(self, skip: frozenset[int] = frozenset(), fails: bool = False) -> Tensor:
        self._forwards += 1
        loss: Tensor = self.model(self._forwards - 1, skip, fails)
        return loss

    def _syncing(self, sync: bool) -> Any:
        return contextlib.nullcontext() if sync else self.model.no_sync()

    def backward(self, sync: bool, skip: tuple[frozenset[int], ...], forwards: int, local_forwards: int) -> None:
        """Over the sum of the losses of some forwards, after some under no_sync.

        ``skip``: by rank, parameters that it does not use, where that is legal.
        """
        with self.model.no_sync():
            losses = [self._forward(skip[self.rank]) for _ in range(local_forwards)]
        with self._syncing(sync):
            losses += [self._forward(skip[self.rank]) for _ in range(forwards)]
            torch.stack(losses).sum().backward()

    def halves(self, split: int) -> None:
        """Two forwards, of the parameters up to one and of the others; then a backward for each."""
        first = frozenset(range(split))
        every = frozenset(range(len(self.parameters)))
        for loss in [self._forward(every - first), self._forward(first)]:
            loss.backward()

    def forward(self, with_gradients: bool, sync: bool) -> None:
        """Without a backward."""
        with contextlib.nullcontext() if with_gradients else torch.no_grad(), self._syncing(sync):
            self._forward()

    def fail(self, repairs: bool) -> None:
        """A backward raises on all ranks; then gradients are removed. ``repairs``: the next forward comes at once."""
        skip = self.program.unused[self.rank] if self.program.usage == "static_graph" else frozenset[int]()
        with contextlib.suppress(Expected):
            self._forward(skip, fails=True).backward()
            raise AssertionError("backward did not raise")
        self.model.zero_grad()
        if repairs:
            self.run(LOOK)

    def zero(self, how: str) -> None:
        in_place = how.endswith("in place")
        if how.startswith("optimizer") and self.optimizer is not None:
            return self.optimizer.zero_grad(set_to_none=not in_place)
        if how.startswith(("optimizer", "model")):
            return self.model.zero_grad(set_to_none=not in_place)
        if how == "module, in place":
            return self.model.module.zero_grad(set_to_none=False)
        for parameter in self.parameters:
            if how == "zero_":
                if parameter.grad is not None:
                    parameter.grad.zero_()
            else:
                parameter.grad = None if how == "None" else torch.zeros_like(parameter)
        return None

    def step(self, looks: bool) -> None:
        """``looks``: whether parameters are read at once."""
        self.optimizer.step()
        if looks and self.program.sharded:
            self.optimizer.parameters_ready()

    def clip(self, norm: float) -> None:
        fastddp.clip_grad_norm_(self.model, norm)

    def discard(self) -> None:
        """A step is not taken, and the model is told."""
        self.model.discard_step()
        self.zero("optimizer")

    def make_optimizer(self) -> None:
        """Another one, which knows nothing of the one before, if there was one."""
        program = self.program
        if self.optimizer is not None:
            self.model.zero_grad()
            self.optimizer = None
        kind, settings = OPTIMIZERS[program.optimizer]
        groups = groups_of(program, self.parameters)
        self.optimizer = (
            kind(groups, **settings)
            if program.sharded is None
            else fastddp.ShardedOptimizer(
                self.model, kind, groups, shard=program.sharded, gather=program.gather, **settings
            )
        )

    def save(self, whole: bool) -> None:
        self.model.parameters_ready()
        state = self.optimizer.full_state_dict() if whole and self.program.sharded else self.optimizer.state_dict()
        self._saved = copy.deepcopy(([parameter.detach().clone() for parameter in self.parameters], state))

    @torch.no_grad()
    def load(self, into_another: bool) -> None:
        """What was saved, into the optimizer or into another one."""
        if into_another:
            self.make_optimizer()
        self.model.parameters_ready()
        values, state = copy.deepcopy(self._saved)
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.copy_(value)
        self.optimizer.load_state_dict(state)

    def register_hook(self) -> None:
        hook = self.program.hook
        if hook == "int8":
            self._hook_state = comm_hooks.BlockState()
        elif hook == "PowerSGD":
            self._hook_state = comm_hooks.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=0.5)
        if hook != "none":
            name = "powerSGD_hook" if hook == "PowerSGD" else f"{hook}_compress_hook"
            self.model.register_comm_hook(self._hook_state, getattr(comm_hooks, name))

    def errors(self) -> list[Tensor]:
        """By parameter, what averages lack and a hook remembers, in fp64. A collective."""
        ranks = dist.get_world_size() if self.program.hook == "PowerSGD" else 1
        known = {} if self._hook_state is None else self._hook_state.errors
        found = []
        for name, parameter in self.model.module.named_parameters():
            error = known.get(name)
            found.append(torch.zeros(parameter.numel()) if error is None else error.flatten()[: parameter.numel()])
        together = torch.cat([error.double() / ranks for error in found])
        dist.all_reduce(together)
        parts = together.split([len(error) for error in found])
        return [part.view(parameter.shape) for part, parameter in zip(parts, self.parameters, strict=True)]


class _Errors:
    """What a hook remembers after each op: the oracle learns it of windows, and it is right where no step is taken."""

    def __init__(self, oracle: Oracle, execution: Execution) -> None:
        self.oracle, self.execution = oracle, execution
        self.now = self.at_step = execution.errors()

    def run(self, op: Op) -> str:
        windows, steps, was_pending = self.oracle.windows, self.oracle.steps, self.oracle.is_pending
        self.execution.run(op)
        self.oracle.run(op)
        now = self.execution.errors()
        if self.oracle.windows > windows:
            self.oracle.lack([after - before for after, before in zip(now, self.now, strict=True)])
            self.now = now
        elif self.oracle.steps > steps:
            self.now = self.at_step = now
        elif op.name in ("discard", "fail"):
            self.now = self.at_step
            return _far("error", now, self.at_step, 0.0)
        elif op.name == "zero" and was_pending:  # the step is not taken, which the next forward may find out
            self.now = self.at_step
        return ""


def difference(program: TrainingProgram, rank: int) -> str:
    """How the program went on this rank otherwise than it should; empty: all is well."""
    oracle, execution = Oracle(program, dist.get_world_size()), Execution(program, rank)
    errors = _Errors(oracle, execution) if program.hook_remembers else None
    looks = [Op("step", (True,)), *([] if program.gather == "forward" else [Op("step", (False,))])]
    for number, drawn in enumerate(program.ops):
        if (op := oracle.legal(drawn)) is None:
            continue
        found = ""
        try:
            if errors is not None:
                found = errors.run(op)
            else:
                execution.run(op)
                oracle.run(op)
        except Exception as error:
            error.add_note(f"in op {number}, {op}, of {program}")
            raise
        if not found and (op.name == "load" or op in looks):
            found = _far("parameter", execution.parameters, oracle.parameters, oracle.tolerance())
        if found:
            return f"after op {number}, {op}: {found}"
    execution.model.parameters_ready()
    found = _far("parameter", execution.parameters, oracle.parameters, oracle.tolerance())
    return f"at the end: {found}" if found else _unequal_ranks(execution.parameters)


@torch.no_grad()
def _far(name: str, ours: list[Tensor], theirs: Sequence[Tensor], tolerance: float) -> str:
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        distance = (one.double() - other.double()).abs().max().item()
        if not distance <= tolerance:
            return f"{name} {index} is {distance:.3g} off"
    return ""


@torch.no_grad()
def _unequal_ranks(parameters: list[Tensor]) -> str:
    own = torch.cat([parameter.flatten().double() for parameter in parameters])
    first = own.clone()
    dist.broadcast(first, 0)
    return "" if torch.equal(own, first) else "ranks have other parameters"


def differences(rank: int, seeds: Sequence[int]) -> list[str]:
    """Of the programs of these seeds, by seed."""
    found = []
    for seed in seeds:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                text = difference(draw_program(seed, dist.get_world_size()), rank)
        except Exception as error:
            error.add_note(f"with seed {seed}")
            raise
        if text:
            found.append(f"{seed}: {text}")
    return found
