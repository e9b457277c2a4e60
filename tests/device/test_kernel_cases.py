"""The cases with which kernels are tried lead through all paths of the kernels, which Triton's interpreter runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import fastddp.kernels
import pytest
import torch
from torch import Tensor

from cases_interpreted import Block8, LowRank, Pack, Sums, Tables, deciding, undecided
from fastddp.kernel_loading import codec_cases, kernel_cases
from fastddp.kernel_loading.trials import Trial
from interpreting import interpreter  # noqa: F401  a fixture of this module

CPU = torch.device("cpu")
FOLDER = Path(fastddp.kernels.__file__).parent
FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def interpreted(trial: Trial, make: Callable[[], Any]) -> list[str]:
    """Paths in which the kernels, run by Triton's interpreter, do something else than operators."""
    of_interpreter = dataclasses.replace(trial, kernels=lambda device, is_trial: make())
    return [f"{found.path}: {found.differing}" for found in of_interpreter.run(CPU, trial=True) if found.differing]


OF_LOW_RANK = (codec_cases.compress, codec_cases.project, codec_cases.reconstruct)
Trials = Iterable[tuple[Trial, Callable[[], Any]]]


def of(make: Callable[[], Any], *trials: Trial) -> Trials:
    return [(trial, make) for trial in trials]


def of_pack() -> Trials:
    """A dtype each: which paths a kernel has does not depend on it, but for fp64, which is measured in fp64."""
    yield from of(Pack, kernel_cases.pack(FP64, FP64), kernel_cases.pack_measuring(BF16, BF16))
    yield from of(Pack, kernel_cases.unpack(FP64, FP64), kernel_cases.unpack(FP16, FP32))
    yield from of(Pack, kernel_cases.measure(BF16), kernel_cases.measure_gradients(FP64))


def of_block8() -> Trials:
    """All cases with one format; of the others one each, for how numbers are rounded."""
    add = codec_cases.add("int8", 256, False)  # each place of errors once, since the interpreter takes long
    few = dataclasses.replace(add, cases=[add.cases[0], add.cases[3], add.cases[4]])
    both = codec_cases.encode(BF16, "int8", 256, False), codec_cases.decode(FP16, "int8", 256)
    yield from of(functools.partial(Block8, "int8", 256), *both, few)
    for number, drawn in (("int8", True), ("e4m3", True), ("e5m2", False)):
        for trial in (codec_cases.encode(FP16, number, 128, drawn), codec_cases.decode(BF16, number, 128)):
            yield dataclasses.replace(trial, cases=trial.cases[-1:]), functools.partial(Block8, number, 128)


def of_low_rank() -> Trials:
    yield from of(LowRank, *(make(FP16, 4) for make in OF_LOW_RANK))
    of_many = codec_cases.reconstruct(FP16, 8)  # whose Q does not fit registers
    yield dataclasses.replace(of_many, cases=of_many.cases[-2:]), LowRank


NEVER_ASKED = ("_project_block: tiles = tiles + (tl.load(source_pointer + offsets, mask=live & (source != 0)",)
"""What no launcher asks: a matrix has a gradient or a memory."""


@pytest.mark.tier("slow")
@pytest.mark.tier("nightly", but_one_in=4)  # the interpreter takes minutes
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("trials", "names"),
    [
        (of_pack, ["pack_kernels"]),
        (of_low_rank, ["low_rank_kernels"]),
        (lambda: of(LowRank, codec_cases.orthogonalise(32)), ["orthogonalise_kernels"]),
        (of_block8, ["block8_kernels", "block8_numbers"]),
        (lambda: of(Sums, kernel_cases.sum_shards(FP16)), ["sum_shards_kernels"]),
        (lambda: of(Tables, kernel_cases.write_words()), ["device_table_kernels"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_each_branch_of_a_kernel_is_taken_and_each_mask_decides(trials: Callable[[], Trials], names: list[str]) -> None:
    with deciding(FOLDER) as decided:
        assert {trial.what: wrong for trial, make in trials() if (wrong := interpreted(trial, make))} == {}
    for name in names:
        found = undecided(decided, FOLDER / f"{name}.py")
        assert [text for text in found if not text.startswith(NEVER_ASKED)] == []


class WrongSums(Sums):
    """A bit of the result's first number, or of what lies after it, is another one."""

    def __init__(self, beside: bool) -> None:
        self.beside = beside

    def __call__(self, shards: Tensor, target: Tensor) -> None:
        super().__call__(shards, target)
        target.view(torch.int16).as_strided([target.numel() + 1], [1])[-1 if self.beside else 0] ^= 1


class WrongMeasure(Pack):
    def measure(self, wire: Tensor) -> Any:
        return super().measure(wire) + 1


@pytest.mark.parametrize(
    ("trial", "make", "found"),
    [
        (kernel_cases.sum_shards(FP16), lambda: WrongSums(beside=False), "numbers are not those of torch's operators"),
        (kernel_cases.sum_shards(FP16), lambda: WrongSums(beside=True), "memory was written beside"),
        (kernel_cases.measure(FP64), WrongMeasure, "the sum of squares"),
    ],
)
def test_a_trial_notices_what_is_wrong(trial: Trial, make: Callable[[], Any], found: str) -> None:
    (noticed,) = interpreted(dataclasses.replace(trial, cases=trial.cases[:1]), make)
    assert found in noticed


def test_the_numbers_around_which_cases_are_made_are_those_of_the_kernels() -> None:
    from fastddp.kernels import block8_kernels, low_rank_kernels, orthogonalise_kernels, pack_kernels
    from fastddp.kernels import device_table_kernels as tables
    from fastddp.kernels import sum_shards_kernels as sums

    chunks = (pack_kernels.CHUNK_ELEMENTS, block8_kernels.ELEMENTS, sums.ELEMENTS, orthogonalise_kernels.TILE)
    assert set(chunks) == {kernel_cases.CHUNK}
    assert pack_kernels.chunk_elements(FP16, FP16) == kernel_cases.STEPS[-1]
    assert pack_kernels.ACCESS_BYTES == kernel_cases.ACCESS
    assert (tables.WORDS, tables.GROUP) == (kernel_cases.WORDS, kernel_cases.WORDS_TOGETHER)
    steps = (pack_kernels._STRIDED_STEP, sums._SCALAR_STEP, pack_kernels._SCALAR_STEP)
    assert tuple(step.value for step in steps) == kernel_cases.STEPS[:-2]
    assert low_rank_kernels.STEP == 2 * low_rank_kernels.COLUMNS == codec_cases.STEP
    assert low_rank_kernels.RECONSTRUCT_TILE[0] == 256
