"""What a training program (``training_programs.py``) has to give: one process, fp64, the gradients of all ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer

import optimizers as small
from training_programs import LOOK, Kind, Op, TrainingProgram

OPTIMIZERS: dict[Kind, tuple[type[Optimizer], dict[str, Any]]] = {
    "SGD": (SGD, {}),
    "momentum": (SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "AdamW": (AdamW, {"eps": 1e-3, "weight_decay": 0.1}),
    "Adagrad": (Adagrad, {"eps": 1e-3}),
    "Lion": (small.Lion, {}),
    "KeepsTwo": (small.KeepsTwo, {}),
    "LARS": (small.LARS, {}),
}
LEARNING_RATE = 0.1


def groups_of(program: TrainingProgram, parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Every second parameter is in the second group, if there are two."""
    found = [parameters[number :: program.groups] for number in range(program.groups)]
    return [{"params": params, "lr": LEARNING_RATE / (1 + number)} for number, params in enumerate(found)]


def factors(program: TrainingProgram, *seeds: int) -> Tensor:
    """What a parameter is multiplied by; by rank, forward and parameter. Halves where others would be rounded."""
    generator = torch.Generator().manual_seed(hash(seeds) % 2**63)
    shape = program.shapes[seeds[-1]]
    halves = torch.randint(-2, 3, shape, generator=generator).double() / 2
    if program.hook != "none":
        return halves
    return torch.randn(shape, generator=generator).to(getattr(torch, program.dtype)).double()


def first_values(program: TrainingProgram) -> list[Tensor]:
    """Of the parameters."""
    return [factors(program, -1, -1, index) for index in range(len(program.shapes))]


def curvature(program: TrainingProgram) -> float:
    """How much a gradient depends on its parameter."""
    return 0.0 if program.hook != "none" else 0.5


