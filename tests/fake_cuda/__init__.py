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
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist

from . import building
from .building import LIBRARY

__all__ = [
    "BLOCKING",
    "DEVICE",
    "LIBRARY",
    "Graph",
    "allocated_bytes",
    "break_kernels",
    "build",
    "chunks_by_element",
    "collectives",
    "events",
    "history",
    "host_waits",
    "install",
    "launches",
    "loopback_backend",
    "memory_asked_for",
    "offer_memory",
    "peak_bytes",
    "reset_peak",
    "reset_records",
    "schedule",
    "set_capability",
    "synchronize",
    "uploads",
    "without_waits",
]

DEVICE = "simulated"
BLOCKING = f"{DEVICE}_blocking"
"""A backend that has NCCL's name and is none: its host waits, as NCCL's does with ``TORCH_NCCL_BLOCKING_WAIT``."""
Policy = Literal["lazy", "others_first", "random", "in_order"]

_extension: Any = None


def build() -> Any:
    """Compile what has changed since the last time; returns the extension, if this process has installed the device."""
    building.build()
    return _extension


def _load() -> Any:
    spec = importlib.util.spec_from_file_location(building.NAME, building.build())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def install(device_count: int = 2, capability: int = 90) -> None:
    """Make this process one that has the simulated device, for good. Later calls change nothing but the capability."""
    global _extension
    if _extension is not None:
        set_capability(capability)
        return
    _extension = _load()
    _extension.install(device_count)
    set_capability(capability)
    torch.utils.rename_privateuse1_backend(DEVICE)
    torch._register_device_module(DEVICE, _device_module(device_count))
    dist.Backend.register_backend(DEVICE, _make_group, devices=[DEVICE])
    dist.Backend.register_backend(f"{DEVICE}_gloo", _make_gloo, devices=[DEVICE])
    dist.Backend.register_backend(BLOCKING, _make_blocking_group, devices=[DEVICE])
    from fastddp import _C
    from fastddp.exchange import proofs

    if hasattr(_C, "use_driver"):
        _C.use_driver(torch.device(DEVICE), str(LIBRARY))
    # Kernels have passed here: what steps cost is what they cost afterwards. tests/device/test_proofs.py has others.
    proofs.proof_of = lambda kernel, device: LIBRARY


def _device_module(device_count: int) -> ModuleType:
    """What torch asks of ``torch.<device type>``, mostly for random numbers."""
    module: Any = ModuleType(f"torch.{DEVICE}")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None  # without it, torch 2.11 takes the device for unused and does not synchronise it
    module.device_count = lambda: device_count
    module.current_device = torch.accelerator.current_device_index
    module.set_device = torch.accelerator.set_device_index
    module.current_stream = torch.accelerator.current_stream
    module.synchronize = torch.accelerator.synchronize
    module.manual_seed = module.manual_seed_all = _extension.manual_seed
    module.get_device_name = lambda device=None: "Simulated"
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    return module


def _make_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    return _make_backend(store, rank, size, timeout, DEVICE, False)


def _make_blocking_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    return _make_backend(store, rank, size, timeout, "nccl", True)


