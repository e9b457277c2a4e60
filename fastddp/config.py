"""The constructor's options: one frozen object, in which every combination has been checked once."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastddp.bucket_plan import DEFAULT_BUCKET_BYTES, FIRST_BUCKET_BYTES, MIB


@dataclass(frozen=True)
class Config:
    """How one model is synchronised. Made by :meth:`from_arguments`."""

    bucket_caps: tuple[int, ...]
    """Bytes of the first, second, ... bucket; the last one holds for all that follow."""
    gradient_as_bucket_view: bool
    """Whether ``parameter.grad`` is made a view of its bucket's wire."""
    forward_sync_buffers: bool
    """Whether each forward begins with rank 0's buffers for all ranks."""
    init_sync: bool
    """Whether construction verifies the parameters and broadcasts rank 0's values."""
    init_sync_buffers: bool
    """Whether that includes the buffers."""

    @classmethod
    def from_arguments(
        cls,
        device_type: str,
        *,
        bucket_cap_mb: float | None,
        bucket_cap_mb_list: Sequence[float] | None,
        gradient_as_bucket_view: bool,
        broadcast_buffers: bool | None,
        forward_sync_buffers: bool | None,
        init_sync: bool,
    ) -> Config:
        """Resolve the constructor's arguments, which mean what they mean for torch's DDP.

        Some defaults depend on ``device_type``, that of the parameters.

        Raises:
            ValueError: for a bucket size that is not a number of MiB >= 0, or an empty list of them.
        """
        forward_sync, init_sync_buffers = _resolve_buffers(broadcast_buffers, forward_sync_buffers)
        return cls(
            bucket_caps=_resolve_caps(bucket_cap_mb, bucket_cap_mb_list, device_type),
            gradient_as_bucket_view=bool(gradient_as_bucket_view),
            forward_sync_buffers=forward_sync,
            init_sync=bool(init_sync),
            init_sync_buffers=init_sync_buffers,
        )


def reject_unsupported(options: dict[str, Any]) -> None:
    """Raise for options of torch's DDP that fastddp does not have yet.

    Args:
        options: name -> value of each such option; a falsy value means that it is not used.

    Raises:
        NotImplementedError: names the options in use and the way out.
    """
    used = [name for name, value in options.items() if value]
    if used:
        raise NotImplementedError(
            f"fastddp.DistributedDataParallel does not support {', '.join(used)} yet. "
            "Leave it out, or use torch.nn.parallel.DistributedDataParallel for this model."
        )


def _resolve_caps(cap_mb: float | None, cap_mb_list: Sequence[float] | None, device_type: str) -> tuple[int, ...]:
    if cap_mb_list is not None:
        if len(cap_mb_list) == 0:
            raise ValueError("bucket_cap_mb_list is empty; give at least one size in MiB, or None for the default.")
        return tuple(_bytes(cap, "bucket_cap_mb_list") for cap in cap_mb_list)
    if cap_mb is None:
        if device_type == "cpu":
            # Collectives run on the cores that backward runs on: what starts earlier does not end earlier.
            return (DEFAULT_BUCKET_BYTES,)
        # The gradients that come first start travelling early, while the pipe is empty.
        return (FIRST_BUCKET_BYTES, DEFAULT_BUCKET_BYTES)
    return (_bytes(cap_mb, "bucket_cap_mb"),)


def _bytes(cap_mb: float, option: str) -> int:
    if isinstance(cap_mb, bool) or not isinstance(cap_mb, (int, float)) or not cap_mb >= 0:
        raise ValueError(f"{option} must be a number of MiB >= 0, got {cap_mb!r}.")
    return int(min(cap_mb * MIB, 2**62))


def _resolve_buffers(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """Return (sync buffers in forward, sync buffers at construction).

    ``broadcast_buffers=False`` switches off both, its successor ``forward_sync_buffers=False`` only the first.
    """
    if forward_sync_buffers is None:
        broadcast = broadcast_buffers is None or bool(broadcast_buffers)
        return broadcast, broadcast
    if broadcast_buffers is not None:
        warnings.warn(
            "Both broadcast_buffers and forward_sync_buffers were given; broadcast_buffers is ignored.",
            FutureWarning,
            stacklevel=5,
        )
    return bool(forward_sync_buffers), True
