"""Two levels: links inside a node are fast, and only what leaves it is compressed (``hierarchy=``).

The ranks of a node add up among themselves, each a part of every bucket; ranks in the same place of their nodes
exchange these parts in the way that the model's hook says; and the result goes to all ranks of the node
(``csrc/pipeline/two_level.cpp``).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fastddp import _C
from fastddp.exchange.lanes import ranks_name_groups_alike
from fastddp.exchange.placement import machine_of_this_rank

if TYPE_CHECKING:
    from fastddp.exchange.descriptions import Exchange, Setting

HierarchyArgument = Literal["node"] | DeviceMesh | None

_NO_LAUNCHER = -1


@dataclass(frozen=True, eq=False)
class Hierarchy:
    """The ranks of a process group on several nodes, as many on each. Equal to itself only."""

    node: dist.ProcessGroup
    """The ranks of this rank's node."""
    between: dist.ProcessGroup
    """The ranks in this rank's place of each node."""

    def shards(self, setting: Setting, *, whole: bool) -> _C.NodeShards:
        """What this rank exchanges of the buckets of ``setting``: see :func:`for_shards`."""
        return _C.NodeShards(
            setting.parameters, setting.names, setting.plan, ranks=self.node.size(), rank=self.node.rank(), whole=whole
        )


def check_hierarchy(hierarchy: object) -> None:
    """Raise unless ``hierarchy`` is one of the choices.

    Raises:
        ValueError: another string; a mesh that has not two dimensions.
        TypeError: something else.
    """
    if isinstance(hierarchy, DeviceMesh):
        if hierarchy.ndim != 2:
            raise ValueError(
                f"hierarchy as a mesh has two dimensions, the nodes and the ranks of a node, but {hierarchy} has "
                f"{hierarchy.ndim}. Make it with init_device_mesh(device_type, (nodes, ranks_of_a_node)), or give "
                '"node".'
            )
    elif isinstance(hierarchy, str):
        if hierarchy != "node":
            raise ValueError(f'hierarchy is None, "node" or a DeviceMesh of two dimensions, not {hierarchy!r}.')
    elif hierarchy is not None:
        raise TypeError(f'hierarchy is None, "node" or a DeviceMesh of two dimensions, not {hierarchy!r}.')


def find_hierarchy(
    hierarchy: HierarchyArgument, process_group: dist.ProcessGroup, device: torch.device
) -> Hierarchy | None:
    """The two levels of ``process_group``; None: one node, or one rank on each, and so one level.

    A collective: all ranks of ``process_group`` call it together. With ``"node"`` they say once where they are and make
    groups once, for as long as torch keeps ``process_group``. ``device``: where tensors must live for collectives.

    Raises:
        ValueError: nodes have different numbers of ranks; a mesh has other ranks than ``process_group``; or the
            launcher and the machines say different things of nodes.
        RuntimeError: ranks are in different numbers of process groups, so that no new one can be made.
    """
    if hierarchy is None:
        return None
    if isinstance(hierarchy, DeviceMesh):
        return _of_mesh(hierarchy, process_group)
    if process_group not in _found:
        for group in list(_found):
            if group not in dist.distributed_c10d._world.pg_map:
                del _found[group]
        _found[process_group] = _of_nodes(process_group, device)
    return _found[process_group]


_found: dict[dist.ProcessGroup, Hierarchy | None] = {}


