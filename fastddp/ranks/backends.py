"""Questions about process groups, and about the backends that carry a device's tensors."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fastddp.errors import see


def check_numbers(group: dist.ProcessGroup) -> None:
    """Raise unless ``group`` has the same size and rank in Python as in C++, where gradients are scaled.

    They differ in a group written in Python that overrides ``size()`` or ``rank()``: C++ does not call those.

    Raises:
        ValueError: it names both numbers.
    """
    for what, told, counted in (
        ("ranks", group.size(), dist.ProcessGroup.size(group)),
        ("for this rank's number", group.rank(), dist.ProcessGroup.rank(group)),
    ):
        if told != counted:
            raise ValueError(
                f"The process group {type(group).__name__} says {told} {what} in Python and {counted} in C++, so that "
                "gradients would be averaged over the wrong ranks. Give its base class the same numbers "
                "(ProcessGroup.__init__(rank, size)), or wrap with the process group that it is made of." + see("FD021")
            )


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """The name of the group's backend for tensors of ``device``; it may differ between types of device.

    None: torch has not made the group.
    """
    if group not in dist.distributed_c10d._world.pg_backend_config:
        return None
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(",")).get(device.type)


def default_group() -> dist.ProcessGroup:
    """The group of all ranks; ValueError if there is none."""
    if not dist.is_initialized():
        raise ValueError(
            "The default process group has not been initialised. Call torch.distributed.init_process_group() before "
            "wrapping a module, and start the script with torchrun." + see("FD021")
        )
    return dist.distributed_c10d._get_default_group()


def check_group(process_group: dist.ProcessGroup) -> None:
    """Raise RuntimeError if the group has been destroyed."""
    try:
        dist.get_backend(process_group)  # one look-up; a list of its ranks would grow with the group
    except (ValueError, RuntimeError):
        raise RuntimeError(
            "The process group of this DistributedDataParallel has been destroyed. Wrap the module again after "
            "init_process_group(), or call model.module for inference without other ranks." + see("FD021")
        ) from None
