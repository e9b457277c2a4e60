"""The process groups that fastddp makes: for lanes, for the ranks of a node, for ranks between nodes."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from fastddp._C import bury
from fastddp.errors import see
from fastddp.ranks.agreement import greatest
from fastddp.ranks.backends import backend_of
from fastddp.ranks.generations import OfGroups
from fastddp.ranks.together import telling_who_has_ended

Of = ParamSpec("Of")
Made = TypeVar("Made")


def once_a_group(
    make: Callable[Concatenate[dist.ProcessGroup, Of], Made],
) -> Callable[Concatenate[dist.ProcessGroup, Of], Made]:
    """Let ``make(process_group, ...)`` run once for each generation of a group; later calls return its result.

    A result is kept for as long as torch keeps its group. Where ``make`` raises, the next call tries again.
    """
    made: OfGroups[tuple[Made]] = OfGroups()

    @functools.wraps(make)
    def made_for(process_group: dist.ProcessGroup, /, *args: Of.args, **kwargs: Of.kwargs) -> Made:
        known = made.get(process_group, None)
        if known is None:
            made[process_group] = known = (make(process_group, *args, **kwargs),)
        return known[0]

    return made_for


NCCL = ("nccl", "nccl2")
"""Names of backends that call NCCL."""

_parts: weakref.WeakKeyDictionary[dist.ProcessGroup, list[dist.ProcessGroup]] = weakref.WeakKeyDictionary()


# Note [Groups of some ranks]
# With init_process_group(device_id=...) new_group splits the NCCL communicator of the whole job, so all ranks of the
# job must call it. But only the model's ranks are here. split_group splits their own communicator.


def make_group(
    parent: dist.ProcessGroup,
    device: torch.device,
    parts: Sequence[Sequence[int]],
    what: str,
    *,
    symmetric: bool = False,
) -> dist.ProcessGroup:
    """A process group of this rank's part of ``parent``, with the backend that carries tensors of ``device``.

    ``parts`` are numbers of ranks in ``parent``, each in one part. The group has the time-out of ``parent``. Over NCCL
    it has the options of ``parent``, but its streams have high priority. With ``symmetric`` NCCL's copy engines carry
    all-gathers and all-to-alls over NVLink, so these take no multiprocessors; an allreduce takes them as before.

    A collective: all ranks of ``parent`` call it together, and no others (Note [Groups of some ranks]).

    Raises:
        ValueError: ``symmetric`` with another backend than NCCL.
        RuntimeError: ``symmetric`` with a torch that cannot ask NCCL for it.
    """
    options = _options(parent, device)
    timeout = None if options is None else options._timeout
    nccl_options = _nccl_options(parent, device, options, symmetric)
    description = f"fastddp {what}"
    with telling_who_has_ended(parent, of_backend=True):
        if _splits(parent, device):
            split = [list(ranks) for ranks in parts]
            group = dist.split_group(parent, split, timeout=timeout, pg_options=nccl_options, group_desc=description)
        else:
            everywhere = dist.get_process_group_ranks(parent)
            (mine,) = [ranks for ranks in parts if parent.rank() in ranks]
            group = dist.new_group(
                [everywhere[rank] for rank in mine],
                timeout=timeout,
                backend=backend_of(parent, device),
                pg_options=nccl_options,
                use_local_synchronization=True,
                group_desc=description,
            )
    assert group is not None  # this rank is in a part
    _note(parent, group)
    if nccl_options is not None:
        greatest([0], group, device)  # NCCL connects ranks when they first send: not in the middle of a backward
    return group


def _note(parent: dist.ProcessGroup, part: dist.ProcessGroup) -> None:
    if parent not in _parts:
        _parts[parent] = []
        weakref.finalize(parent, _bury, _parts[parent]).atexit = False
    _parts[parent].append(part)


def _bury(parts: list[dist.ProcessGroup]) -> None:
    """Let another thread destroy them: note [Groups that are left], csrc/waits/interruption.h."""
    if parts:
        bury(parts)


def destroy_parts(parent: dist.ProcessGroup) -> None:
    """Destroy the groups that were made of ``parent``, which no model uses any more.

    Torch makes a group's name of its ranks and of the names that there are, and a second group of one name would find
    the keys of the first in the store. So their names stay taken.
    """
    world, parts = dist.distributed_c10d._world, _parts.pop(parent, [])
    for part in parts:
        if part in world.pg_map:  # else torch has destroyed it
            name = world.pg_names[part]
            dist.destroy_process_group(part)
            world.pg_names[_TakenName()] = name  # type: ignore[index]
    _bury(parts)
    parts.clear()  # the finalizer of ``parent`` holds the list


class _TakenName:
    """Stands for a group that is gone."""

    def shutdown(self) -> None:
        """Torch calls it when all groups are destroyed."""


def symmetric_twin(process_group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """A group of the same ranks that :func:`make_group` makes with ``symmetric``; for one rank, the group itself.

    Made once, and kept for as long as torch keeps ``process_group``. A collective, with the errors of `make_group`.

    Raises:
        RuntimeError: ranks are in different numbers of process groups, so no new group can be made.
    """
    return process_group if process_group.size() == 1 else _twin(process_group, device)


@once_a_group
def _twin(process_group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    _nccl_options(process_group, device, _options(process_group, device), symmetric=True)  # before anything is sent
    if not ranks_name_groups_alike(process_group, device):
        raise RuntimeError(
            'wire_memory="symmetric" makes a process group. Torch names groups by how many a rank is in, and ranks of '
            "this model are in different numbers of them. Let all be in as many, or leave wire_memory out."
            + see("FD029")
        )
    everyone = [range(process_group.size())]
    return make_group(process_group, device, everyone, "wires without CTAs", symmetric=True)


def ranks_name_groups_alike(process_group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether all ranks would give a new group the same name, which torch makes of a rank's number of groups.

    No rank can make one in a process without a default group.
    """
    count = len(dist.distributed_c10d._world.pg_names) if dist.is_initialized() else 0
    return greatest([count, -count], process_group, device) == [count, -count] != [0, 0]


def _splits(parent: dist.ProcessGroup, device: torch.device) -> bool:
    bound = dist.distributed_c10d._get_default_group().bound_device_id
    return bound is not None and bound.type == device.type and parent._get_backend(device).supports_splitting


def _options(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend's options; None: a third-party backend has none."""
    backend = group._get_backend(device)
    inner = getattr(backend, "wrapped_pg", backend)  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
    return getattr(inner, "options", None)


def _nccl_options(parent: dist.ProcessGroup, device: torch.device, options: Any, symmetric: bool) -> Any:
    carrier = backend_of(parent, device)
    if carrier not in NCCL:
        if symmetric:
            raise ValueError(
                f'wire_memory="symmetric" takes a process group over NCCL, and {carrier} carries tensors on {device} '
                "here. Leave wire_memory out." + see("FD029")
            )
        return None
    options = copy.deepcopy(options)
    options.is_high_priority_stream = True
    if symmetric:
        policy = getattr(dist.ProcessGroupNCCL, "NCCL_CTA_POLICY_ZERO", None)
        if policy is None or not hasattr(options.config, "cta_policy"):
            raise RuntimeError(
                f'wire_memory="symmetric" asks NCCL for its zero-CTA policy, which torch {torch.__version__} does not '
                "know here. It takes a torch that was built with NCCL 2.28 or newer. Or leave wire_memory out."
                + see("FD029")
            )
        options.config.cta_policy = policy
    return options
