"""What carries the tensors of a device."""

from __future__ import annotations

import torch
import torch.distributed as dist


def check_numbers(group: dist.ProcessGroup) -> None:
    """Raise unless ``group`` says the same of its size and this rank in Python and in C++, where gradients are scaled.

    They differ in a group written in Python that overrides ``size()`` or ``rank()``, which C++ does not ask.

    Raises:
        ValueError: names both numbers.
    """
    for what, told, counted in (
        ("ranks", group.size(), dist.ProcessGroup.size(group)),
        ("for this rank's number", group.rank(), dist.ProcessGroup.rank(group)),
    ):
        if told != counted:
            raise ValueError(
                f"The process group {type(group).__name__} says {told} {what} in Python and {counted} in C++, so that "
                "gradients would be averaged over the wrong ranks. Give its base class the same numbers "
                "(ProcessGroup.__init__(rank, size)), or wrap with the process group that it is made of."
            )


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """The name of the backend that carries tensors of ``device``: a group may have another one for each type of device.

    None: torch has not made the group.
    """
    if group not in dist.distributed_c10d._world.pg_backend_config:
        return None
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(",")).get(device.type)


def default_group() -> dist.ProcessGroup:
    """The group of all ranks; ValueError: it is not there."""
    if not dist.is_initialized():
        raise ValueError(
            "The default process group has not been initialised. Call torch.distributed.init_process_group() before "
            "wrapping a module, and start the script with torchrun."
        )
    return dist.distributed_c10d._get_default_group()


def check_group(process_group: dist.ProcessGroup) -> None:
    """Raise RuntimeError if it has been destroyed."""
    try:
        dist.get_backend(process_group)  # one look-up, while the list of its ranks is as long as the group is large
    except (ValueError, RuntimeError):
        raise RuntimeError(
            "The process group of this DistributedDataParallel has been destroyed. Wrap the module again after "
            "init_process_group(), or call model.module for inference without other ranks."
        ) from None
