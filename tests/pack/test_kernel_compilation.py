"""The kernels as a GPU gets them: compiled ahead of time, no GPU needed, and read back as PTX and machine code."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from fastddp.kernels import ahead_of_time, block8_kernels, sum_shards_kernels
from fastddp.kernels.ahead_of_time import CompiledKernel, Form
from fastddp.kernels.pack_kernels import CHUNK_ELEMENTS, OPTIONS, TRITON_DTYPES, moves

from repository import ROOT

CAPABILITIES = [80, 90, 100]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PAIRS = [(gradient, wire) for gradient in DTYPES for wire in DTYPES] + [(torch.float64, torch.float64)]
THREADS = 32 * OPTIONS["num_warps"]
SPILLED = 0 if triton.__version__.startswith("3.7.") else 112
"""Bytes a thread; with the release that is pinned, none."""

forms = pytest.mark.parametrize("form", ["pack", "unpack", "pack_measuring"])
pairs = pytest.mark.parametrize(("gradient", "wire"), PAIRS, ids=lambda dtype: str(dtype).removeprefix("torch."))
capabilities = pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda capability: f"sm_{capability}")


@cache
def compiled(form: Form, gradient: torch.dtype, wire: torch.dtype, capability: int) -> CompiledKernel:
    return ahead_of_time.compile_pack(form, gradient, wire, capability)


def accesses_a_thread(kernel: CompiledKernel, dtype: torch.dtype) -> int:
    """How many 16-byte accesses move a thread's share of a whole chunk."""
    return kernel.tile[0] * dtype.itemsize // 16 // THREADS