def for_shards(setting: Setting, *, whole: bool) -> Setting:
    """``setting`` as an exchange between nodes sees it: what an exchange keeps for each gradient is made for this.

    - ``names``: of the slices of this rank, a parameter's own where the slice is all of it, else ``name[begin:end]``,
      elements in the order of the parameter's memory. The same on ranks in the same place of their nodes; another rank
      of the node has others.
    - ``parameters``: tensors of the slices' shapes (of a part of a parameter: one dimension), dtypes and devices, which
      nobody is to read: they share the parameters' memory.
    - ``plan``: by bucket, the numbers of its slices. As many buckets as the model has, none without a slice: one that
      has no elements on this rank has a slice of no elements.
    - ``numbers``: by slice, the number of its parameter in the model.
    - ``between_nodes``: the ranks to exchange with.

    ``whole``: slices are whole parameters. Else a bucket is cut into parts of the same length, at multiples of 64
    bytes. ``_C.NodeShards.slices`` has (number of the parameter, begin, end) for each slice. What is made here takes no
    memory worth the name and asks no other rank. Without a hierarchy the setting is returned as it is.
    """
    if setting.hierarchy is None:
        return setting
    return _with_shards(setting, setting.hierarchy, setting.hierarchy.shards(setting, whole=whole))


def _with_shards(setting: Setting, hierarchy: Hierarchy, shards: _C.NodeShards) -> Setting:
    return dataclasses.replace(
        setting,
        names=shards.names,
        parameters=shards.parameters,
        plan=shards.plan,
        divide_in_collective=False,
        sum_audit=None,
        measures_gradients=False,
        hierarchy=None,
        between_nodes=hierarchy.between,
        numbers=[parameter for parameter, _, _ in shards.slices],
        place=f" of rank {hierarchy.node.rank()} of a node",
    )


@dataclass(frozen=True)
class TwoLevel:
    """``exchange`` between nodes, sums in the gradients' own dtype inside them."""

    exchange: Exchange
    hierarchy: Hierarchy

    def group(self, setting: Setting) -> dist.ProcessGroup:
        """As :meth:`fastddp.exchange.descriptions.Exchange.group`.

        Raises:
            ValueError: ``exchange`` is over other ranks than the model's, of which the hierarchy is made.
        """
        group = self.exchange.group(setting)
        ranks_of = dist.get_process_group_ranks
        if group is None or ranks_of(group) != ranks_of(setting.process_group):
            raise ValueError(
                "hierarchy= is made of the ranks of the model's process group, and the communication hook names "
                "another process group. Leave the hook's process group at None, or hierarchy at None."
            )
        return group

    def make(self, setting: Setting) -> _C.Exchange:
        """As :meth:`fastddp.exchange.descriptions.Exchange.make`."""
        group = self.group(setting)
        setting.load_kernels()
        shards = self.hierarchy.shards(setting, whole=self.exchange.takes_whole_parameters)
        outer = self.exchange.make(_with_shards(setting, self.hierarchy, shards))
        return _C.Exchange.two_level(
            outer, shards, all=group, node=self.hierarchy.node, remembers=self.exchange.remembers
        )


def in_levels(exchange: Exchange, setting: Setting) -> Exchange:
    """``exchange``, in the two levels that ``setting`` has; where it has none, or nothing travels, as it is.

    Raises:
        ValueError: it is a hook in Python, which sees all of a bucket and knows no levels; or as for :class:`TwoLevel`.
    """
    if setting.hierarchy is None or exchange.group(setting) is None or not setting.plan:
        return exchange  # without buckets there are sparse gradients only
    if not exchange.can_be_between_nodes:
        raise ValueError(
            "hierarchy= is for exchanges that fastddp runs, and a communication hook written in Python does its own "
            "collectives. Use a hook of fastddp.comm_hooks, or leave hierarchy at None."
        )
    return TwoLevel(exchange, setting.hierarchy)


# ------------------------------------------------------------------------------------------------------- finding nodes


def _of_mesh(mesh: DeviceMesh, process_group: dist.ProcessGroup) -> Hierarchy | None:
    ranks = sorted(mesh.mesh.flatten().tolist())
    wanted = sorted(dist.get_process_group_ranks(process_group))
    if ranks != wanted:
        raise ValueError(
            f"hierarchy is a mesh of the ranks {_listed(ranks)}, and gradients are averaged over the ranks "
            f"{_listed(wanted)}. Give a mesh of the same ranks, each once."
        )
    nodes, ranks_of_a_node = mesh.shape
    if nodes == 1 or ranks_of_a_node == 1:
        return None
    return Hierarchy(node=mesh.get_group(1), between=mesh.get_group(0))


