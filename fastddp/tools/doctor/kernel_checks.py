"""Runs fastddp's kernels on a device, compiled first if needed, and compares with torch's operators on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch

from fastddp import _C
from fastddp.kernel_loading import codec_cases, kernel_cases, launching
from fastddp.kernel_loading.trials import Trial
from fastddp.tools.doctor.findings import KernelCheck, in_a_line

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
PAIRS = (*itertools.product(_NARROW, _NARROW), (torch.float64, torch.float64))  # dtypes of gradients and wire

_RANK = 4
_NUMBERS = ("int8", "e4m3")  # the defaults of the hooks of 8 bits
_BLOCK = 256


def check_kernels(device: torch.device) -> list[KernelCheck]:
    """Lead all kernels through all of their paths on the device; errors become part of the result.

    On a GPU, kernels are compiled first, where Triton's cache does not have them. What earlier processes have recorded
    of kernels does not count: results are compared here.
    """
    families = {"pack and unpack": _pack, "PowerSGD": _low_rank, "8 bits": _block8, "sums of 16 bits": _sums}
    return [_check(device, kernels, trials) for kernels, trials in families.items()]


def _check(device: torch.device, kernels: str, trials: Callable[[torch.device], Iterator[Trial]]) -> KernelCheck:
    before = _given_up(device)
    launches, differing, idle = 0, [], []  # the first fault of each trial; trials in which nothing was launched
    try:
        for trial in trials(device):
            outcomes = list(trial.run(device, reference=torch.device("cpu")))
            differing += [f"{trial.what} ({one.path}: {one.differing})" for one in outcomes if one.differing][:1]
            launched = sum(one.launches for one in outcomes)
            launches += launched
            idle += [] if launched else [trial.what]
        given_up = tuple(kernel for kernel in _given_up(device) if kernel not in before)
        if not given_up and launching.capability_of(device) is not None:
            given_up = tuple(f"for {what}: it could not be tried, or was given up before" for what in idle)
    except Exception as error:  # whatever it is (a compiler, a driver, a missing library), it is the finding
        return KernelCheck(str(device), kernels, "", error=in_a_line(error))
    made_of = "C++" if device.type == "cpu" else "Triton" if launches else "torch's operators"
    return KernelCheck(str(device), kernels, made_of, tuple(differing), given_up)


def _given_up(device: torch.device) -> list[str]:
    return [f"{name} ({place}): {reason}" for where, name, place, reason in _C.kernels_given_up() if where == device]


def _pack(device: torch.device) -> Iterator[Trial]:
    launching.load_kernels(((device, gradient, wire) for gradient, wire in PAIRS), corruption=True)
    if launching.capability_of(device) is not None:
        yield kernel_cases.write_words()
    for gradient, wire in PAIRS:
        yield kernel_cases.pack(gradient, wire)
        yield kernel_cases.pack_measuring(gradient, wire)
        yield kernel_cases.unpack(gradient, wire)
    for dtype in (*_NARROW, torch.float64):
        yield kernel_cases.measure(dtype)
        yield kernel_cases.measure_gradients(dtype)


def _low_rank(device: torch.device) -> Iterator[Trial]:
    launching.load_low_rank_kernels(((device, dtype) for dtype in _NARROW), _RANK)
    for dtype in _NARROW:
        yield codec_cases.compress(dtype, _RANK)
        yield codec_cases.project(dtype, _RANK)
        yield codec_cases.reconstruct(dtype, _RANK)
    yield codec_cases.orthogonalise(_RANK)


def _block8(device: torch.device) -> Iterator[Trial]:
    for number, drawn in itertools.product(_NUMBERS, (False, True)):
        launching.load_block8_kernels(((device, dtype) for dtype in _NARROW), number, _BLOCK, drawn)
        yield codec_cases.add(number, _BLOCK, drawn)
        for dtype in _NARROW:
            yield codec_cases.encode(dtype, number, _BLOCK, drawn)
            if not drawn:
                yield codec_cases.decode(dtype, number, _BLOCK)


def _sums(device: torch.device) -> Iterator[Trial]:
    for dtype in _NARROW[1:]:
        launching.load_sum_kernels([device], dtype)
        yield kernel_cases.sum_shards(dtype)
