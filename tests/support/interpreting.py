"""The Triton kernels, run by Triton's interpreter on the CPU.

The interpreter is chosen when ``@triton.jit`` runs, so tests import a second copy of ``fastddp.kernels`` under another
name while TRITON_INTERPRET is set. The copy that everybody else imports stays compiled.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import fastddp.kernels
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter as tritons
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle

NAME = "interpreted_kernels"
TRITONS_PATCH = tritons._patch_lang_tensor
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def interpreted_copies(*names: str) -> list[Any]:
    folder = Path(fastddp.kernels.__file__).parent
    if NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            NAME, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        sys.modules[NAME] = importlib.util.module_from_spec(spec)
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        return [importlib.import_module(f"{NAME}.{name}") for name in names]


@pytest.fixture(autouse=True, scope="module")
def interpreter() -> Iterator[None]:
    """For modules that import it: an interpreter that computes as a GPU does, and knows Triton's own functions."""
    with ExitStack() as patches:
        for language in (tl, tl.core, tl.math, tl.tensor):
            patches.enter_context(_restored(language))
        patches.enter_context(mock.patch("triton.runtime.interpreter._convert_float", _convert_float))
        patches.enter_context(mock.patch.object(InterpreterBuilder, "create_splat", _create_splat))
        patches.enter_context(mock.patch("triton.runtime.interpreter._patch_lang_tensor", _patch_lang_tensor))
        patches.enter_context(np.errstate(all="ignore"))
        # Functions of Triton that are themselves kernels (tl.sum, tl.zeros) were made when Triton was imported.
        for name, member in vars(tl).items():
            if isinstance(member, triton.JITFunction):
                patches.enter_context(mock.patch.object(tl, name, InterpretedFunction(member.fn)))
        yield


@contextmanager
def alignment_hints() -> Iterator[list[bool]]:
    """Of each hint that kernels give inside, whether it is true."""
    hints: list[bool] = []

    def record(handle: Any, name: str, values: list[int]) -> None:
        assert name == "tt.divisibility"
        hints.append(bool((handle.data % values[0] == 0).all()))

    with mock.patch("triton.runtime.interpreter.TensorHandle.set_attr", record):
        yield hints


@contextmanager
def _restored(language: Any) -> Iterator[None]:
    """The interpreter replaces members of Triton's language, and leaves some behind, which no compiler can use."""
    before = dict(vars(language))
    yield
    for name, member in dict(vars(language)).items():
        if name not in before:
            delattr(language, name)
        elif member is not before[name]:
            setattr(language, name, before[name])


def _convert_float(values: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    """The interpreter's own cast from fp32 to bf16 truncates; a GPU's rounds to nearest even, as torch does."""
    types = {"fp32": (np.float32, torch.float32), "bf16": (np.int16, torch.bfloat16)}
    numpy_source, torch_source = types[source.name]
    tensor = torch.from_numpy(np.ascontiguousarray(values).view(numpy_source).copy()).view(torch_source)
    converted = tensor.to(types[target.name][1])
    unsigned = converted.view(BITS[converted.element_size()]).numpy().view(f"uint{8 * converted.element_size()}")
    return unsigned.reshape(values.shape)


def _create_splat(self: InterpreterBuilder, result_type: Any, scalar: TensorHandle) -> TensorHandle:
    """The interpreter's own makes int64 of what was compared as int64, which Triton 3.9 then refuses as a mask."""
    return TensorHandle(np.full(result_type.shape, scalar.data, dtype=scalar.data.dtype), scalar.dtype.scalar)


def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
    """Scalars are arrays of one element: Triton 3.6 hands them to int(), where NumPy 2.4 takes no dimensions."""
    TRITONS_PATCH(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))