def vector_accesses(ptx: str, instruction: str) -> Counter[int]:
    """Vector loads or stores of global memory in PTX, by their bytes."""
    found = re.findall(rf"\b{instruction}\.global[\w.:]*\.v(\d)\.b(\d+)\b", ptx)
    return Counter(int(count) * int(width) // 8 for count, width in found)


def check_resources(kernel: CompiledKernel, registers: int, shared_bytes: int = 2 * CHUNK_ELEMENTS) -> None:
    """Nothing spills, and no subnormal is lost."""
    used = ahead_of_time.resources(kernel)
    assert used.stack_bytes == 0
    assert 0 < used.registers <= registers
    assert kernel.shared_bytes <= shared_bytes
    assert not re.search(r"\.ftz\b", kernel.ptx)


@pytest.mark.tier("slow", but_one_in=7)
@forms
@pairs
@capabilities
def test_aligned_path_moves_16_bytes_at_a_time_nothing_spills_and_the_source_leaves_the_cache_first(
    form: Form, gradient: torch.dtype, wire: torch.dtype, capability: int
) -> None:
    kernel = compiled(form, gradient, wire, capability)
    source, target = (wire, gradient) if form == "unpack" else (gradient, wire)
    # Exactly as many as one chunk needs: the paths for unaligned and for strided chunks hold none.
    assert vector_accesses(kernel.ptx, "ld") == {16: accesses_a_thread(kernel, source)}
    assert vector_accesses(kernel.ptx, "st") == {16: accesses_a_thread(kernel, target)}
    assert all("evict_first" in load for load in re.findall(r"\bld\.global\S*\.v\d\S*", kernel.ptx))
    assert not any("evict_first" in store for store in re.findall(r"\bst\.global\S*", kernel.ptx))
    # A program moves as many bytes of 16-bit numbers as of fp32, if it casts none.
    is_twice = gradient == wire and gradient.itemsize == 2
    # 65536 registers, handed out by eights to each thread: room for six programs on a multiprocessor, or for five that
    # measure, or for four of fp64, or of twice as many elements.
    # Only a narrow source for a wide target is exchanged between threads, so that both sides keep 16 bytes.
    check_resources(kernel, 64 if gradient == torch.float64 or is_twice else 40 if form == "pack" else 48)
    # wire, table, chunks, scale, the partials of those that measure
    check_signature(kernel, ["u64", "u64", "u64", "f64", *([] if form == "pack" else ["u64"])])
    assert kernel.name == f"fastddp_{form}_{TRITON_DTYPES[source]}_to_{TRITON_DTYPES[target]}"
    assert (kernel.num_warps, kernel.capability) == (THREADS // 32, capability)
    assert kernel.tile == ((2 if is_twice else 1) * CHUNK_ELEMENTS,)


@forms
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
@capabilities
def test_all_loads_are_in_flight_before_the_first_store(form: Form, wire: torch.dtype, capability: int) -> None:
    # In machine code, and for a few forms only: disassembling takes twice as long as compiling.
    kernel = compiled(form, torch.float32, wire, capability)
    source, target = (wire, torch.float32) if form == "unpack" else (torch.float32, wire)
    vectors = re.findall(r"\b(LDG|STG)\.E\S*\.128\b", ahead_of_time.disassemble(kernel))
    assert vectors == ["LDG"] * accesses_a_thread(kernel, source) + ["STG"] * accesses_a_thread(kernel, target)


def check_signature(kernel: CompiledKernel, parameters: list[str]) -> None:
    """Two null scratch pointers come last; no pointer is promised to be aligned."""
    assert kernel.name.encode() in kernel.cubin
    entry = re.search(rf"\.entry {kernel.name}\((.*?)\)\s*\.reqntid (\d+)", kernel.ptx, re.DOTALL)
    assert entry is not None
    assert re.findall(r"\.param \.(\w+)", entry[1]) == [*parameters, "u64", "u64"]
    assert (kernel.parameters, kernel.scratch_parameters) == (len(parameters), 2)
    assert set(re.findall(r"\.align (\d+)", entry[1])) == {"1"}
    assert int(entry[2]) == 32 * kernel.num_warps


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@capabilities
def test_what_measures_reads_16_bytes_at_a_time(dtype: torch.dtype, capability: int) -> None:
    of_gradients = ahead_of_time.compile_measure_gradients(dtype, capability)
    assert (of_gradients.name, of_gradients.parameters) == (f"fastddp_measure_gradients_{TRITON_DTYPES[dtype]}", 3)
    for kernel in (of_gradients, ahead_of_time.compile_measure(dtype, capability)):
        assert vector_accesses(kernel.ptx, "ld") == {16: accesses_a_thread(kernel, dtype)}
        check_resources(kernel, 64 if dtype == torch.float64 else 48)


@pytest.mark.parametrize("dtype", sum_shards_kernels.DTYPES, ids=str)
@capabilities
def test_shards_are_read_16_bytes_at_a_time_of_four_ranks_at_once(dtype: torch.dtype, capability: int) -> None:
    kernel = ahead_of_time.compile_sum_shards(dtype, capability)
    of_a_rank = sum_shards_kernels.ELEMENTS * dtype.itemsize // 16 // THREADS
    assert vector_accesses(kernel.ptx, "ld") == {16: 4 * of_a_rank}
    assert vector_accesses(kernel.ptx, "st") == {16: of_a_rank}
    check_resources(kernel, 48, shared_bytes=0)
    check_signature(kernel, ["u64"] * 4)
    assert kernel.name == f"fastddp_sum_shards_{TRITON_DTYPES[dtype]}"


@capabilities
def test_the_words_of_a_table_are_parameters(capability: int) -> None:
    kernel = ahead_of_time.compile_write_words(capability)
    words, _ = kernel.tile
    check_resources(kernel, 64, shared_bytes=0)
    check_signature(kernel, ["u64"] * (2 + words))
    assert len(re.findall(r"st\.global\.b64", kernel.ptx)) == words
    assert kernel.parameters * 8 + 16 <= 4096


LOW_RANK_PARAMETERS = {
    "compress": ["u64", "u64", "f64"],
    "project": ["u64", "u64", "u64"],
    "sum_partials": ["u64", "u64", "u64", "f64"],
    "reconstruct": ["u64", "u64", "u64"],
    "gram": ["u64", "u64", "u64"],
    "orthonormalise": ["u64", "u64", "u64", "u64", "f64", "u64", "u64"],
    "reorthonormalise": ["u64", "u64", "u64", "u64", "f64", "u64", "u64"],
}


def form_of(kernel: CompiledKernel) -> str:
    found = re.fullmatch(r"fastddp_(\w+?)(_(fp32|fp16|bf16))?(_r\d+)?", kernel.name)
    assert found is not None
    return found[1]


@pytest.mark.tier("slow", but_one_in=20)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", [1, 2, 3, 8, 16, 32])  # each that is compiled; for 3, it is 4
@capabilities
def test_the_kernels_of_powersgd_spill_nothing_and_read_matrices_16_bytes_at_a_time(
    dtype: torch.dtype, rank: int, capability: int
) -> None:
    kernels = {form_of(kernel): kernel for kernel in ahead_of_time.compile_low_rank(dtype, rank, capability)}
    assert list(kernels) == list(LOW_RANK_PARAMETERS)
    for kernel in kernels.values():
        assert ahead_of_time.resources(kernel).stack_bytes <= SPILLED, kernel.name
        assert not re.search(r"\.ftz\b", kernel.ptx)
    # The sums of 32 vectors leave no registers for more than 8 bytes of a 16-bit dtype.
    widest = 8 if rank * (16 // dtype.itemsize) > 128 else 16
    for form, bytes_at_once in {"compress": 16, "reconstruct": 16, "project": widest}.items():
        assert max(vector_accesses(kernels[form].ptx, "ld")) == bytes_at_once, form
    for form in ("compress", "reconstruct"):
        assert max(vector_accesses(kernels[form].ptx, "st")) == 16, form
    for form, kernel in kernels.items():
        check_signature(kernel, LOW_RANK_PARAMETERS[form])
        assert kernel.name.endswith(f"_r{4 if rank == 3 else rank}") == (form != "sum_partials")


BLOCK8_PARAMETERS = {
    "encode": ["u64", "u64", "u64", "u64", "u64", "f64", "u64"],
    "add": ["u64", "u64", "u64", "u64", "u64", "u64", "u64"],
    "decode": ["u64", "u64", "u64", "u64"],
}


@pytest.mark.tier("slow", but_one_in=13)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", block8_kernels.NUMBERS)
@pytest.mark.parametrize("block", block8_kernels.BLOCKS)
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "drawn"])
@capabilities
def test_block8_moves_16_bytes_at_a_time_and_nothing_twice_spills_nothing_and_fuses_nothing(
    dtype: torch.dtype, number: str, block: int, stochastic: bool, capability: int
) -> None:
    found = ahead_of_time.compile_block8(dtype, number, block, stochastic, capability)
    # Bytes an element that a program reads and writes where all is aligned; add reads four shards at a time.
    width = dtype.itemsize
    moved = {"encode": (width + 4, 4 + 1), "add": (4 + 4, 5), "decode": (1, width)}
    of_a_thread = block8_kernels.ELEMENTS // THREADS
    for form, kernel in zip(BLOCK8_PARAMETERS, found, strict=True):
        # All of them: tiles that are not aligned have none.
        counts = vector_accesses(kernel.ptx, "ld"), vector_accesses(kernel.ptx, "st")
        read, written = ({16: bytes_ * of_a_thread // 16} for bytes_ in moved[form])
        if form == "decode":  # as many bytes at once as numbers are written: 8, or 4, which are no vector
            read = {8: 2} if width == 2 else {}
        assert counts == (read, written), form
        used = ahead_of_time.resources(kernel)
        assert used.stack_bytes == 0, form
        # Room for three programs on a multiprocessor; for two that have bytes of four shards in flight.
        assert 0 < used.registers <= (128 if form == "add" else 80), form
        # Bytes of a program, or numbers of 16 bits, change hands.
        assert kernel.shared_bytes <= 2 * block8_kernels.ELEMENTS
        # Nor is anything rounded otherwise than fp32 is, or left to instructions that sm_80 does not have.
        otherwise = r"\.ftz\b|\bfma\.|\bdiv\.(full|approx)|\brcp\.|\bcvt\S*\.e[45]m[23]"
        assert not re.search(otherwise, kernel.ptx), form
        of_gradients = "" if form == "add" else f"_{TRITON_DTYPES[dtype]}"
        drawn = "_drawn" if stochastic and form != "decode" else ""
        assert kernel.name == f"fastddp_block8_{form}{of_gradients}_{number}_{block}{drawn}"
        check_signature(kernel, BLOCK8_PARAMETERS[form])
        assert (kernel.num_warps, kernel.tile) == (THREADS // 32, (block8_kernels.ELEMENTS,))


pack, low_rank, block8 = ahead_of_time.compile_pack, ahead_of_time.compile_low_rank, ahead_of_time.compile_block8
BAD: list[tuple[Callable[..., object], tuple[Any, ...], str]] = [
    (pack, ("pack", torch.int32, torch.float32), "gradients have dtype torch.int32; supported are"),
    (pack, ("unpack", torch.complex64, torch.float32), "view_as_real"),
    (pack, ("pack", torch.float32, torch.float64), "fp64 travels only as fp64"),
    (partial(pack, chunk=48), ("pack", torch.float32, torch.float32), "power of two"),
    (low_rank, (torch.float64, 4), "supported are torch"),
    (low_rank, (torch.float32, 33), "the rank is 33; supported are 1 to 32"),
    (block8, (torch.float64, "int8", 128, False), r"torch\.float64; supported are"),
    (block8, (torch.float32, "int4", 128, False), "int4 in blocks of 128; support"),
]


@pytest.mark.parametrize(("compile_", "arguments", "message"), BAD)
def test_what_is_not_compiled(compile_: Callable[..., object], arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compile_(*arguments, 90)
    assert compile_ is not pack or not moves(*arguments[1:])


def other_triton(release: str) -> Path:
    """The folder that holds it; it is kept in build/."""
    folder = ROOT / "build" / f"triton-{release}"
    if not folder.is_dir():
        made = folder.with_suffix(".made")
        shutil.rmtree(made, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(made)]
        tried = subprocess.run([*command, f"triton=={release}"], capture_output=True, text=True, check=False)
        if tried.returncode:
            pytest.skip(f"Triton {release} cannot be had here: {tried.stderr[-300:]}")
        made.rename(folder)
    return folder


@pytest.mark.tier("nightly")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("release", ["3.6.0", "3.8.0", "3.9.0"])
def test_a_kernel_of_each_kind_compiles_under_each_release_of_triton(release: str, tmp_path: Path) -> None:
    paths = [str(other_triton(release)), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "support" / "compile_kernels.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    used = json.loads(done.stdout)
    assert used["triton"] == release
    assert max(stack_bytes for *_, stack_bytes in used["kernels"]) <= 112


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0"])
def test_unknown_versions_of_triton_are_refused(version: str) -> None:
    assert ahead_of_time.scratch_parameters("3.9.0+git1234") == 2
    with pytest.raises(RuntimeError, match=rf"those of Triton {version} are launched; install one of 3.6, 3.7"):
        ahead_of_time.scratch_parameters(version)
