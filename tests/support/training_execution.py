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
from training_programs import (
    Backward,
    Clip,
    Discard,
    Fail,
    Forward,
    Halves,
    Load,
    MakeOptimizer,
    Op,
    RegisterHook,
    Save,
    Step,
    TrainingProgram,
    Zero,
    draw_program,
)

_Errors = list[Tensor]


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
            main_grads=program.main_grads,
            lazy_bucket_allocation=program.lends_wires,
            watch=fastddp.Watch(stall=None),
        )
        self.parameters: list[Any] = list(self.model.module.parameters())
        self.optimizer: Any = None
        self._masters: list[nn.Parameter] = []
        self._saved: Any = None
        self._state: Any = None
        self._forwards = 0

    # ------------------------------------------------------------------------------------------------------- a window

    def _forward(self, skip: frozenset[int], fails: bool = False) -> Tensor:
        self._forwards += 1
        loss: Tensor = self.model(self._forwards - 1, skip, fails)
        return loss

    def _syncing(self, sync: bool) -> Any:
        return contextlib.nullcontext() if sync else self.model.no_sync()

    def run(self, op: Op) -> None:
        self._run_window(op)
        self._run_optimizer(op)

    def _run_window(self, op: Op) -> None:
        match op:
            case Backward():
                self._backward(op)
            case Halves():
                first = frozenset(range(op.split))
                every = frozenset(range(len(self.parameters)))
                losses = [self._forward(every - first), self._forward(first)]
                for loss in losses:
                    loss.backward()
            case Forward():
                with contextlib.nullcontext() if op.with_gradients else torch.no_grad(), self._syncing(op.sync):
                    self._forward(frozenset())
            case Fail():
                self._fail(op.repairs)
            case Zero():
                self._zero(op.how)

    def _run_optimizer(self, op: Op) -> None:
        match op:
            case Step():
                self._step(op.looks)
            case Clip():
                fastddp.clip_grad_norm_(self.model, op.norm)
            case Discard():
                self.model.discard_step()
                self._zero("optimizer")
            case MakeOptimizer():
                self._make_optimizer()
            case RegisterHook():
                self._register_hook()
            case Save():
                self._save(op.whole)
            case Load():
                self._load(op.into_another)

    def _backward(self, op: Backward) -> None:
        skip = op.skip[self.rank]
        with self.model.no_sync():
            losses = [self._forward(skip) for _ in range(op.local_forwards)]
        with self._syncing(op.sync):
            losses += [self._forward(skip) for _ in range(op.forwards)]
            torch.stack(losses).sum().backward()

    def _fail(self, repairs: bool) -> None:
        skip = self.program.unused[self.rank] if self.program.usage == "static_graph" else frozenset[int]()
        with contextlib.suppress(Expected):
            self._forward(skip, fails=True).backward()
            raise AssertionError("backward did not raise")
        self.model.zero_grad()
        if repairs:
            with torch.no_grad():
                self._forward(frozenset())

    def _zero(self, how: str) -> None:
        in_place = how.endswith("in place")
        if self.program.main_grads == "main_grad" and how in ("optimizer", "module, in place", "None", "zeros"):
            return self.model.zero_grad()
        if how.startswith("optimizer") and self.optimizer is not None and not self._masters:
            return self.optimizer.zero_grad(set_to_none=not in_place)
        if how.startswith(("optimizer", "model")):
            return self.model.zero_grad(set_to_none=not in_place)
        if how == "module, in place":
            return self.model.module.zero_grad(set_to_none=False)
        for parameter in self.parameters:
            self._zero_one(parameter, how)
        return None

    def _zero_one(self, parameter: Any, how: str) -> None:
        if how == "zero_":
            gradient = parameter.main_grad if self.program.main_grads == "main_grad" else parameter.grad
            if gradient is not None:
                gradient.zero_()
        elif how == "None":
            parameter.grad = None
        elif parameter.dtype == torch.bfloat16:
            parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
        else:
            parameter.grad = torch.zeros_like(parameter)

    # --------------------------------------------------------------------------------------------------- an optimizer

    def _make_optimizer(self) -> None:
        program = self.program
        if self.optimizer is not None:
            self.model.zero_grad()
            self.optimizer = None
        kind, settings = OPTIMIZERS[program.optimizer]
        groups = groups_of(program, self.parameters)
        if program.sharded is not None:
            self.optimizer = fastddp.ShardedOptimizer(
                self.model, kind, groups, shard=program.sharded, gather=program.gather, **settings
            )
            return
        if program.main_grads == "main_grad":
            self._masters = [nn.Parameter(parameter.detach().clone()) for parameter in self.parameters]
            groups = groups_of(program, self._masters)
        self.optimizer = kind(groups, **settings)

    def _step(self, looks: bool) -> None:
        for parameter, master in zip(self.parameters, self._masters, strict=False):
            master.grad = parameter.main_grad
        self.optimizer.step()
        self._follow()
        if looks and self.program.sharded is not None:
            self.optimizer.parameters_ready()

    @torch.no_grad()
    def _follow(self) -> None:
        for parameter, master in zip(self.parameters, self._masters, strict=False):
            parameter.copy_(master)

    def _save(self, whole: bool) -> None:
        self.model.parameters_ready()
        state = self.optimizer.full_state_dict() if whole and self.program.sharded else self.optimizer.state_dict()
        self._saved = copy.deepcopy(([parameter.detach().clone() for parameter in self.parameters], state))

    @torch.no_grad()
    def _load(self, into_another: bool) -> None:
        if into_another:
            self._make_optimizer()
        self.model.parameters_ready()
        values, state = copy.deepcopy(self._saved)
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.copy_(value)
        for master, value in zip(self._masters, values, strict=False):
            master.copy_(value)
        self.optimizer.load_state_dict(state)

    # --------------------------------------------------------------------------------------------------------- a hook

    def _register_hook(self) -> None:
        match self.program.hook:
            case "none":
                return
            case "int8":
                self._state = comm_hooks.BlockState()
                self.model.register_comm_hook(self._state, comm_hooks.int8_compress_hook)
            case "PowerSGD":
                self._state = comm_hooks.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=0.5)
                self.model.register_comm_hook(self._state, comm_hooks.powerSGD_hook)
            case hook:
                self.model.register_comm_hook(None, getattr(comm_hooks, f"{hook}_compress_hook"))

    def errors(self) -> list[Tensor] | None:
        """By parameter, what averages lack and a hook remembers, in fp64. A collective. None: none remembers."""
        if self.program.hook not in ("int8", "PowerSGD"):
            return None
        ranks = dist.get_world_size() if self.program.hook == "PowerSGD" else 1
        known = {} if self._state is None else self._state.errors
        found = []
        for name, parameter in self.model.module.named_parameters():
            error = known.get(name)
            found.append(torch.zeros(parameter.numel()) if error is None else error.flatten()[: parameter.numel()])
        together = torch.cat([error.double() / ranks for error in found])
        dist.all_reduce(together)
        parts = together.split([len(error) for error in found])
        return [part.view(parameter.shape) for part, parameter in zip(parts, self.parameters, strict=True)]


