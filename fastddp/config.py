"""The constructor's options as one frozen object, whose combinations are checked once."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from fastddp._C import Expect
from fastddp.errors import see

_MIB = 2**20


@dataclass(frozen=True)
class Config:
    """How one model is synchronised. Made by :meth:`from_arguments`."""

    bucket_caps: tuple[int, ...]  # bytes of the first, second, ... bucket; the last number holds for all others
    gradient_as_bucket_view: bool  # whether ``parameter.grad`` is a view of its bucket's wire
    forward_sync_buffers: bool  # whether each forward begins with rank 0's buffers on all ranks
    init_sync: bool  # whether construction verifies the parameters and broadcasts rank 0's values
    init_sync_buffers: bool  # whether construction does so for the buffers
    expect: Expect  # which gradients a backward is expected to bring
    plans_buckets: bool = False  # whether ``bucket_caps`` hold only until the first windows have been measured
    main_grads: Literal["grad", "main_grad"] | None = None  # what holds fp32 gradients; None: they are not in fp32
    wire_memory: Literal["registered", "symmetric"] | None = None  # None: what torch's DDP would take
    lazy_bucket_allocation: bool = False  # whether the memory of wires is given back between windows

    @classmethod
    def from_arguments(
        cls,
        device_type: str,
        *,
        bucket_cap_mb: float | Literal["auto"] | None,
        bucket_cap_mb_list: Sequence[float] | None,
        gradient_as_bucket_view: bool,
        broadcast_buffers: bool | None,
        forward_sync_buffers: bool | None,
        init_sync: bool,
        find_unused_parameters: bool,
        static_graph: bool,
        skip_all_reduce_unused_params: bool,
        plan_given: bool = False,
        some_delayed: bool = False,
        main_grads: Literal["grad", "main_grad"] | None = None,
        is_mixed_precision: bool = False,
        has_hierarchy: bool = False,
        wire_memory: Literal["registered", "symmetric"] | None = None,
        lazy_bucket_allocation: bool = False,
    ) -> Config:
        """Resolve the constructor's arguments; some defaults depend on the type of the parameters' devices.

        Raises ValueError if an option has no value of its kind, or does not go with another option or this torch.
        """
        _check_main_grads(main_grads, gradient_as_bucket_view, is_mixed_precision)
        _check_wire_memory(
            wire_memory,
            {
                "gradient_as_bucket_view": gradient_as_bucket_view,
                'main_grads="main_grad"': main_grads == "main_grad",
                "lazy_bucket_allocation": lazy_bucket_allocation,
                "hierarchy": has_hierarchy,
            },
        )
        if plan_given and not (bucket_cap_mb is None and bucket_cap_mb_list is None):
            raise ValueError(
                "buckets says what is in each bucket, which leaves nothing to bucket_cap_mb and "
                "bucket_cap_mb_list. Leave out one or the other." + see("FD023")
            )
        plans_buckets = bucket_cap_mb == "auto"
        if plans_buckets and (bucket_cap_mb_list is not None or some_delayed):
            raise ValueError(
                'bucket_cap_mb="auto" plans what is in each bucket, which bucket_cap_mb_list and '
                "delay_all_reduce_named_params decide too. Leave out one or the other." + see("FD023")
            )
        if plans_buckets and has_hierarchy:
            raise ValueError(
                'bucket_cap_mb="auto" measures collectives of one level, and hierarchy makes two. Leave out one or the '
                "other." + see("FD023")
            )
        forward_sync, init_sync_buffers = _resolve_buffers(broadcast_buffers, forward_sync_buffers)
        return cls(
            bucket_caps=_resolve_caps(
                None if plans_buckets else bucket_cap_mb, bucket_cap_mb_list, device_type, has_hierarchy
            ),
            gradient_as_bucket_view=bool(gradient_as_bucket_view),
            forward_sync_buffers=forward_sync,
            init_sync=bool(init_sync),
            init_sync_buffers=init_sync_buffers,
            expect=_resolve_expect(find_unused_parameters, static_graph, skip_all_reduce_unused_params),
            plans_buckets=plans_buckets,
            main_grads=main_grads,
            wire_memory=wire_memory,
            lazy_bucket_allocation=lazy_bucket_allocation,
        )


def check_types(module: object, process_group: object) -> None:
    """Raise TypeError if one of these arguments of the constructor has the wrong type."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {module!r}." + see("FD024"))
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            "process_group must be a torch.distributed.ProcessGroup, which torch.distributed.new_group() returns to "
            f"the ranks that are in it, or None for all ranks; got {process_group!r}." + see("FD024")
        )


