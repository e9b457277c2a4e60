"""Two levels: links inside a node are fast, so only what leaves it is compressed (``hierarchy=``).

Each rank of a node adds up the node's gradients for its run of every bucket. Ranks in the same place of their nodes
exchange these runs as the model's hook says. The result then goes to all ranks of the node
(``csrc/codec/node_codec.cpp``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from fastddp import _C
from fastddp.errors import see
from fastddp.exchange.descriptions import Exchange, Pipelined, Setting
from fastddp.ranks.hierarchy import Hierarchy
from fastddp.ranks.placement import processes_of


def for_shards(setting: Setting, *, whole: bool) -> Setting:
    """``setting`` as an exchange between nodes sees it: what this rank exchanges (``spans``), and with which ranks.

    Ranks in the same place of their nodes have the same spans. The ranks of one node have different spans.

    ``whole``: spans are whole parameters. Otherwise a bucket is cut into runs of the same length, at multiples of 64
    bytes. The new setting takes almost no memory, and no other rank is asked. Without a hierarchy the setting is
    returned as it is.
    """
    if setting.hierarchy is None:
        return setting
    return _with_shards(setting, setting.hierarchy, _shards(setting, setting.hierarchy, whole))


def _shards(setting: Setting, hierarchy: Hierarchy, whole: bool) -> _C.Sharding:
    node = hierarchy.node
    return _C.Sharding(
        setting.parameters, setting.names, setting.plan, ranks=node.size(), rank=node.rank(), whole=whole
    )


def _with_shards(setting: Setting, hierarchy: Hierarchy, shards: _C.Sharding) -> Setting:
    """What a node does itself is left out: there gradients are divided, and measured before they are added up."""
    return Setting(
        setting.process_group,
        setting.names,
        setting.parameters,
        setting.plan,
        setting.several_lanes,
        setting.reads_pay,
        setting.lanes_were_measured,
        between_nodes=hierarchy.between,
        spans={parameter: (begin, end) for parameter, begin, end in shards.spans if begin < end},
        place=f" of rank {hierarchy.node.rank()} of a node",
    )


@dataclass(frozen=True)
class TwoLevel(Exchange):
    """``exchange`` between nodes, and sums in the gradients' own dtype inside a node."""

    exchange: Pipelined
    hierarchy: Hierarchy

    def group(self, setting: Setting) -> dist.ProcessGroup:
        """As :meth:`fastddp.exchange.descriptions.Exchange.group`.

        Raises:
            ValueError: ``exchange`` is over other ranks than the model's, which the hierarchy is made of.
        """
        group = self.exchange.group(setting)
        ranks_of = dist.get_process_group_ranks
        if group is None or ranks_of(group) != ranks_of(setting.process_group):
            raise ValueError(
                "hierarchy= is made of the ranks of the model's process group, and the communication hook names "
                "another process group. Leave the hook's process group at None, or hierarchy at None." + see("FD028")
            )
        return group

    def make(self, setting: Setting) -> _C.Pipeline:
        """As :meth:`fastddp.exchange.descriptions.Exchange.make`."""
        group = self.group(setting)
        setting.load_kernels()
        shards = setting.sharding or _shards(setting, self.hierarchy, self.exchange.takes_whole_parameters)
        outer = self.exchange.make(_with_shards(setting, self.hierarchy, shards))
        return _C.Pipeline.two_levels(
            outer,
            shards,
            all=group,
            node=_C.Lanes([self.hierarchy.node], processes_of(self.hierarchy.node, setting.device)),
            remembers=self.exchange.remembers,
            spreads=setting.sharding is None,
        )


def in_levels(exchange: Exchange, setting: Setting) -> Exchange:
    """``exchange`` in the two levels of ``setting``. Without levels, or if nothing travels, it is returned as it is.

    Raises:
        ValueError: it is a hook in Python, which gets whole buckets and knows no levels; or as for :class:`TwoLevel`.
    """
    if setting.hierarchy is None or exchange.group(setting) is None or not setting.plan:
        return exchange  # a plan without buckets: all gradients are sparse
    if not isinstance(exchange, Pipelined):
        raise ValueError(
            "hierarchy= is for exchanges that fastddp runs, and a communication hook written in Python does its own "
            "collectives. Use a hook of fastddp.comm_hooks, or leave hierarchy at None." + see("FD028")
        )
    return TwoLevel(exchange, setting.hierarchy)
