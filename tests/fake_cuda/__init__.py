"""A simulated accelerator with a stand-in for libcuda: the whole GPU path of fastddp on a machine without a GPU.

``install()`` gives torch a device type "simulated". Its streams are queues that run only when the host waits, in an
order as unkind as recorded events allow (``schedule``); its kernels compute on host memory. fastddp loads its real
cubins into the stand-in driver, which checks launches against what the cubins say of their parameters. The process
group backend of the same name orders its collectives by streams, as NCCL's does.

A process that has installed it stays that way: tests run it in rank processes of their own (``RankPool``).
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import cpp_extension

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
DEVICE = "simulated"

_extension: Any = None


def build() -> Any:
    """Compile what has changed since the last time, load the extension, and return it."""
    global _extension
    if _extension is None:
        folder = ROOT / "build" / f"fake_cuda-torch-{torch.__version__}"
        folder.mkdir(parents=True, exist_ok=True)
        twin_sources = [ROOT / "csrc" / name for name in ("kernels_cpu.cpp", "kernels_aten.cpp")]
        with (folder / "in_use").open("w") as in_use:
            fcntl.flock(in_use, fcntl.LOCK_EX)
            # Left behind by a build that was killed, it would be waited for without end; any living one is waited for
            # above.
            (folder / "lock").unlink(missing_ok=True)
            _extension = cpp_extension.load(
                "fake_cuda_extension",
                [str(path) for path in [*sorted(HERE.glob("*.cpp")), *twin_sources]],
                extra_cflags=["-std=c++20", "-O1", "-g0", "-fvisibility=hidden"],
                build_directory=str(folder),
            )
    return _extension


def install(devices: int = 2, capability: int = 90) -> None:
    """Make this process one that has the simulated device, for good."""
    extension = build()
    extension.set_capability(capability)
    if hasattr(torch, DEVICE):
        return
    extension.install(devices)
    torch.utils.rename_privateuse1_backend(DEVICE)
    torch._register_device_module(DEVICE, _device_module(devices))
    dist.Backend.register_backend(DEVICE, _make_group, devices=[DEVICE])
    from fastddp import _C

    _C.use_driver(torch.device(DEVICE), extension.__file__)


def _device_module(devices: int) -> ModuleType:
    module = ModuleType(f"torch.{DEVICE}")
    module.is_available = lambda: True  # type: ignore[attr-defined]
    module.device_count = lambda: devices  # type: ignore[attr-defined]
    module.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]
    module._is_in_bad_fork = lambda: False  # type: ignore[attr-defined]
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]  # type: ignore[attr-defined]
    return module


def _make_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    inner = dist.ProcessGroupGloo(store, rank, size, timeout)
    return build().make_backend(inner, rank, size)


def loopback_backend(size: int) -> Any:
    """A backend that pretends to have ``size`` ranks, all of which hold what this one holds."""
    return build().make_backend(None, 0, size)


def schedule(policy: str, seed: int = 0) -> None:
    """In which order work runs from now on: "lazy", "others_first" or "random"."""
    extension = build()
    extension.schedule(getattr(extension.Policy, policy), seed)


@contextmanager
def without_waits() -> Iterator[None]:
    """Within this context, a wait of the host for the device raises."""
    build().forbid_waits(True)
    try:
        yield
    finally:
        build().forbid_waits(False)
