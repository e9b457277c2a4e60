"""The release of torch that tests run with, where it decides what torch's class has."""

from __future__ import annotations

import inspect
from collections.abc import Collection

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

RELEASE = tuple(int(number) for number in torch.__version__.split(".")[:2])

# What came after the oldest release that fastddp accepts: the first of those tested (2.11, 2.13, 2.15) that has it.
SINCE = {
    "_bucket_config": (2, 13),
    "_check_manual_backward_finalization_supported": (2, 15),
    "_require_manual_backward_finalization": (2, 15),
}


def torch_takes(options: Collection[str]) -> bool:
    """Whether torch's DDP has these options (forward_sync_buffers since 2.13); fastddp's always has them."""
    return set(options) <= inspect.signature(TorchDDP.__init__).parameters.keys()


# Since 2.13 torch leaves a Python object in the state of threads that run a backward: the caller's contextvars.
BACKWARD_HAS_CONTEXT = "_stash_obj_in_tls" in inspect.getsource(torch.autograd.graph)
# Since 2.13 a trace of torch.profiler says on which machine it was recorded. Without that, ranks' clocks may differ.
TRACES_NAME_HOSTS = RELEASE >= (2, 13)

# What both classes call it.
FORWARD_SYNC_BUFFERS = "forward_sync_buffers" if torch_takes(["forward_sync_buffers"]) else "broadcast_buffers"


class _SparesVersionCounters(TorchDDP):
    """Torch's DDP before 2.13, with what 2.13 repaired: writing buffers breaks no earlier graph (pytorch #175024)."""

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        with torch.autograd._unsafe_preserve_version_counter(tuple(self.modules_buffers)):
            super()._sync_module_buffers(authoritative_rank)


TORCH_WITH_USABLE_GRAPHS = TorchDDP if RELEASE >= (2, 13) else _SparesVersionCounters


def names_to_come() -> set[str]:
    return {name for name, release in SINCE.items() if release > RELEASE}
