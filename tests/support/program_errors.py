"""Random training programs with compressed gradients: two wrappers, and what compression may leave between them.

What 8 bits leave out is in the errors of the ranks. So, whatever an op does, what gradients lack is what errors have
gained meanwhile, summed over ranks, to a few roundings of fp32. No error may grow beyond what two roundings leave, and
all ranks have the same bits. A step that no optimizer takes leaves errors as they were when it began, bit for bit.
After each op the reference gets the parameters and gradients of the candidate, so that the next one begins with no
difference.
"""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist
from torch import Tensor

from fastddp.comm_hooks import BlockState
from program_execution import (
    LEARNING_RATE,
    Execution,
    Wrap,
    blocks_of,
    compare,
    difference,
    form,
    gradients,
    magnitude,
    new_memory_is_nan,
    rounding,
    wrap_in_fastddp,
    wrap_in_reference,
)
from programs import METRIC, Backward, Change, Op, Program, Raise, Step, TwoBackwards, Uneven, WrapAgain

HALF = {"int8": 1 / 254, "e4m3": 1 / 28, "e5m2": 1 / 14}
"""The largest rounding, as a part of the largest magnitude in its block."""


@new_memory_is_nan()
def differences(rank: int, program: Program, wrap: Wrap = wrap_in_fastddp, device: str = "cpu") -> list[str]:
    """Where the model under ``wrap`` was not as under the reference, after each op; empty if all is well."""
    candidate = Execution(program, rank, wrap, device)
    reference = Execution(program, rank, wrap_in_reference, device)
    found = compare(candidate, reference, "construction")
    step = StepBegan(candidate)
    for number, op in enumerate(program.ops):
        before = Memory(candidate)
        candidate.run(op)
        reference.run(op)
        found += compare_compressed(candidate, reference, before, step, op, f"op {number}, {op}")
        step.follow(op, before)
        settle(candidate, reference)
    return found[:5]


class Memory:
    """What a model remembers of what 8 bits have left out."""

    def __init__(self, execution: Execution) -> None:
        model = execution.model
        self.blocks = blocks_of(model)  # type: ignore[arg-type]
        self.plan = model.bucket_plan()  # type: ignore[operator]
        self.parts = parts_of(self.blocks)
        self.adds_up = any(execution.parameter(index).grad is not None for index in execution.trainable)
        trainable = sorted(execution.trainable)
        self.own = {index: torch.zeros_like(flat(execution.parameter(index))) for index in trainable}
        """By parameter: fp64, [numbers], in the order of its memory; this rank's."""
        self.held = {index: torch.zeros_like(own, dtype=torch.bool) for index, own in self.own.items()}
        """Which of them this rank exchanges."""
        numbers = {parameter: index for index in trainable for parameter in [execution.parameter(index)]}
        of_name = {name: numbers[p] for name, p in execution.module.named_parameters() if p in numbers}
        for name, error in self.blocks.errors.items() if self.blocks else ():
            whole = self.own[of_name[name]]
            each = len(whole) // max(execution.parameter(of_name[name]).numel(), 1)  # two numbers of a complex one
            begin = each * self.blocks.spans.get(name, (0, 0))[0]
            whole[begin : begin + len(error)] = error
            self.held[of_name[name]][begin : begin + len(error)] = True
        together = torch.cat([*self.own.values()])
        dist.all_reduce(together)
        self.of_ranks = dict(zip(self.own, together.split([len(own) for own in self.own.values()]), strict=True))


def parts_of(blocks: BlockState | None) -> dict[int, tuple[int, int]]:
    """By number of the parameter: first element and end of what this rank exchanges."""
    return dict(blocks._spans) if blocks else {}


class StepBegan:
    """What a model remembered when its step began: the optimizer had stepped; if it never has, the last forward ran
    without gradients to add to."""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self._steps_are_seen = False
        self.memory: Memory | None = Memory(execution)
        """None: this cannot be told."""

    def follow(self, op: Op, before: Memory) -> None:
        """``op`` has been, and ``before`` was what the model remembered then."""
        if isinstance(op, WrapAgain):
            self.__init__(self._execution)  # type: ignore[misc]
        elif isinstance(op, Uneven):  # a rank may have stepped in it, and others without inputs have not
            self.memory = None
            own = op.backwards[: op.batches[self._execution.rank]]
            self._steps_are_seen |= not self._execution.keeps_main_gradients and any(backward.sync for backward in own)
        elif isinstance(op, Step) and not self._execution.keeps_main_gradients:
            self.memory, self._steps_are_seen = Memory(self._execution), True
        elif any(spec.steps_in_backward for spec in self._execution.program.parameters):
            self.memory = None
        elif self._begins_anew(op, before):
            self.memory = before

    def of(self, now: Memory, before: Memory, op: Op) -> Memory | None:
        """What it remembers now that ``op`` has made the step void."""
        if now.blocks is not before.blocks:
            return None
        raised_in_forward = isinstance(op, Raise) and self._execution.raised[1] == "forward"
        return before if raised_in_forward or self._begins_anew(op, before) else self.memory

    def _begins_anew(self, op: Op, before: Memory) -> bool:
        if not (op == METRIC or isinstance(op, Backward | TwoBackwards | Raise)):
            return False
        # In two levels a rank may exchange other parts in new buckets, and begins with what it remembers of them.
        has_other_parts = before.parts != parts_of(blocks_of(self._execution.model))  # type: ignore[arg-type]
        return has_other_parts or not (self._steps_are_seen or before.adds_up)


