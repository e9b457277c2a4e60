"""Which ranks share a node (``hierarchy=``)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fastddp.errors import see
from fastddp.ranks.agreement import gather_numbers
from fastddp.ranks.groups import make_group, once_a_group, ranks_name_groups_alike
from fastddp.ranks.listing import listed
from fastddp.ranks.placement import machine_of_this_rank

HierarchyArgument = Literal["node"] | DeviceMesh | None

_NO_LAUNCHER = -1


@dataclass(frozen=True, eq=False)
class Hierarchy:
    """A process group's ranks on several nodes, with the same number of ranks on each. Equal only to itself."""

    node: dist.ProcessGroup
    """The ranks of this rank's node."""
    between: dist.ProcessGroup
    """The ranks that have this rank's place in their nodes."""


def check_hierarchy(hierarchy: object) -> None:
    """Raise unless ``hierarchy`` is one of the choices.

    Raises:
        ValueError: it is another string, or a mesh without exactly two dimensions.
        TypeError: it is something else.
    """
    if isinstance(hierarchy, DeviceMesh):
        if hierarchy.ndim != 2:
            raise ValueError(
                f"hierarchy as a mesh has two dimensions, the nodes and the ranks of a node, but {hierarchy} has "
                f"{hierarchy.ndim}. Make it with init_device_mesh(device_type, (nodes, ranks_of_a_node)), or give "
                '"node".' + see("FD028")
            )
    elif hierarchy is not None and (not isinstance(hierarchy, str) or hierarchy != "node"):
        kind = ValueError if isinstance(hierarchy, str) else TypeError
        raise kind(f'hierarchy is None, "node" or a DeviceMesh of two dimensions, not {hierarchy!r}.' + see("FD028"))


def describe_hierarchy(hierarchy: HierarchyArgument) -> str:
    """The argument in words, for ranks to compare: a rank that makes other groups would leave the rest waiting.

    >>> describe_hierarchy("node")
    "hierarchy='node'"
    """
    if isinstance(hierarchy, DeviceMesh):
        return f"hierarchy=a mesh of the nodes {hierarchy.mesh.tolist()}"
    return f"hierarchy={hierarchy!r}"


def find_hierarchy(
    hierarchy: HierarchyArgument, process_group: dist.ProcessGroup, device: torch.device
) -> Hierarchy | None:
    """The two levels of ``process_group``; None: there is one level (one node, or one rank on each).

    A collective: all ranks of ``process_group`` call it together. With ``"node"`` they tell each other once where they
    are. New groups are made once, and kept for as long as torch keeps ``process_group``. ``device``: where tensors must
    live for collectives. Where there is one level, the first of several ranks warns that the argument changes nothing.

    Raises:
        ValueError: nodes have different numbers of ranks; a mesh has other ranks than ``process_group``; or the
            launcher and the machines disagree about nodes.
        RuntimeError: ranks are in different numbers of process groups, so no new group can be made.
    """
    if hierarchy is None:
        return None
    if isinstance(hierarchy, DeviceMesh):
        levels = _of_mesh(hierarchy, process_group, device)
    else:
        levels = _of_nodes(_ranks_by_node(process_group, device), process_group, device)
    if levels is None and process_group.size() > 1 and process_group.rank() == 0:
        warnings.warn(
            f"{describe_hierarchy(hierarchy)} changes nothing here: it takes several nodes with several ranks each, "
            f"and the {process_group.size()} ranks are all on one node, or one on each.",
            stacklevel=2,
        )
    return levels


@once_a_group
def _made_of(_: dist.ProcessGroup) -> dict[str, Hierarchy]:
    """The groups that were made of a process group, by lists of nodes."""
    return {}


# Note [Places in a node]
# Ranks of several nodes exchange with each other if they have the same place in their nodes. A rank's place is its rank
# in the node's group, which also says which run of a wire it has. Torch sorts the ranks of a group. So a mesh's columns
# are places only if the ranks of each row ascend. Otherwise only its rows are used, which say who shares a node, and
# new groups are made.