class Oracle:
    """The model on all ranks, and what the program may do now."""

    def __init__(self, program: TrainingProgram, ranks: int) -> None:
        self.program, self.ranks = program, range(ranks)
        self.parameters = [nn.Parameter(values) for values in first_values(program)]
        self.all = frozenset(range(len(self.parameters)))
        self.gradients: list[list[Tensor | None]] = [[None for _ in self.parameters] for _ in self.ranks]
        self.received: list[set[int]] = [set() for _ in self.ranks]
        """By rank: what the open window has brought."""
        self.local: set[int] = set()
        """Whose gradients a sharded optimizer has no part of."""
        self.optimizer: Any = None
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
        is_remembered = self.program.hook_remembers and self.is_pending
        match op.name:
            case "backward":
                return Op(op.name, self._legal_backward(*op.arguments))
            case "fail":
                return Op(op.name, (op.arguments[0] or self.program.hook_remembers,))
            case "halves":
                is_open = any(self.received) and not self._are_zero()
                may = not self.armed and not is_open and self.program.usage != "static_graph"
            case "zero":  # before an optimizer has stepped, nothing says that one has not
                may = not is_remembered or self.steps > 0
            case "step":
                may = self._may_step()
            case "clip":
                may = self.is_fresh and self._are_equal()
            case "save":
                may = self.optimizer is not None
            case "load":
                may = self._saved is not None and not is_remembered
            case "make_optimizer":
                may = self.optimizer is None or not is_remembered
            case _:
                may = True
        return op if may else None

    def _legal_backward(
        self, sync: bool, skip: tuple[frozenset[int], ...], forwards: int, local_forwards: int
    ) -> tuple[Any, ...]:
        usage, unused = self.program.usage, self.program.unused
        syncs = sync or self.armed
        if usage == "all" and syncs:
            came = [{at for at in self.received[rank] if self.gradients[rank][at] is not None} for rank in self.ranks]
            skip = tuple(wanted & own for wanted, own in zip(skip, came, strict=True))
        elif usage == "static_graph":
            skip = unused if syncs else tuple(one | frozenset.intersection(*unused) for one in skip)
        skip = tuple(one if one != self.all else frozenset.intersection(self.all, *unused) for one in skip)
        return sync, skip, forwards, local_forwards

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
        self._is_void = self._is_void and op.name not in ("backward", "halves", "forward")
        self.is_fresh = self.is_fresh and op == LOOK
        getattr(self, op.name)(*op.arguments)

    def backward(self, sync: bool, skip: tuple[frozenset[int], ...], forwards: int, local_forwards: int) -> None:
        self._bring(skip, forwards + local_forwards)
        if sync or self.armed:
            self._close()
        else:
            self.local |= {index for skipped in skip for index in self.all - skipped}

    def halves(self, split: int) -> None:
        first = frozenset(range(split))
        for half in (first, self.all - first):
            self._bring([self.all - half] * len(self.ranks), 1)
            if self.program.usage != "all":
                self._close()
        if self.program.usage == "all":
            self._close()

    def forward(self, with_gradients: bool, sync: bool) -> None:
        self.forwards += 1
        self.armed |= with_gradients and sync

    def fail(self, repairs: bool) -> None:
        self.forwards += 1 + repairs
        self.zero("model")
        self.armed = False
        self._is_void = not repairs

    def zero(self, how: str) -> None:
        to_none = how in ("optimizer", "model", "None")
        for own in self.gradients:
            for index, parameter in enumerate(self.parameters):
                has_one = own[index] is not None or how == "zeros"
                own[index] = None if to_none or not has_one else torch.zeros_like(parameter.detach())
        if to_none:
            self.local.clear()
        for received in self.received:
            received.clear()
        if how == "zeros":
            self.local |= self.all
        self.is_pending = False

    def step(self, looks: bool) -> None:
        for parameter, gradient in zip(self.parameters, self.gradients[0], strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        self.optimizer.step()
        self.steps += 1
        self.is_pending = False

    def clip(self, norm: float) -> None:
        found = [gradient for gradient in self.gradients[0] if gradient is not None]
        total = torch.stack([gradient.norm() for gradient in found]).norm()
        factor = min(1.0, norm / (total.item() + 1e-6))
        self.gradients = [[None if one is None else one * factor for one in own] for own in self.gradients]

    def discard(self) -> None:
        self.zero("optimizer")

    def make_optimizer(self) -> None:
        if self.optimizer is not None:
            self.zero("model")
        kind, settings = OPTIMIZERS[self.program.optimizer]
        self.optimizer = kind(groups_of(self.program, self.parameters), **settings)
        self.local |= {index for own in self.gradients for index in self.all if own[index] is not None}

    def register_hook(self) -> None:
        pass

    def save(self, whole: bool) -> None:
        self._saved = copy.deepcopy(([*self.parameters], self.optimizer.state_dict()))

    @torch.no_grad()
    def load(self, into_another: bool) -> None:
        if into_another:
            self.make_optimizer()
        values, state = copy.deepcopy(self._saved)
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.copy_(value)
        self.optimizer.load_state_dict(state)

    def _gradient(self, rank: int, number: int, index: int) -> Tensor:
        return factors(self.program, rank, number, index) + curvature(self.program) * self.parameters[index].detach()

    def _bring(self, skip: Iterable[frozenset[int]], forwards: int) -> None:
        numbers = range(self.forwards, self.forwards + forwards)
        self.forwards += forwards
        for rank, skipped in enumerate(skip):
            for index in self.all - skipped:
                new = torch.stack([self._gradient(rank, number, index) for number in numbers]).sum(0)
                before = self.gradients[rank][index]
                self.gradients[rank][index] = new if before is None else before + new
                self.received[rank].add(index)

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

    def lack(self, errors: list[Tensor]) -> None:
        """By parameter, what the averages of the last windows lack, because it travels later."""
        for own in self.gradients:
            own[:] = [None if one is None else one - error for one, error in zip(own, errors, strict=True)]

    def tolerance(self) -> float:
        """How far a parameter may be from the right one."""
        if self.program.hook in ("fp16", "bf16"):
            return 0.01 * self.steps
        return 1e-9 if self.program.dtype == "float64" else 2e-4
