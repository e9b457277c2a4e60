"""Kernels prove themselves before they are used, and files record it: see the note in csrc/device/compiled_kernels.h.

Where no file can be written, each job tries its kernels again, when a model is wrapped.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fastddp import _C

if TYPE_CHECKING:
    from fastddp.kernel_loading.trials import Trial
    from fastddp.kernels.ahead_of_time import CompiledKernel


@cache
def driver_version() -> str:
    """The driver's version as NVML gives it, such as "580.65.06"; empty where NVML does not answer."""
    try:
        pynvml = importlib.import_module("pynvml")
        pynvml.nvmlInit()
        try:
            version = pynvml.nvmlSystemGetDriverVersion()
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # not installed, no library, no permission: nothing is recorded then
        return ""
    return version.decode() if isinstance(version, bytes) else str(version)


@cache
def place_of(device: torch.device) -> str:
    """The kind of device, the driver and the compiler, in words. A proof holds for these only."""
    import triton

    name = torch.get_device_module(device.type).get_device_name(device)
    return f"{name}, driver {driver_version() or 'unknown'}, Triton {triton.__version__}"


def proof_of(kernel: CompiledKernel, device: torch.device) -> Path | None:
    """The file that exists once the kernel has passed on such a device and driver; None: unknown driver, no folder."""
    if not driver_version():
        return None
    from triton import knobs

    folder = Path(knobs.cache.dir) / "fastddp-proofs"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        what = f"{kernel.name}, {place_of(device)}, {_digest_of_cases()}"
        return folder / hashlib.sha256(kernel.cubin + what.encode()).hexdigest()[:32]
    return None


@cache
def _digest_of_cases() -> str:
    """Changes with what kernels are tried with: a kernel that has passed other trials is tried again."""
    here = Path(__file__).parent
    sources = (here / name for name in ("trials.py", "kernel_cases.py", "codec_cases.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def prove(kernels: Sequence[CompiledKernel], trial: Trial, device: torch.device) -> None:
    """Try those of these loaded kernels that nobody has tried. One that is right is used from here on, and recorded.

    One that is wrong is given up. Where a trial is not possible, torch's operators do the kernels' work until somebody
    calls this again. Both are warned of.
    """
    untried = [kernel for kernel in kernels if _C.trust_in_kernel(device, kernel.name) == _C.Trust.untried]
    if not untried:
        return
    names = ", ".join(kernel.name for kernel in untried)
    if _C.is_capturing(device):
        _warn_of_no_trial(names, device, "a graph is being captured")
        return
    try:
        wrong = next((found for found in trial.run(device, trial=True) if found.differing), None)
    except torch.AcceleratorError:  # the device's own: nothing runs there any more
        raise
    except RuntimeError as error:  # no memory, most of all
        _warn_of_no_trial(names, device, str(error).splitlines()[0])
        return
    for kernel in untried:
        if wrong is not None:
            reason = f"{trial.what}, {wrong.path}: {wrong.differing}"
            given_up = _C.give_up_kernel(device, kernel.name, place_of(device), reason)
            if given_up:
                warnings.warn(given_up, stacklevel=2)
            continue
        _C.prove_kernel(device, kernel.name)
        file = proof_of(kernel, device)
        if file is not None and _C.trust_in_kernel(device, kernel.name) == _C.Trust.proven:
            with contextlib.suppress(OSError), file.open("x") as made:  # what is there is not opened: it may be a pipe
                made.write(f"{kernel.name}, {place_of(device)}\n")


def _warn_of_no_trial(names: str, device: torch.device, why: str) -> None:
    why = why.rstrip(".")
    warnings.warn(
        f"fastddp: the kernels {names} could not be tried on {device}: {why}. Until a later trial, when the next "
        "exchange is installed, torch's operators do their work: gradients are right, and a step takes longer.",
        stacklevel=3,
    )
