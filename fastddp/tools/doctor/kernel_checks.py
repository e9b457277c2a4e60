"""Runs fastddp's kernels on a device, compiled first if needed, and compares with torch's operators on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fastddp.tools.doctor.findings import Finding, wrong

if TYPE_CHECKING:
    from fastddp.exchange.trials import Trial

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
PAIRS = (*itertools.product(_NARROW, _NARROW), (torch.float64, torch.float64))
"""Dtypes of gradients and wire."""

_RANK = 4
_NUMBERS = ("int8", "e4m3")  # the defaults of the hooks of 8 bits
_BLOCK = 256
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class KernelCheck:
    """One family of kernels on one device."""

    device: str
    kernels: str  # what they do
    made_of: str  # C++, Triton, or torch's operators
    wrong: tuple[str, ...] = ()  # what differed from plain torch
    given_up: tuple[str, ...] = ()  # kernels that torch's operators stand in for, and why
    error: str | None = None  # what was raised instead of a result


def check_kernels(device: torch.device) -> list[KernelCheck]:
    """Lead all kernels through all of their paths on the device; errors become part of the result.

    What earlier processes have recorded of kernels does not count: results are compared here.

    Args:
        device: any; on a GPU, kernels are compiled first, where Triton's cache does not have them.
    """
    return [
        _guarded(device, "pack and unpack", _load_pack, _trials_of_pack),
        _guarded(device, "PowerSGD", _load_low_rank, _trials_of_low_rank),
        _guarded(device, "8 bits", _load_block8, _trials_of_block8),
        _guarded(device, "sums of 16 bits", _load_sums, _trials_of_sums),
    ]


def _guarded(
    device: torch.device, kernels: str, load: Callable[[torch.device], None], trials: Callable[[], Iterator[Trial]]
) -> KernelCheck:
    before = _given_up(device)
    try:
        load(device)
        launches, differing, idle = _run(device, trials())
        given_up = tuple(kernel for kernel in _given_up(device) if kernel not in before)
        if not given_up and _should_have_kernels(device):
            given_up = tuple(f"for {what}: it could not be tried, or was given up before" for what in idle)
    except Exception as error:  # whatever it is (a compiler, a driver, a missing library), it is the finding
        text = str(error).strip().splitlines()
        return KernelCheck(str(device), kernels, "", error=f"{type(error).__name__}: {text[0] if text else ''}")
    made_of = "C++" if device.type == "cpu" else "Triton" if launches else "torch's operators"
    return KernelCheck(str(device), kernels, made_of, tuple(differing), given_up)


def _run(device: torch.device, trials: Iterator[Trial]) -> tuple[int, list[str], list[str]]:
    """Launches; what was wrong, the first of each trial; and the trials in which nothing was launched."""
    launches, differing, idle = 0, [], []
    for trial in trials:
        outcomes = list(trial.run(device, reference=_CPU))
        differing += [f"{trial.what} ({one.path}: {one.differing})" for one in outcomes if one.differing][:1]
        launches += sum(one.launches for one in outcomes)
        if not any(one.launches for one in outcomes):
            idle.append(trial.what)
    return launches, differing, idle


def _should_have_kernels(device: torch.device) -> bool:
    from fastddp.exchange.launching import capability_of

    return capability_of(device) is not None


def _given_up(device: torch.device) -> list[str]:
    from fastddp import _C

    return [f"{name} ({place}): {reason}" for where, name, place, reason in _C.kernels_given_up() if where == device]


def _load_pack(device: torch.device) -> None:
    from fastddp.exchange.launching import load_kernels

    load_kernels(((device, gradient, wire) for gradient, wire in PAIRS), measuring_gradients=True)


def _trials_of_pack() -> Iterator[Trial]:
    from fastddp.exchange import kernel_cases

    for gradient, wire in PAIRS:
        yield kernel_cases.pack(gradient, wire)
        yield kernel_cases.pack_measuring(gradient, wire)
        yield kernel_cases.unpack(gradient, wire)
    for dtype in (*_NARROW, torch.float64):
        yield kernel_cases.measure(dtype)
        yield kernel_cases.measure_gradients(dtype)


def _load_low_rank(device: torch.device) -> None:
    from fastddp.exchange.launching import load_low_rank_kernels

    load_low_rank_kernels(((device, dtype) for dtype in _NARROW), _RANK)


def _trials_of_low_rank() -> Iterator[Trial]:
    from fastddp.exchange import codec_cases

    for dtype in _NARROW:
        yield codec_cases.compress(dtype, _RANK)
        yield codec_cases.project(dtype, _RANK)
        yield codec_cases.reconstruct(dtype, _RANK)
    yield codec_cases.orthogonalise(_RANK)


def _load_block8(device: torch.device) -> None:
    from fastddp.exchange.launching import load_block8_kernels

    for number, drawn in itertools.product(_NUMBERS, (False, True)):
        load_block8_kernels(((device, dtype) for dtype in _NARROW), number, _BLOCK, drawn)


def _trials_of_block8() -> Iterator[Trial]:
    from fastddp.exchange import codec_cases

    for number, drawn in itertools.product(_NUMBERS, (False, True)):
        yield codec_cases.add(number, _BLOCK, drawn)
        for dtype in _NARROW:
            yield codec_cases.encode(dtype, number, _BLOCK, drawn)
            if not drawn:
                yield codec_cases.decode(dtype, number, _BLOCK)


def _load_sums(device: torch.device) -> None:
    from fastddp.exchange.launching import load_sum_kernels

    for dtype in _NARROW[1:]:
        load_sum_kernels([device], dtype)


def _trials_of_sums() -> Iterator[Trial]:
    from fastddp.exchange import kernel_cases

    for dtype in _NARROW[1:]:
        yield kernel_cases.sum_shards(dtype)


def findings(checks: Sequence[KernelCheck], about: str = "") -> list[Finding]:
    """Findings on what did not run, or was computed wrong.

    Args:
        checks: of one process.
        about: whose they are, before the device.
    """
    found = []
    for check in checks:
        where = f"{about}{check.device}"
        if check.error is not None:
            what = f"fastddp's kernels for {check.kernels} did not run: {check.error.rstrip('.')}."
            found.append(wrong(where, what, "Whatever it is would end training as well: see to it first."))
        if check.wrong:
            what = f"fastddp's kernels computed something else than plain torch: {', '.join(check.wrong)}."
            broken = (
                "Do not train on this device: check its memory. Should all devices do this, tell fastddp's authors."
            )
            found.append(wrong(where, what, broken))
        for kernel in check.given_up:
            what = f"torch's operators stand in for fastddp's kernel {kernel}."
            found.append(wrong(where, what, "Training is right there, and slower. Tell fastddp's authors this line."))
    return found
