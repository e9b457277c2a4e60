"""What a training program (``training_programs.py``) has to give: one process, fp64, the gradients of all ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from training_programs import (
    Backward,
    Clip,
    Discard,
    Fail,
    Forward,
    Halves,
    Kind,
    Load,
    MakeOptimizer,
    Op,
    Save,
    Step,
    TrainingProgram,
    Zero,
)


class _Own(Optimizer):
    """An optimizer that is not of torch's."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(self._update(parameter, parameter.grad, self.state[parameter]), alpha=-group["lr"])

    def _update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class Lion(_Own):
    """Chen et al., 2023, https://arxiv.org/abs/2302.06675."""

    def _update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        average = state.setdefault("exp_avg", torch.zeros_like(parameter))
        update = average.lerp(gradient, 0.1).sign_()
        average.lerp_(gradient, 0.01)
        return update


class Factored(_Own):
    """The second moments of Adafactor: Shazeer and Stern, 2018, https://arxiv.org/abs/1804.04235."""

    def _update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        squares = gradient.square() + 1e-3
        if parameter.dim() < 2:
            moments = state.setdefault("v", torch.zeros_like(parameter)).lerp_(squares, 0.1)
            return gradient / moments.sqrt()
        rows = state.setdefault("rows", squares.new_zeros(squares.shape[:-1])).lerp_(squares.mean(-1), 0.1)
        columns = state.setdefault("columns", squares.new_zeros(squares[..., 0, :].shape))
        columns.lerp_(squares.mean(-2), 0.1)
        of_rows = rows / rows.mean(-1, keepdim=True)
        return gradient / (of_rows[..., None] * columns[..., None, :]).sqrt()


class Lamb(_Own):
    """The trust ratio of You et al., 2019, https://arxiv.org/abs/1904.00962."""

    def _update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        state["step"] = state.get("step", 0) + 1
        average = state.setdefault("exp_avg", torch.zeros_like(parameter)).lerp_(gradient, 0.1)
        update = average / (1 - 0.9 ** state["step"]) + 0.01 * parameter
        return update * (parameter.norm() / (update.norm() + 1e-3))