def difference(program: TrainingProgram, rank: int) -> str:
    """How the program went otherwise than it should; empty: all is well.

    Args:
        program: the program.
        rank: this one.
    """
    oracle, execution = Oracle(program, dist.get_world_size()), Execution(program, rank)
    errors = at_step = execution.errors()
    for number, drawn in enumerate(program.ops):
        if (op := oracle.legal(drawn)) is None:
            continue
        before = oracle.windows, oracle.steps, oracle.is_pending
        try:
            execution.run(op)
        except Exception as error:
            error.add_note(f"in op {number}, {op}, of {program}")
            raise
        oracle.run(op)
        if errors is not None and at_step is not None:
            errors, at_step, found = _follow(oracle, execution, op, before, (errors, at_step))
            if found:
                return f"after op {number}, {op}: {found}"
        if isinstance(op, Load | Step) and (program.gather == "step" or getattr(op, "looks", True)):
            found = _compare("parameter", execution.parameters, oracle.parameters, oracle.tolerance())
            if found:
                return f"after op {number}, {op}: {found}"
    execution.model.parameters_ready()
    found = _compare("parameter", execution.parameters, oracle.parameters, oracle.tolerance())
    return f"at the end: {found}" if found else _unequal_ranks(execution.parameters)


def _follow(
    oracle: Oracle, execution: Execution, op: Op, before: tuple[int, int, bool], errors: tuple[_Errors, _Errors]
) -> tuple[_Errors, _Errors, str]:
    """What a hook remembers after ``op``, and did at the last step; and what is wrong with it.

    Args:
        oracle: it learns what the averages of this op's windows lack.
        execution: after ``op``.
        op: what was done.
        before: the oracle's windows and steps before, and whether there were windows since the last step.
        errors: what a hook remembered before, and at the last step.
    """
    windows, steps, was_pending = before
    now, (then, at_step) = execution.errors(), errors
    assert now is not None
    if oracle.windows > windows:
        oracle.lack([after - earlier for after, earlier in zip(now, then, strict=True)])
    if oracle.steps > steps:
        return now, now, ""
    if isinstance(op, Discard | Fail):
        return at_step, at_step, _compare("error", now, at_step, 0.0)
    if isinstance(op, Zero) and was_pending:  # the step is not taken, which the next forward may find out
        return at_step, at_step, ""
    return now if oracle.windows > windows else then, at_step, ""


@torch.no_grad()
def _compare(name: str, ours: list[Tensor], theirs: list[Any], tolerance: float) -> str:
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        distance = (one.double() - other.double()).abs().max().item() if one.numel() else 0.0
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
    torch.set_num_threads(1)
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
