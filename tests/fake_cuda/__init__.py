"""A simulated accelerator with a fake libcuda: the whole GPU path of fastddp on a machine without a GPU.

``install()`` gives torch a device type "simulated". Its streams are queues that run only when the host waits, in an
order as unkind as recorded events allow (``schedule``); its kernels compute on host memory, which is overwritten as
soon as it is freed. fastddp loads its real cubins into the fake driver, which checks launches against what the
cubins say of their parameters. The process group backend of the same name orders its collectives by streams, as NCCL's.

A process that has installed it stays that way, so tests run in rank processes of their own::

    def gradients(rank):
        fake_cuda.schedule("others_first")   # forgets what was before
        model = fastddp.DistributedDataParallel(nn.Linear(2, 2).to("simulated"))
        with fake_cuda.without_waits():      # a wait of the host raises
            model(torch.ones(2, 2, device="simulated")).sum().backward()
        return [parameter.grad.cpu() for parameter in model.parameters()], fake_cuda.launches()

    def test_it(simulated_ranks):
        simulated_ranks.run(gradients, 2)

Install before the first backward of the process: autograd starts its threads, one for each device, only once.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from . import building

DEVICE = "simulated"
BLOCKING = f"{DEVICE}_blocking"
"""A backend that has NCCL's name and is none: its host waits, as NCCL's does with ``TORCH_NCCL_BLOCKING_WAIT``."""

_extension: Any = None


def __getattr__(name: str) -> Any:
    """What module.cpp defines, once the device is installed: ``schedule``, ``launches`` and so on."""
    return getattr(_extension, name)


def build() -> Any:
    """Compile what has changed since the last time; returns the extension, if this process has installed the device."""
    building.build()
    return _extension


def install() -> None:
    """Make this process one that has two simulated devices, for good. Later calls change nothing."""
    global _extension
    if _extension is None:
        spec = importlib.util.spec_from_file_location(building.NAME, building.build())
        assert spec is not None
        assert spec.loader is not None
        _extension = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(_extension)
        _extension.make_device()
        _register()


def _register() -> None:
    torch.utils.rename_privateuse1_backend(DEVICE)
    torch._register_device_module(DEVICE, _device_module())
    for name, stands_in_for, host_waits in (
        (DEVICE, DEVICE, False),
        (BLOCKING, "nccl", True),
        (f"{DEVICE}_gloo", "gloo", False),  # its collectives work; messages between two ranks need host memory
    ):
        dist.Backend.register_backend(name, partial(_make_backend, stands_in_for, host_waits), devices=[DEVICE])
    from fastddp import _C
    from fastddp.kernel_loading import proofs

    if hasattr(_C, "use_driver"):
        _C.use_driver(torch.device(DEVICE), str(building.LIBRARY))
    # Kernels have passed here: what steps cost is what they cost afterwards. tests/device/test_proofs.py has others.
    proofs.proof_of = lambda kernel, device: building.LIBRARY


def _device_module() -> ModuleType:
    """What torch asks of ``torch.<device type>``."""
    module: Any = ModuleType(f"torch.{DEVICE}")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None  # without it, torch 2.11 takes the device for unused and does not synchronise it
    module.device_count = lambda: 2
    module.current_device = torch.accelerator.current_device_index
    module.device = lambda device: torch.accelerator.device_index(torch.device(device).index)
    module.set_device = torch.accelerator.set_device_index
    module.current_stream = torch.accelerator.current_stream
    module.synchronize = torch.accelerator.synchronize
    module.manual_seed = module.manual_seed_all = lambda seed: None  # random numbers are the CPU's
    module.get_device_name = lambda device=None: "Simulated"
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    return module


def _make_backend(name: str, host_waits: bool, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    inner = dist.ProcessGroupGloo(dist.PrefixStore("inner", store), rank, size, timeout) if size > 1 else None
    return _extension.make_backend(inner, dist.PrefixStore("calls", store), rank, size, name, host_waits)


def loopback_backend(size: int) -> Any:
    """A backend that pretends to have ``size`` ranks, all of which hold what this one holds."""
    return _extension.make_backend(None, dist.HashStore(), 0, size, DEVICE, False)


@contextmanager
def without_waits() -> Iterator[None]:
    """Within this context, a wait of the host for the device raises."""
    _extension.forbid_waits(True)
    try:
        yield
    finally:
        _extension.forbid_waits(False)
