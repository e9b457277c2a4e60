"""The cases of kernels, run by Triton's interpreter, and which branches and masks of the kernels they decide.

What a case calls here has the methods of :mod:`fastddp._C`'s kernels.
"""

from __future__ import annotations

import ast
import contextlib
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
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
sums, tables = interpreted_copies("sum_shards_kernels", "device_table_kernels")


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
        return partials if measuring else None

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
    def __call__(self, shards: Tensor, target: Tensor) -> None:
        ranks, elements = shards.shape
        programs = -(-elements // sums.ELEMENTS)
        sums.sum_shards_kernel[(programs,)](shards, ranks, elements, target, **sums.dtype_constants(shards.dtype))


class Tables(_Launched):
    def __call__(self, words: tuple[int, ...], target: Tensor) -> None:
        filled = words + (0,) * (tables.WORDS - len(words))
        tables.write_words_kernel[(1,)](target, len(words), filled)


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


_MASKED = ("create_masked_load", "create_masked_store")


class _Watch:
    """Notes what kernels in a folder decide."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.decided = Decided()

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(self.folder):
            return None
        arcs, most = self.decided.arcs[name], self.decided.loops[name]
        counts: dict[int, int] = defaultdict(int)
        before = frame.f_code.co_firstlineno

        def local(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal before
            if event == "line":
                arcs.add((before, frame.f_lineno))
                before = frame.f_lineno
                counts[before] += 1
                most[before] = max(most.get(before, 0), counts[before])
            elif event == "return":
                arcs.add((before, 0))
            return local

        return local

    def place(self) -> tuple[str, int, int] | None:
        """Of the kernel that calls; None: a function of Triton's own does."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and not frame.f_code.co_filename.startswith(self.folder):
            frame = frame.f_back
        if frame is None:
            return None
        line, _, column, _ = list(frame.f_code.co_positions())[frame.f_lasti // 2]
        return frame.f_code.co_filename, line or 0, column or 0

    def note_and(self, left: np.ndarray, right: np.ndarray) -> None:
        at = self.place()
        if at is None or not left.dtype == right.dtype == np.bool_:
            return
        by = self.decided.operands[at]
        if (left & ~right).any():
            by.add("right")
        if (~left & right).any():
            by.add("left")

    def note_mask(self, mask: np.ndarray) -> None:
        at = self.place()
        if at is not None:
            self.decided.masks[at] |= {bool(value) for value in np.unique(mask)}


@contextlib.contextmanager
def deciding(folder: Path) -> Iterator[Decided]:
    """What kernels in this folder decide inside."""
    watch = _Watch(folder)
    create_and, load, store = (getattr(InterpreterBuilder, name) for name in ("create_and", *_MASKED))

    def record_and(self: Any, left: Any, right: Any) -> Any:
        watch.note_and(left.data, right.data)
        return create_and(self, left, right)

    def record_load(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        watch.note_mask(mask.data)
        return load(self, pointers, mask, *others)

    def record_store(self: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        watch.note_mask(mask.data)
        return store(self, pointers, value, mask, *others)

    with (
        mock.patch.object(InterpreterBuilder, "create_and", record_and),
        mock.patch.object(InterpreterBuilder, _MASKED[0], record_load),
        mock.patch.object(InterpreterBuilder, _MASKED[1], record_store),
    ):
        before = sys.gettrace()
        sys.settrace(watch.trace)
        try:
            yield watch.decided
        finally:
            sys.settrace(before)


def undecided(decided: Decided, file: Path) -> list[str]:
    """Functions and lines of branches that were not taken, and of masks that did not decide, in this file."""
    source = file.read_text()
    lines = source.splitlines()
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and _is_kernel(node)]
    missing: list[str] = []

    def note(line: int, what: str) -> None:
        (name,) = (one.name for one in functions if one.lineno <= line <= (one.end_lineno or 0))
        missing.append(f"{name}: {lines[line - 1].strip().rstrip(':')}: {what}")

    for function in functions:
        for line, what in _not_taken(function, decided.arcs[str(file)], decided.loops[str(file)]):
            note(line, what)
    # Loads without a mask have one in the interpreter, whose checks for overflow have an & too.
    of_source = {(node.lineno, node.col_offset) for function in functions for node in _with_masks(function)}
    for (name, line, column), by in decided.operands.items():
        if name == str(file) and (line, column) in of_source and by != {"left", "right"}:
            note(line, f"of an &, {' and '.join(sorted({'left', 'right'} - by))} never decides")
    for (name, line, column), values in decided.masks.items():
        if name == str(file) and (line, column) in of_source and values != {False, True}:
            note(line, f"a mask is always {values.pop()}")
    return sorted(set(missing))


def _with_masks(function: ast.FunctionDef) -> Iterator[ast.expr]:
    """Each ``&``, and each call with a mask."""
    for node in ast.walk(function):
        is_and = isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd)
        if is_and or (isinstance(node, ast.Call) and any(keyword.arg == "mask" for keyword in node.keywords)):
            assert isinstance(node, ast.expr)
            yield node


def _not_taken(
    function: ast.FunctionDef, arcs: set[tuple[int, int]], loops: dict[int, int]
) -> Iterator[tuple[int, str]]:
    for node in ast.walk(function):
        if isinstance(node, ast.If):
            for taken, what in zip(_taken(node, arcs), ("never true", "never false"), strict=True):
                if not taken:
                    yield node.lineno, what
        elif isinstance(node, ast.For) and "static_range" not in ast.unparse(node.iter):
            first = node.body[0].lineno
            if loops.get(first, 0) < 2:
                yield node.lineno, "never repeated" if first in loops else "never entered"


def _is_kernel(function: ast.FunctionDef) -> bool:
    return any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def _taken(node: ast.If, arcs: set[tuple[int, int]]) -> tuple[bool, bool]:
    """Whether the condition was true, and false."""
    tested = range(node.lineno, (node.test.end_lineno or node.lineno) + 1)
    inside = range(node.body[0].lineno, (node.body[-1].end_lineno or 0) + 1)
    to = {target for origin, target in arcs if origin in tested and target not in tested}
    return any(line in inside for line in to), any(line not in inside for line in to)
