"""Random training programs with a sharded optimizer: its parameters and gradients are those of a replicated one.

Both use momentum, and copies in fp32 of what has 16 bits. Sums are exact (``program_models.py``), so results are
demanded bit for bit where gradients are. Where they travel in 8 bits the reference is fastddp with the same hook.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor

import fastddp
from fastddp.sharding.state import gathered
from program_execution import (
    LEARNING_RATE,
    Execution,
    Wrap,
    difference,
    new_memory_is_nan,
    rounding,
    wrap_in_fastddp,
    wrap_in_reference,
)
from programs import EIGHT_BITS, Backward, Change, Load, Op, Program, Save, Step, TwoBackwards

MOMENTUM = 0.5


class Replicated(Execution):
    """A step is one of dense parameters with momentum, by hand where others than parameters are stepped.

    Sparse ones have an optimizer of their own, without momentum.
    """

    averaged = False
    saved: io.BytesIO | None = None

    def _make_optimizer(self) -> None:
        numbers = {index: self.program.parameters[index] for index in self.trainable}
        self.dense = [index for index, spec in numbers.items() if not spec.sparse]
        sparse = [self.parameter(index) for index, spec in numbers.items() if spec.sparse]
        self._of_sparse = torch.optim.SGD(sparse, lr=LEARNING_RATE) if sparse else None
        self._make_optimizer_of_dense()

    def zero_gradients(self, set_to_none: bool = True) -> None:
        self.model.zero_grad(set_to_none)

    def _wrap_again(self) -> None:
        self.zero_gradients()
        super()._wrap_again()
        self._make_optimizer()

    def run(self, op: Op) -> None:
        """Leaves out what is an error, or says nothing, as long as there are gradients that are not averaged."""
        if self.begun and (isinstance(op, Step | Save | Load) or op == Change("half")):
            return
        if self.armed and op == Load("optimizer"):
            return
        if self.averaged and not self.begun and self.program.options.hook in EIGHT_BITS:
            super().run(Change("none"))  # because replicated gradients would travel again
        if isinstance(op, TwoBackwards) and self.program.options.hook in EIGHT_BITS:
            op = Backward()  # another order of gradients makes a replicated model alone rebuild its buckets
        if isinstance(op, Save):
            self._save(op.whole)
        elif isinstance(op, Load):
            self._load(op.into)
        else:
            super().run(op)
        if not self.begun:
            self.averaged = any(self.parameter(index).grad is not None for index in self.dense)

    def _step(self) -> None:
        self._step_dense()
        if self._of_sparse is not None:
            self._of_sparse.step()

    def _save(self, whole: bool) -> None:
        self.saved = io.BytesIO()
        torch.save(([*self.module.parameters()], self._state_dict(whole)), self.saved)

    def _load(self, into: str) -> None:
        if self.saved is None:
            self._save(whole=False)
        if into == "wrapper":
            self._wrap_again()
        elif into == "optimizer":
            self.zero_gradients()
            self._make_optimizer()
        assert self.saved is not None
        self.saved.seek(0)
        parameters, state = torch.load(self.saved)
        with torch.no_grad():
            for parameter, values in zip(self.module.parameters(), parameters, strict=True):
                parameter.copy_(values)
        self._load_state_dict(state)

    def _make_optimizer_of_dense(self) -> None:
        self._main = {
            index: self.parameter(index).detach().to(torch.float32, copy=True).requires_grad_()
            for index in self.dense
            if self.parameter(index).dtype in (torch.float16, torch.bfloat16) or self._travels_as_bf16(index)
        }
        stepped = [self._main.get(index, self.parameter(index)) for index in self.dense]
        self.optimizer = torch.optim.SGD(stepped, lr=LEARNING_RATE, momentum=MOMENTUM)

    def _travels_as_bf16(self, index: int) -> bool:
        return self.program.options.parameter_wire and self.parameter(index).dtype == torch.float32

    def _rounded(self, index: int) -> Tensor:
        """What other ranks get of a copy."""
        main = self._main[index].detach()
        return main.to(torch.bfloat16 if self._travels_as_bf16(index) else self.parameter(index).dtype)

    @torch.no_grad()
    def _step_dense(self) -> None:
        for index, main in self._main.items():
            parameter = self.parameter(index)
            is_as_it_was = (self._rounded(index) == parameter) | (main == parameter)
            main.copy_(torch.where(is_as_it_was, main, parameter))
            main.grad = None if parameter.grad is None else parameter.grad.float()
        self.optimizer.step()
        for index in self._main:
            self.parameter(index).copy_(self._rounded(index))

    def _state_dict(self, whole: bool) -> Any:
        return self.optimizer.state_dict(), self._main

    @torch.no_grad()
    def _load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state[0])
        for index, main in state[1].items():
            self._main[index].copy_(main)


class Sharded(Replicated):
    """Has a ``fastddp.ShardedOptimizer``."""

    def _make_optimizer_of_dense(self) -> None:
        options = self.program.options
        assert options.sharded != "no"
        self.optimizer = None  # a model has one at a time
        self.optimizer = fastddp.ShardedOptimizer(
            self.model,  # type: ignore[arg-type]
            torch.optim.SGD,
            [self.parameter(index) for index in self.dense],
            shard=options.sharded,
            gather=options.gather,
            parameter_wire=torch.bfloat16 if options.parameter_wire else None,
            lr=LEARNING_RATE,
            momentum=MOMENTUM,
        )

    def _wrap_again(self) -> None:
        del self.optimizer
        super()._wrap_again()

    def _step_dense(self) -> None:
        self.optimizer.step()

    def _state_dict(self, whole: bool) -> Any:
        # Parts are those of buckets without unused parameters, which a new wrapper does not begin with.
        whole = whole or self.program.options.usage_is_fixed
        return self.optimizer.full_state_dict() if whole else self.optimizer.state_dict()  # type: ignore[attr-defined]

    def _load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state)

    def _change_gradients(self, how: str) -> None:
        if how == "half":
            tables = [self.parameter(index).grad for index in self.trainable if self.program.parameters[index].sparse]
            for gradient in [*self.optimizer.parts.gradients(), *tables]:  # type: ignore[attr-defined]
                if gradient is not None:
                    gradient.mul_(0.5)
        elif how != "copies":
            super()._change_gradients(how)

    def whole_gradients(self) -> dict[int, Tensor]:
        """By the number of the parameter. A collective."""
        optimizer: Any = self.optimizer
        shards, own = optimizer.parts.shards, {id(gradient) for gradient in optimizer.parts.gradients()}
        parameters = optimizer.parts.now.parameters.tensors
        numbers = {id(self.parameter(index)): index for index in self.dense}

        def of_span(span: Any) -> dict[str, Tensor]:
            return {"gradient": span.holder.grad} if id(span.holder.grad) in own else {}

        return {
            numbers[id(parameters[index])]: whole.of_parameter(parameters[index])["gradient"]
            for index, whole in gathered(shards, optimizer.parts.inner, of_span)
        }


@new_memory_is_nan()
def differences(rank: int, program: Program) -> list[str]:
    """Where a sharded optimizer was not as a replicated one, after each op; empty if all is well."""
    of_reference: Wrap = wrap_in_fastddp if program.options.hook in EIGHT_BITS else wrap_in_reference
    candidate = Sharded(program, rank, wrap_in_fastddp)
    reference = Replicated(program, rank, of_reference)
    found: list[str] = []
    for number, op in enumerate(program.ops):
        candidate.run(op)
        reference.run(op)
        if not (isinstance(op, Step) and program.options.gather == "forward"):  # whose parameters arrive later
            found += compare(candidate, reference, f"op {number}, {op}")
        if isinstance(op, Load) and not candidate.begun:
            found += compare_momentum(candidate, reference, f"op {number}, {op}")
    return found[:5]


def compare_momentum(candidate: Sharded, reference: Replicated, when: str) -> list[str]:
    optimizer: Any = candidate.optimizer
    states = optimizer.full_state_dict()["state"], reference.optimizer.state_dict()["state"]
    found = []
    for number, index in enumerate(candidate.dense):
        if candidate.parameter(index).numel() == 0:  # whose state no rank has
            continue
        both = [of.get(number, {}).get("momentum_buffer") for of in states]
        ours, theirs = (None if one is None else one.clone(memory_format=torch.contiguous_format) for one in both)
        found.append(difference(f"momentum {index}", ours, theirs, 4 * rounding(candidate, index)))
    return [f"after {when}: {text}" for text in found if text]


@torch.no_grad()
def compare(candidate: Sharded, reference: Replicated, when: str) -> list[str]:
    found = []
    gradients = {} if candidate.begun else candidate.whole_gradients()
    for index, spec in enumerate(candidate.program.parameters):
        error = rounding(candidate, index)
        # What had gaps has none in flat memory.
        ours, theirs = (
            one.parameter(index).clone(memory_format=torch.contiguous_format) for one in (candidate, reference)
        )
        found.append(difference(f"parameter {index}", ours, theirs, error))
        gradient, expected = candidate.gradient(index), reference.gradient(index)
        name = f"gradient {index}"
        if spec.sparse:
            found.append(difference(name, gradient, expected, error))
        elif (
            gradient is None or expected is None or gradient.dtype != expected.dtype or gradient.shape != expected.shape
        ):
            found.append("" if gradient is expected else f"{name} is {gradient!r}, expected {expected}")
        elif (whole := gradients.get(index)) is not None:
            found.append(difference(name, whole, torch.empty_like(whole).copy_(expected), error))
        elif not candidate.begun and expected.numel():
            found.append(f"{name} is nowhere, expected {expected}")
    for name, buffer in candidate.module.named_buffers():
        found.append(difference(f"buffer {name}", buffer, reference.module.get_buffer(name), 0))
    return [f"after {when}: {text}" for text in found if text]