def flat(tensor: Tensor) -> Tensor:
    """fp64, [numbers]: its elements as they lie in the memory of a dense tensor of this layout."""
    dense = torch.empty_like(tensor).copy_(tensor.detach()).as_strided((tensor.numel(),), (1,))
    return (torch.view_as_real(dense).flatten() if dense.is_complex() else dense).double()


def compare_compressed(
    candidate: Execution, reference: Execution, before: Memory, step: StepBegan, op: Op, when: str
) -> list[str]:
    now, found = Memory(candidate), unequal_ranks(candidate, reference)
    # Errors begin anew where the model is plain again; in two levels other ranks exchange other parts of new buckets.
    are_other_parts = candidate.program.options.two_levels and now.plan != before.plan
    is_void = isinstance(op, Raise) or op == Change("discarded")
    is_balanced = now.blocks is before.blocks and not are_other_parts and not is_void
    if is_void and (began := step.of(now, before, op)) is not None and not are_other_parts:
        found += [
            f"the error of {index} was changed by a step that is void"
            for index in now.own
            if not torch.equal(now.own[index], began.own[index].where(now.held[index], 0))
        ]
    for index in range(len(candidate.program.parameters)):
        ours, theirs = gradients(candidate, reference, index)
        parameter, of_reference = candidate.parameter(index), reference.parameter(index)
        if index not in now.own or candidate.program.parameters[index].sparse:
            exactness = rounding(candidate, index)
            found.append(difference(f"parameter {index}", parameter, of_reference, exactness))
            found.append(difference(f"gradient {index}", ours, theirs, exactness))
            continue
        if not bool((now.own[index].abs() <= bound(candidate, index)).all()):
            found.append(f"the error of {index} has grown to {now.own[index].abs().max().item():g}")
        gained = now.of_ranks[index] - before.of_ranks[index]
        steps = candidate.program.parameters[index].steps_in_backward or isinstance(op, Uneven)
        tolerance = few_roundings(candidate, index, ours)
        if ours is None or theirs is None or form(ours) != form(theirs):
            found.append(difference(f"gradient {index}", ours, theirs, 0))
        elif is_balanced:
            in_gradient = torch.zeros_like(gained) if steps else gained  # which is zero after a step
            found.append(imbalance(f"gradient {index}", lacking(ours, theirs, parameter), in_gradient, tolerance))
        if is_balanced:
            in_parameter = -LEARNING_RATE * gained if steps else torch.zeros_like(gained)
            tolerance = few_roundings(candidate, index, parameter)
            found.append(
                imbalance(f"parameter {index}", lacking(parameter, of_reference, parameter), in_parameter, tolerance)
            )
    for name, buffer in candidate.module.named_buffers():
        found.append(difference(f"buffer {name}", buffer, reference.module.get_buffer(name), 0))
    return [f"after {when}: {text}" for text in found if text]


def lacking(ours: Tensor, theirs: Tensor, like: Tensor) -> Tensor:
    """``theirs`` - ``ours``, fp64, in the order of the memory of ``like``."""
    missing = theirs.detach() - ours.detach()
    return flat(torch.empty_like(like, dtype=missing.dtype).copy_(missing))


def imbalance(name: str, lacks: Tensor, gained: Tensor, tolerance: float) -> str:
    off = (lacks - gained).abs()
    if bool((off <= tolerance).all()):
        return ""
    worst = int(off.nan_to_num(torch.inf).argmax())
    return f"{name} lacks {lacks[worst].item():g} at {worst}, and errors have gained {gained[worst].item():g}"


def bound(execution: Execution, index: int) -> float:
    """Of errors, those of earlier windows included, which are rounded with the gradient."""
    return 4 * HALF[execution.program.options.hook] * magnitude(execution, index)


def few_roundings(execution: Execution, index: int, *kept_in: Tensor | None) -> float:
    """Of fp32, in which everything is added up, and of what results are kept in."""
    dtypes = [torch.float32, *(tensor.dtype for tensor in kept_in if tensor is not None)]
    return 8 * max(torch.finfo(dtype).eps for dtype in dtypes) * magnitude(execution, index)


def unequal_ranks(candidate: Execution, reference: Execution) -> list[str]:
    """Gradients in which ranks differ, although under the reference they do not."""
    mine = torch.tensor(
        [
            [0 if gradient is None else digest(gradient) for gradient in gradients(candidate, reference, index)]
            for index in range(len(candidate.program.parameters))
        ]
    )
    of_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, mine)
    ours, theirs = (torch.stack(of_ranks) == mine).all(0).unbind(1)
    return [f"gradient {index} is not the same on all ranks" for index in (theirs & ~ours).nonzero().flatten().tolist()]


def digest(tensor: Tensor) -> int:
    dense = tensor.detach().cpu().to_dense()
    return zlib.crc32(torch.empty(dense.numel(), dtype=dense.dtype).copy_(dense.flatten()).view(torch.uint8).numpy())


def settle(candidate: Execution, reference: Execution) -> None:
    """The reference goes on with what the candidate has."""
    with torch.no_grad():
        for index, spec in enumerate(candidate.program.parameters):
            if spec.sparse:
                continue
            reference.parameter(index).copy_(candidate.parameter(index))
            ours, theirs = candidate.gradient(index), reference.gradient(index)
            if ours is not None and theirs is not None:
                theirs.copy_(ours)