def _make_gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Gloo for this device: its collectives work, and it has no messages between two ranks, which need host memory."""
    return _make_backend(store, rank, size, timeout, "gloo", False)


def _make_backend(store: dist.Store, rank: int, size: int, timeout: timedelta, name: str, host_waits: bool) -> Any:
    inner = dist.ProcessGroupGloo(dist.PrefixStore("inner", store), rank, size, timeout) if size > 1 else None
    return _extension.make_backend(inner, dist.PrefixStore("calls", store), rank, size, name, host_waits)


def loopback_backend(size: int) -> Any:
    """A backend that pretends to have ``size`` ranks, all of which hold what this one holds."""
    return _extension.make_backend(None, dist.HashStore(), 0, size, DEVICE, False)


def schedule(policy: Policy = "lazy", seed: int = 0) -> None:
    """Start afresh: what is pending runs, errors and records are forgotten; from now on work runs in this order.

    lazy: only what a wait needs runs, the newest first, everything else as late as possible. others_first: everything
    that the wait does not need runs first, the newest first. random: any order, and more than the wait needs. in_order:
    as enqueued, no adversary. Events and streams are obeyed always.
    """
    _extension.drain()
    _extension.forget_errors()
    _extension.forbid_waits(False)
    _extension.schedule(getattr(_extension.Policy, policy), seed)
    reset_records()


def break_device() -> None:
    """From now on each question about the device raises, as behind an illegal access, until :func:`schedule`."""
    _extension.break_device()


def set_capability(capability: int) -> None:
    """The compute capability of all devices, without the dot. Modules for another one do not load."""
    _extension.set_capability(capability)


def break_kernels(part_of_name: str, fault: Literal["none", "bit", "program", "launch", "load"]) -> None:
    """Kernels with this in their names, and no others, have a fault from now on.

    bit: one is flipped in the first byte of their output (pack and block8's encode). program: one of theirs does not
    run. launch, load: the driver refuses it.
    """
    _extension.break_kernels(part_of_name, getattr(_extension.Fault, fault))


def synchronize() -> None:
    """Wait for everything on all devices."""
    _extension.synchronize()


def reset_records() -> None:
    """Forget waits, launches, uploads and history."""
    _extension.reset_records()


def host_waits() -> list[str]:
    """What the host has waited for, in words, since the last reset."""
    return _extension.wait_reasons()


@contextmanager
def without_waits() -> Iterator[None]:
    """Within this context, a wait of the host for the device raises."""
    _extension.forbid_waits(True)
    try:
        yield
    finally:
        _extension.forbid_waits(False)


def launches() -> list[str]:
    """Kernels launched through the driver since the last reset."""
    return _extension.launches()


def history() -> list[str]:
    """All that ran since the last reset, in the order in which it ran."""
    return _extension.history()


def collectives() -> int:
    """How many collectives have run since the last reset."""
    return _extension.collectives()


def chunks_by_element() -> int:
    """How many chunks pack and unpack have moved element by element so far: one of their ends was not aligned."""
    return _extension.chunks_by_element()


def events() -> tuple[int, int]:
    """How many were made so far, and how often one was recorded that knows its time."""
    return _extension.events()


def uploads() -> int:
    """How many copies from the host to the device there were since the last reset."""
    return _extension.copies()


def allocated_bytes() -> int:
    """Memory of the device that tensors hold now, in steps of 512 bytes."""
    return _extension.allocated_bytes()


def peak_bytes() -> int:
    """The most there was since the last ``reset_peak``."""
    return _extension.peak_bytes()


def reset_peak() -> None:
    """Let the peak begin at what is allocated now."""
    _extension.reset_peak()


def offer_memory(offered: bool) -> None:
    """From now on backends of this device offer memory of their own, as NCCL's does. At first none does."""
    _extension.offer_memory(offered)


def memory_asked_for() -> list[tuple[int, int]]:
    """Of what backends were asked for since they began to offer it: the addresses and bytes, in order."""
    return _extension.memory_asked_for()


class Graph:
    """What a CUDA graph is: work that is recorded once and run many times.

    Inside ``capture(stream)``, which also makes the stream current, nothing runs; streams join the capture by waiting
    for its events. ``replay()`` enqueues everything on the current stream.
    """

    def __init__(self) -> None:
        self._graph: Any = None

    @contextmanager
    def capture(self, stream: torch.Stream) -> Iterator[None]:
        with stream:
            _extension.begin_capture()
            try:
                yield
            except BaseException:
                with suppress(RuntimeError):  # of what the exception left unfinished
                    _extension.end_capture()
                raise
            self._graph = _extension.end_capture()

    def replay(self) -> None:
        self._graph.replay()