def _check_main_grads(choice: object, as_bucket_view: bool, is_mixed_precision: bool) -> None:
    if choice not in (None, "grad", "main_grad"):
        raise ValueError(f'main_grads must be "grad", "main_grad" or None, got {choice!r}.' + see("FD030"))
    if choice is None:
        return
    if is_mixed_precision:
        raise ValueError(
            "main_grads is for a module whose parameters have 16 bits. With mixed_precision parameters keep their "
            "dtype, and gradients add up in it: leave out main_grads, and wrap the module with fp32 parameters."
            + see("FD030")
        )
    if choice == "main_grad" and as_bucket_view:
        raise ValueError(
            'With main_grads="main_grad" gradients are not in .grad, of which gradient_as_bucket_view speaks; '
            "they are in the bucket in any case. Leave out one or the other." + see("FD030")
        )
    if choice == "grad" and not hasattr(torch.Tensor, "grad_dtype"):
        raise ValueError(
            'main_grads="grad" takes torch.Tensor.grad_dtype, which this torch, '
            f'{torch.__version__}, does not have. Use a newer one, or main_grads="main_grad".' + see("FD030")
        )


def _check_wire_memory(choice: object, others: Mapping[str, bool]) -> None:
    if choice not in (None, "registered", "symmetric"):
        raise ValueError(f'wire_memory must be "registered", "symmetric" or None, got {choice!r}.' + see("FD029"))
    for name, is_given in others.items():
        if choice == "symmetric" and is_given:
            raise ValueError(
                f'With wire_memory="symmetric" what travels is in memory that all ranks send out of alike: it stays, '
                f"no gradients live there, and there is one level. Leave out {name}, or wire_memory." + see("FD029")
            )


def _resolve_caps(cap_mb: object, cap_mb_list: object, device_type: str, has_hierarchy: bool) -> tuple[int, ...]:
    if cap_mb_list is not None:
        if isinstance(cap_mb_list, str) or not isinstance(cap_mb_list, Iterable):
            raise ValueError(
                f"bucket_cap_mb_list must be a list of sizes in MiB, got {cap_mb_list!r}; what holds for all buckets "
                "is bucket_cap_mb." + see("FD024")
            )
        caps = tuple(_bytes(cap, "bucket_cap_mb_list") for cap in cap_mb_list)
        if not caps:
            raise ValueError(
                "bucket_cap_mb_list is empty; give at least one size in MiB, or None for the default." + see("FD024")
            )
        return caps
    if cap_mb is None:
        if device_type == "cpu":
            # Collectives run on backward's cores, so an earlier start is no earlier end. In two levels a bucket goes
            # through several stages, which overlap only with stages of other buckets.
            return ((6 if has_hierarchy else 25) * _MIB,)
        # A small first bucket starts to travel early, while the network is idle.
        return (_MIB, 25 * _MIB)
    return (_bytes(cap_mb, "bucket_cap_mb"),)


def _resolve_expect(find_unused_parameters: bool, static_graph: bool, skip_unused: bool) -> Expect:
    if static_graph or (find_unused_parameters and skip_unused):
        return Expect.as_first
    return Expect.as_last if find_unused_parameters else Expect.all


def _bytes(cap_mb: Any, option: str) -> int:
    is_number = isinstance(cap_mb, Real) and not isinstance(cap_mb, bool)
    if not is_number or not cap_mb >= 0:
        or_auto = '; or "auto"' if option == "bucket_cap_mb" else ""
        raise ValueError(f"{option} must be a number of MiB >= 0, got {cap_mb!r}{or_auto}." + see("FD024"))
    return int(float(min(cap_mb, 2**42)) * _MIB)  # numpy's integers would overflow


def _resolve_buffers(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """Return (sync buffers in forward, sync buffers at construction).

    ``broadcast_buffers=False`` switches off both; its successor ``forward_sync_buffers=False`` only the first.
    """
    if forward_sync_buffers is None:
        if broadcast_buffers is not None:
            _warn(
                "broadcast_buffers is deprecated; use forward_sync_buffers. What differs: forward_sync_buffers=False "
                "still broadcasts buffers at construction. To leave them alone there too, keep broadcast_buffers=False."
            )
        broadcast = broadcast_buffers is None or bool(broadcast_buffers)
        return broadcast, broadcast
    if broadcast_buffers is not None:
        _warn("Both broadcast_buffers and forward_sync_buffers were given; broadcast_buffers is ignored.")
    return bool(forward_sync_buffers), True


def _warn(text: str) -> None:
    """Warn as torch's constructor does, at the line that called this one's."""
    warnings.warn(text, FutureWarning, stacklevel=7)  # here, _resolve_buffers, from_arguments, three of the constructor
