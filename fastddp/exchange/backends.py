"""What carries the tensors of a device."""

from __future__ import annotations

import torch
import torch.distributed as dist


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """The name of the backend that carries tensors of ``device``: a group may have another one for each type of device.

    None: torch has not made the group.
    """
    if group not in dist.distributed_c10d._world.pg_backend_config:
        return None
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(",")).get(device.type)