def _of_nodes(process_group: dist.ProcessGroup, device: torch.device) -> Hierarchy | None:
    nodes = _ranks_by_node(process_group, device)
    sizes = {len(ranks) for ranks in nodes}
    if len(sizes) > 1:
        numbers = "; ".join(f"{len(ranks)} on that of rank {_listed(ranks)}" for ranks in nodes)
        raise ValueError(
            f'hierarchy="node" takes nodes with as many ranks each, and of the ranks of the process group there are '
            f"{numbers}. Start as many processes on each node, or leave hierarchy at None."
        )
    if len(nodes) == 1 or sizes == {1}:
        return None
    if not ranks_name_groups_alike(process_group, device):
        raise RuntimeError(
            'hierarchy="node" makes process groups, which torch names by how many a rank is in, and ranks of this '
            "model are in different numbers of groups. Make them yourself, on all ranks: hierarchy=init_device_mesh("
            "device_type, (nodes, ranks_of_a_node))."
        )
    mine = process_group.rank()
    (node,) = [ranks for ranks in nodes if mine in ranks]
    across = [ranks[node.index(mine)] for ranks in nodes]
    return Hierarchy(
        node=_new_group(process_group, device, node, "the ranks of a node"),
        between=_new_group(process_group, device, across, f"rank {node.index(mine)} of each node"),
    )


def _new_group(
    process_group: dist.ProcessGroup, device: torch.device, ranks: Sequence[int], what: str
) -> dist.ProcessGroup:
    """Of ``ranks`` of ``process_group``, with its backends and its patience; they alone call this."""
    everywhere = dist.get_process_group_ranks(process_group)
    options = getattr(process_group._get_backend(device), "options", None)  # a backend of one's own has none
    return dist.new_group(
        [everywhere[rank] for rank in ranks],
        timeout=None if options is None else options._timeout,
        backend=dist.get_backend_config(process_group),
        use_local_synchronization=True,
        group_desc=f"fastddp hierarchy: {what}",
    )


def _ranks_by_node(process_group: dist.ProcessGroup, device: torch.device) -> list[list[int]]:
    """The ranks of each node, nodes in the order of their first ranks; the same on all ranks.

    Torchrun numbers nodes (``GROUP_RANK``) and tells ranks how many there are on theirs (``LOCAL_WORLD_SIZE``). Where
    it has told all ranks, its nodes count, as long as none of them is on several machines; else each machine is a node.

    Raises:
        ValueError: the ranks that torchrun counts to one node are on several machines.
    """
    numbers = [_variable("GROUP_RANK"), _variable("LOCAL_WORLD_SIZE"), machine_of_this_rank()]
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    rows = [torch.empty_like(mine) for _ in range(process_group.size())]
    dist.all_gather(rows, mine, group=process_group)
    told = [tuple(row.tolist()) for row in rows]
    has_launcher = all(_NO_LAUNCHER not in row[:2] for row in told)
    nodes: dict[int, list[int]] = {}
    for rank, (group_rank, _, machine) in enumerate(told):
        nodes.setdefault(group_rank if has_launcher else machine, []).append(rank)
    for ranks in nodes.values():
        machines = [told[rank][2] for rank in ranks]
        if len(set(machines)) > 1:
            others = [rank for rank, machine in zip(ranks, machines, strict=True) if machine != machines[0]]
            raise ValueError(
                f'hierarchy="node": the launcher counts rank {_listed(ranks)} to one node (GROUP_RANK is '
                f"{told[ranks[0]][0]}), and rank {_listed(others)} is on another machine than rank {ranks[0]}, by its "
                "name, its last start and the network that it sees. Set the launcher's variables right, or give a "
                "DeviceMesh that says which ranks share a node."
            )
    return list(nodes.values())


def _variable(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else _NO_LAUNCHER


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:16])) + (f", … ({len(ranks)} in all)" if len(ranks) > 16 else "")
