"""How the gradients of one model travel: an exchange, in two levels or not, for a sharded optimizer or not.

In two levels (``hierarchy=``) links inside a node are fast, so only what leaves it is compressed. Each rank of a node
adds up the node's gradients for its run of every bucket. Ranks in the same place of their nodes exchange these runs as
the model's hook says. The result then goes to all ranks of the node. With a sharded optimizer each rank keeps the
averages of its own part of every bucket. What follows from that is decided in ``csrc/trip/trips.cpp``.
"""

from __future__ import annotations

import torch.distributed as dist

from fastddp import _C
from fastddp.errors import see
from fastddp.exchange.descriptions import Exchange, Pipelined, Setting
from fastddp.ranks.hierarchy import Hierarchy
from fastddp.ranks.placement import processes_of


def way_of(exchange: Exchange, setting: Setting) -> _C.Way:
    """Make the way of a model's gradients, and load the kernels that it needs.

    Raises:
        ValueError: as :func:`check_shardable`; or in two levels, ``exchange`` is a hook in Python, which gets whole
            buckets and knows no levels, or it is over other ranks than the model's.
    """
    if not setting.plan:
        return exchange.make(setting)  # all gradients are sparse
    if setting.sharding is not None:
        check_shardable(exchange, setting)
    if setting.hierarchy is None or exchange.group(setting) is None:
        way = exchange.make(setting)
    else:
        way = _in_two_levels(exchange, setting, setting.hierarchy)
    if setting.sharding is not None:
        way.sharding, way.shards = setting.sharding, setting.shards
    return way


def check_shardable(exchange: Exchange, setting: Setting) -> None:
    """Raise if a sharded optimizer cannot take gradients that travel like this.

    Raises:
        ValueError: it is a hook in Python, ``noop_hook`` or PowerSGD; or it is over other ranks than the model's.
    """
    if not isinstance(exchange, Pipelined) or exchange.takes_whole_parameters:
        raise ValueError(
            f"A ShardedOptimizer takes gradients as they are, as fp16, bf16 or 8 bits, and not by {_kind(exchange)}, "
            "which needs whole gradients on each rank. Use one of those hooks, or an optimizer that is not sharded."
            + see("FD042")
        )
    if not _is_over_all_ranks(exchange, setting):
        raise ValueError(
            "A ShardedOptimizer is sharded over the ranks of the model, and the communication hook names another "
            "process group. Leave the hook's process group at None." + see("FD042")
        )


def for_shards(setting: Setting, *, whole: bool) -> Setting:
    """``setting`` as an exchange between nodes sees it: what this rank exchanges (``spans``), and with which ranks.

    Ranks in the same place of their nodes have the same spans. The ranks of one node have different spans.

    ``whole``: spans are whole parameters. Otherwise a bucket is cut into runs of the same length, at multiples of 64
    bytes. The new setting takes almost no memory, and no other rank is asked. Without a hierarchy the setting is
    returned as it is.
    """
    if setting.hierarchy is None:
        return setting
    return _between_nodes(setting, setting.hierarchy, _shards(setting, setting.hierarchy, whole))


def _in_two_levels(exchange: Exchange, setting: Setting, hierarchy: Hierarchy) -> _C.Way:
    if not isinstance(exchange, Pipelined):
        raise ValueError(
            "hierarchy= is for exchanges that fastddp runs, and a communication hook written in Python does its own "
            "collectives. Use a hook of fastddp.comm_hooks, or leave hierarchy at None." + see("FD028")
        )
    if not _is_over_all_ranks(exchange, setting):
        raise ValueError(
            "hierarchy= is made of the ranks of the model's process group, and the communication hook names "
            "another process group. Leave the hook's process group at None, or hierarchy at None." + see("FD028")
        )
    setting.load_kernels()
    shards = setting.sharding or _shards(setting, hierarchy, exchange.takes_whole_parameters)
    way = exchange.make(_between_nodes(setting, hierarchy, shards))
    way.all, way.node = setting.process_group, _C.Lanes([hierarchy.node], processes_of(hierarchy.node, setting.device))
    way.sharding = shards
    return way


def _shards(setting: Setting, hierarchy: Hierarchy, whole: bool) -> _C.Sharding:
    node = hierarchy.node
    return _C.Sharding(
        setting.parameters, setting.names, setting.plan, ranks=node.size(), rank=node.rank(), whole=whole
    )


def _between_nodes(setting: Setting, hierarchy: Hierarchy, shards: _C.Sharding) -> Setting:
    """What a node does itself is left out: there gradients are divided, and measured before they are added up."""
    spans = [span for bucket in range(len(setting.plan)) for span in shards.spans(bucket)]
    return Setting(
        setting.process_group,
        setting.names,
        setting.parameters,
        setting.plan,
        setting.several_lanes,
        setting.reads_pay,
        setting.lanes_were_measured,
        between_nodes=hierarchy.between,
        spans={parameter: (begin, end) for parameter, begin, end, _ in spans if begin < end},
        place=f" of rank {hierarchy.node.rank()} of a node",
    )


def _is_over_all_ranks(exchange: Exchange, setting: Setting) -> bool:
    group, ranks_of = exchange.group(setting), dist.get_process_group_ranks
    return group is not None and ranks_of(group) == ranks_of(setting.process_group)


def _kind(exchange: Exchange) -> str:
    return {"PythonHook": "a hook in Python", "Noop": "noop_hook"}.get(type(exchange).__name__, type(exchange).__name__)