OPTIMIZERS: dict[Kind, tuple[type[Optimizer], dict[str, Any]]] = {
    "SGD": (SGD, {}),
    "momentum": (SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "AdamW": (AdamW, {"eps": 1e-3, "weight_decay": 0.1}),
    "Adagrad": (Adagrad, {"eps": 1e-3}),
    "Lion": (Lion, {}),
    "Factored": (Factored, {}),
    "Lamb": (Lamb, {}),
}
LEARNING_RATE = 0.1


def groups_of(program: TrainingProgram, parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Every second parameter is in the second group, if there are two."""
    found = [parameters[number :: program.groups] for number in range(program.groups)]
    return [{"params": params, "lr": LEARNING_RATE / (1 + number)} for number, params in enumerate(found)]


def _numbers(program: TrainingProgram, *seeds: int) -> Tensor:
    """By the last seed's parameter; halves where others would be rounded."""
    generator = torch.Generator().manual_seed(hash(seeds) % 2**63)
    shape, of_halves = program.shapes[seeds[-1]], program.dtype == "bfloat16" or program.hook != "none"
    halves = torch.randint(-2, 3, shape, generator=generator).double() / 2
    return halves if of_halves else torch.randn(shape, generator=generator).to(getattr(torch, program.dtype)).double()


def first_values(program: TrainingProgram) -> list[Tensor]:
    """Of the parameters."""
    return [_numbers(program, -1, -1, index) for index in range(len(program.shapes))]


def factors(program: TrainingProgram, rank: int, number: int, index: int) -> Tensor:
    """What a parameter is multiplied by in forward ``number``."""
    return _numbers(program, rank, number, index)


def curvature(program: TrainingProgram) -> float:
    """How much a gradient depends on its parameter."""
    return 0.0 if program.dtype == "bfloat16" or program.hook != "none" else 0.5


class Oracle:
    """The model on all ranks, and what the program may do now."""

    def __init__(self, program: TrainingProgram, ranks: int) -> None:
        self.program, self.ranks = program, range(ranks)
        self.parameters = [nn.Parameter(values) for values in first_values(program)]
        self.all = frozenset(range(len(self.parameters)))
        self.gradients: list[list[Tensor | None]] = [
            [torch.zeros_like(one.detach()) if self._are_apart else None for one in self.parameters] for _ in self.ranks
        ]
        self.received: list[set[int]] = [set() for _ in self.ranks]
        """By rank: what the open window has brought."""
        self.local: set[int] = set()
        """Whose gradients a sharded optimizer has no part of."""
        self.optimizer: Optimizer | None = None
        self._saved: Any = None
        self.armed = False
        self.forwards = self.windows = self.steps = 0
        self.is_fresh = False
        """Whether the last window's gradients are as it has left them."""
        self._is_void = False  # the last window has failed, and no forward has been
        self.is_pending = False
        """Whether there were windows since the last step."""

    # ------------------------------------------------------------------------------------------------ what is legal

    def legal(self, op: Op) -> Op | None:
        """What the program does instead; None: nothing."""
        match op:
            case Backward():
                return self._legal_backward(op)
            case Halves():
                is_open = any(self.received) and not self._are_zero()
                return None if self.armed or is_open or self.program.usage == "static_graph" else op
            case Zero():
                # Before an optimizer has stepped, nothing says that one has not.
                is_unseen = self._remembers and self.is_pending and not self.steps
                return None if is_unseen else op
            case Step():
                return op if self._may_step() else None
            case Fail():
                return Fail(op.repairs or self._remembers)
            case Clip():
                return op if self.is_fresh and self._are_equal() else None
            case Save():
                return op if self.optimizer is not None else None
            case Load():
                return op if self._saved is not None and not (self._remembers and self.is_pending) else None
            case MakeOptimizer():
                return None if self.optimizer is not None and self._remembers and self.is_pending else op
            case _:
                return op

    @property
    def _remembers(self) -> bool:
        return self.program.hook in ("int8", "PowerSGD")

    @property
    def _are_apart(self) -> bool:
        return self.program.main_grads == "main_grad"

    def _legal_backward(self, op: Backward) -> Backward:
        sync = op.sync or self.armed
        skip = []
        for rank, wanted in enumerate(op.skip):
            came = {index for index in self.received[rank] if self.gradients[rank][index] is not None}
            if not sync or self.program.usage == "find_unused_parameters":
                skip.append(wanted)
            else:
                skip.append(wanted & came if self.program.usage == "all" else self.program.unused[rank])
        if self.program.usage == "static_graph" and not sync:
            skip = [one | frozenset.intersection(*self.program.unused) for one in skip]
        skip = [one if one != self.all else frozenset.intersection(self.all, *self.program.unused) for one in skip]
        forwards = 1 if self.program.dtype == "bfloat16" else op.forwards
        return Backward(op.sync, tuple(skip), forwards, 0 if self.program.dtype == "bfloat16" else op.local_forwards)

    def _are_zero(self) -> bool:
        return all(not gradient.any() for own in self.gradients for gradient in own if gradient is not None)

    def _are_equal(self) -> bool:
        def is_equal(own: list[Tensor | None]) -> bool:
            pairs = zip(own, self.gradients[0], strict=True)
            return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)

        return all(map(is_equal, self.gradients))

    def _may_step(self) -> bool:
        is_local = self.program.sharded and self.local
        return self.optimizer is not None and not self._is_void and self._are_equal() and not is_local

    # --------------------------------------------------------------------------------------------------- what it does

    def run(self, op: Op) -> None:
        self._is_void = self._is_void and not isinstance(op, Backward | Halves | Forward)
        self.is_fresh = self.is_fresh and isinstance(op, Forward) and not op.with_gradients
        self._run_window(op)
        self._run_optimizer(op)

    def _run_window(self, op: Op) -> None:
        match op:
            case Backward():
                self._backward(op)
            case Halves():
                self._halves(op)
            case Forward():
                self.forwards += 1
                self.armed |= op.with_gradients and op.sync
            case Fail():
                self.forwards += 1 + op.repairs
                self._zero("model")
                self.armed = self.is_pending = False
                self._is_void = not op.repairs
            case Zero():
                self._zero(op.how)
                self.is_pending = False

    def _run_optimizer(self, op: Op) -> None:
        match op:
            case Step():
                self._step()
            case Clip():
                self._clip(op.norm)
            case Discard():
                self._zero("optimizer")
                self.is_pending = False
            case MakeOptimizer():
                self._make_optimizer()
            case Save():
                assert self.optimizer is not None
                self._saved = copy.deepcopy(([*self.parameters], self.optimizer.state_dict()))
            case Load():
                self._load(op.into_another)

    def _make_optimizer(self) -> None:
        if self.optimizer is not None:
            self._zero("model")
        kind, settings = OPTIMIZERS[self.program.optimizer]
        self.optimizer = kind(groups_of(self.program, self.parameters), **settings)
        self.local |= {index for own in self.gradients for index in self.all if own[index] is not None}

    @torch.no_grad()
    def _load(self, into_another: bool) -> None:
        if into_another:
            self._make_optimizer()
        assert self.optimizer is not None
        values, state = copy.deepcopy(self._saved)
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.copy_(value)
        self.optimizer.load_state_dict(state)

    def _gradient(self, rank: int, index: int, number: int) -> Tensor:
        moved = curvature(self.program) * self.parameters[index].detach()
        return factors(self.program, rank, number, index) + moved

    def _backward(self, op: Backward) -> None:
        closes = op.sync or self.armed
        self._bring(op.skip, op.forwards + op.local_forwards)
        if closes:
            return self._close()
        brought = {index for skipped in op.skip for index in self.all - skipped}
        self.local |= brought
        return None

    def _bring(self, skip: Iterable[frozenset[int]], forwards: int) -> None:
        numbers = range(self.forwards, self.forwards + forwards)
        self.forwards += forwards
        for rank, skipped in enumerate(skip):
            for index in self.all - skipped:
                new = torch.stack([self._gradient(rank, index, number) for number in numbers]).sum(0)
                before = self.gradients[rank][index]
                self.gradients[rank][index] = new if before is None else before + new
                self.received[rank].add(index)

    def _halves(self, op: Halves) -> None:
        first = frozenset(range(op.split))
        for half in (first, self.all - first):
            self._bring([self.all - half] * len(self.ranks), 1)
            if self.program.usage != "all":
                self._close()
        if self.program.usage == "all":
            self._close()

    def _close(self) -> None:
        """The gradients of all ranks are averaged."""
        for index in self.all:
            own = {rank: one for rank in self.ranks if (one := self.gradients[rank][index]) is not None}
            if any(index in self.received[rank] for rank in own):
                average = torch.stack([*own.values()]).sum(0) / len(self.ranks)
                for gradients in self.gradients:
                    gradients[index] = average
                self.local.discard(index)
        for received in self.received:
            received.clear()
        self.armed, self.is_fresh, self.is_pending = False, True, True
        self.windows += 1

    def _zero(self, how: str) -> None:
        to_none = how in ("optimizer", "model", "None") and not self._are_apart
        for own in self.gradients:
            for index, parameter in enumerate(self.parameters):
                has_one = own[index] is not None or how == "zeros"
                own[index] = None if to_none or not has_one else torch.zeros_like(parameter.detach())
        if to_none or (self._are_apart and how != "zero_"):
            self.local.clear()
        for received in self.received:
            received.clear()
        if how == "zeros" and not self._are_apart:
            self.local |= self.all

    def _clip(self, norm: float) -> None:
        found = [gradient for gradient in self.gradients[0] if gradient is not None]
        total = torch.stack([gradient.norm() for gradient in found]).norm()
        factor = min(1.0, norm / (total.item() + 1e-6))
        self.gradients = [[None if one is None else one * factor for one in own] for own in self.gradients]

    def _step(self) -> None:
        assert self.optimizer is not None
        for parameter, gradient in zip(self.parameters, self.gradients[0], strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        self.optimizer.step()
        self.steps += 1
        self.is_pending = False

    def lack(self, errors: list[Tensor]) -> None:
        """By parameter, what the averages of the last windows lack, because it travels later."""
        for own in self.gradients:
            for index, error in enumerate(errors):
                gradient = own[index]
                if gradient is not None:
                    own[index] = gradient - error

    def tolerance(self) -> float:
        """How far a parameter may be from the right one."""
        if self.program.dtype == "bfloat16":
            return 0.02 * self.steps + 0.02
        if self.program.hook in ("fp16", "bf16"):
            return 0.01 * self.steps
        return 1e-9 if self.program.dtype == "float64" else 2e-4