def _of_mesh(mesh: DeviceMesh, process_group: dist.ProcessGroup, device: torch.device) -> Hierarchy | None:
    ranks = sorted(mesh.mesh.flatten().tolist())
    wanted = sorted(dist.get_process_group_ranks(process_group))
    if ranks != wanted:
        raise ValueError(
            f"hierarchy is a mesh of the ranks {listed(ranks)}, and gradients are averaged over the ranks "
            f"{listed(wanted)}. Give a mesh of the same ranks, each once." + see("FD028")
        )
    if 1 in mesh.shape:
        return None
    rows = mesh.mesh.tolist()
    if all(row == sorted(row) for row in rows):
        return Hierarchy(node=mesh.get_group(1), between=mesh.get_group(0))
    in_group = {rank: number for number, rank in enumerate(dist.get_process_group_ranks(process_group))}
    return _of_nodes([[in_group[rank] for rank in row] for row in rows], process_group, device)


def _of_nodes(
    nodes: Sequence[Sequence[int]], process_group: dist.ProcessGroup, device: torch.device
) -> Hierarchy | None:
    sizes = {len(ranks) for ranks in nodes}
    if len(sizes) > 1:
        numbers = "; ".join(f"{len(ranks)} on that of rank {listed(ranks)}" for ranks in nodes)
        raise ValueError(
            f'hierarchy="node" takes nodes with as many ranks each, and of the ranks of the process group there are '
            f"{numbers}. Start as many processes on each node, or leave hierarchy at None." + see("FD028")
        )
    if len(nodes) == 1 or sizes == {1}:
        return None
    ascending = [sorted(ranks) for ranks in nodes]
    made = _made_of(process_group)
    if str(ascending) not in made:
        made[str(ascending)] = _make_groups(ascending, process_group, device)
    return made[str(ascending)]


def _make_groups(nodes: Sequence[list[int]], process_group: dist.ProcessGroup, device: torch.device) -> Hierarchy:
    if not ranks_name_groups_alike(process_group, device):
        raise RuntimeError(
            'hierarchy="node", or a mesh with rows that do not ascend, makes process groups. Torch names groups by how '
            "many a rank is in, and ranks of this model are in different numbers of them. Make them yourself, on all "
            "ranks: hierarchy=init_device_mesh(device_type, (nodes, ranks_of_a_node))." + see("FD028")
        )
    places = list(zip(*nodes, strict=True))
    return Hierarchy(
        node=make_group(process_group, device, nodes, "hierarchy: the ranks of a node"),
        between=make_group(process_group, device, places, "hierarchy: the ranks in one place of each node"),
    )


@once_a_group
def _ranks_by_node(process_group: dist.ProcessGroup, device: torch.device) -> list[list[int]]:
    """The ranks of each node, nodes in the order of their first ranks; the same on all ranks.

    Torchrun tells each rank the number of its node (``GROUP_RANK``) and how many ranks the node has
    (``LOCAL_WORLD_SIZE``). If all ranks were told, torchrun's nodes are used. Otherwise each machine is a node.

    Raises:
        ValueError: the ranks of one of torchrun's nodes are on several machines.
    """
    numbers = [_variable("GROUP_RANK"), _variable("LOCAL_WORLD_SIZE"), machine_of_this_rank()]
    told = gather_numbers(numbers, process_group, device, torch.int64)
    has_launcher = all(_NO_LAUNCHER not in row[:2] for row in told)
    nodes: dict[int, list[int]] = {}
    for rank, (group_rank, _, machine) in enumerate(told):
        nodes.setdefault(group_rank if has_launcher else machine, []).append(rank)
    for ranks in nodes.values():
        machines = [told[rank][2] for rank in ranks]
        if len(set(machines)) > 1:
            others = [rank for rank, machine in zip(ranks, machines, strict=True) if machine != machines[0]]
            raise ValueError(
                f'hierarchy="node": the launcher counts rank {listed(ranks)} to one node (GROUP_RANK is '
                f"{told[ranks[0]][0]}), and rank {listed(others)} is on another machine than rank {ranks[0]}, by its "
                "name, its last start and the network that it sees. Set the launcher's variables right, or give a "
                "DeviceMesh that says which ranks share a node." + see("FD028")
            )
    return list(nodes.values())


def _variable(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else _NO_LAUNCHER
