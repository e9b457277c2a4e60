"""The cases of kernels, run by Triton's interpreter, and which branches and masks of the kernels they decide.

What a case calls here has the methods of :mod:`fastddp._C`'s kernels.
"""

from __future__ import annotations

import ast
import contextlib
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

import block8_interpreted
import low_rank_interpreted
import pack_interpreted
from interpreting import interpreted_copies

CHUNK = pack_interpreted.kernels.CHUNK_ELEMENTS
(sums,) = interpreted_copies("sum_shards_kernels")


class _Launched:
    """Trials ask whether a kernel was launched: here, always."""

    @property
    def launches(self) -> int:
        self._asked = getattr(self, "_asked", 0) + 1
        return self._asked

    def wrote_around(self) -> bool:
        return False


class Pack(_Launched, pack_interpreted.Interpreted):
    def __init__(self) -> None:
        super().__init__(CHUNK)

    def unpack(self, gradients: Any, views: Any, measuring: bool = False) -> Any:
        given = pack_interpreted.tables(gradients, views, CHUNK, writable=True)
        assert given is not None
        partials = pack_interpreted.rows_of(given.chunks) if measuring else torch.empty(0)
        wire, addresses, chunks, constants = given
        pack_interpreted.kernels.unpack_kernel[(len(chunks),)](wire, addresses, chunks, 1.0, partials, **constants)
        return partials

    def measure(self, wire: Tensor) -> Any:
        return torch.tensor(super().measure(wire), dtype=torch.float64)


class LowRank(_Launched, low_rank_interpreted.Interpreted):
    pass


class Block8(_Launched):
    def __init__(self, number: str, block: int) -> None:
        self._form = block8_interpreted.Format(number, block)

    def encode(self, *arguments: Any) -> None:
        block8_interpreted.encode(self._form, *arguments)

    def add(self, *arguments: Any) -> None:
        block8_interpreted.add(self._form, *arguments)

    def decode(self, gradients: Any, wire: Tensor) -> Tensor:
        return block8_interpreted.decode(self._form, gradients, wire).sum(0)


class Sums(_Launched):
    def sum_shards(self, shards: Tensor, target: Tensor) -> None:
        ranks, elements = shards.shape
        programs = -(-elements // sums.ELEMENTS)
        sums.sum_shards_kernel[(programs,)](shards, ranks, elements, target, **sums.dtype_constants(shards.dtype))


# ------------------------------------------------------------------------------------------------- what was decided


@dataclass
class Decided:
    """What calls of kernels have decided, by file and place in it."""

    arcs: dict[str, set[tuple[int, int]]] = field(default_factory=lambda: defaultdict(set))
    """Pairs of lines that were executed one after the other in one function; 0 stands for its end."""
    loops: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    """The most often that a line was executed in one call of its function."""
    operands: dict[tuple[str, int, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    """Of each ``&`` of masks: "left", "right", where this operand alone decided some element."""
    masks: dict[tuple[str, int, int], set[bool]] = field(default_factory=lambda: defaultdict(set))
    """Of each load and store with a mask: which values were in it."""


@contextlib.contextmanager
def deciding(folder: Path) -> Iterator[Decided]:
    """What kernels in this folder decide inside."""
    decided = Decided()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(str(folder)):
            return None
        lines, counts = decided.arcs[name], defaultdict(int)
        before = frame.f_code.co_firstlineno
        most = decided.loops[name]

        def local(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal before
            if event == "line":
                lines.add((before, frame.f_lineno))
                before = frame.f_lineno
                counts[before] += 1
                most[before] = max(most.get(before, 0), counts[before])
            elif event == "return":
                lines.add((before, 0))
            return local

        return local

    def place() -> tuple[str, int, int] | None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and not frame.f_code.co_filename.startswith(str(folder)):
            frame = frame.f_back
        if frame is None:
            return None
        line, column = _position(frame.f_code, frame.f_lasti)
        return frame.f_code.co_filename, line, column

    create_and, load, store = (getattr(InterpreterBuilder, name) for name in ("create_and", *_MASKED))

    def record_and(self: Any, left: Any, right: Any) -> Any:
        if left.data.dtype == right.data.dtype == np.bool_ and (at := place()) is not None:
            ours, theirs = np.broadcast_arrays(left.data, right.data)
            if (ours & ~theirs).any():
                decided.operands[at].add("right")
            if (~ours & theirs).any():
                decided.operands[at].add("left")
            decided.operands[at] |= set()
        return create_and(self, left, right)

    def record_mask(mask: Any) -> None:
        if (at := place()) is not None:
            decided.masks[at] |= {bool(value) for value in np.unique(mask.data)}

    def record_load(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        record_mask(mask)
        return load(self, pointers, mask, *others)

    def record_store(self: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        record_mask(mask)
        return store(self, pointers, value, mask, *others)

    with (
        mock.patch.object(InterpreterBuilder, "create_and", record_and),
        mock.patch.object(InterpreterBuilder, _MASKED[0], record_load),
        mock.patch.object(InterpreterBuilder, _MASKED[1], record_store),
    ):
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            yield decided
        finally:
            sys.settrace(before)


_MASKED = ("create_masked_load", "create_masked_store")


def _position(code: CodeType, instruction: int) -> tuple[int, int]:
    line, _, column, _ = list(code.co_positions())[instruction // 2]
    return line or 0, column or 0


def undecided(decided: Decided, file: Path) -> list[str]:
    """Source lines of branches that were not taken, and of masks that did not decide, in kernels of this file."""
    source = file.read_text()
    lines = source.splitlines()
    missing: list[str] = []

    def note(line: int, what: str) -> None:
        missing.append(f"{lines[line - 1].strip()}: {what}")

    arcs, loops = decided.arcs[str(file)], decided.loops[str(file)]
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef) or not _is_kernel(function):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.If):
                for taken, what in zip(_taken(node, arcs), ("never true", "never false"), strict=True):
                    if not taken:
                        note(node.lineno, what)
            elif isinstance(node, ast.For):
                first = node.body[0].lineno
                if loops.get(first, 0) < 2 and "static_range" not in ast.unparse(node.iter):
                    note(node.lineno, "never repeated" if first in loops else "never entered")
        if function.body[-1].lineno not in loops:
            note(function.lineno, "never called")
    for (name, line, _), by in decided.operands.items():
        if name == str(file) and by != {"left", "right"}:
            note(line, f"of an &, {' and '.join(sorted({'left', 'right'} - by))} never decides")
    for (name, line, _), values in decided.masks.items():
        if name == str(file) and values != {False, True}:
            note(line, f"a mask is always {values.pop()}")
    return sorted(set(missing))


def _is_kernel(function: ast.FunctionDef) -> bool:
    return any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def _taken(node: ast.If, arcs: set[tuple[int, int]]) -> tuple[bool, bool]:
    """Whether the condition was true, and false."""
    tested = range(node.lineno, (node.test.end_lineno or node.lineno) + 1)
    inside = range(node.body[0].lineno, (node.body[-1].end_lineno or 0) + 1)
    to = {target for origin, target in arcs if origin in tested and target not in tested}
    return any(line in inside for line in to), any(line not in inside for line in to)


def of_kernels(files: Sequence[Path], decided: Decided) -> list[str]:
    return [f"{file.name}: {text}" for file in files for text in undecided(decided, file)]
