"""Sharded gradients: each rank gets the averages of its own part of every bucket, for a sharded optimizer."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from fastddp import _C
from fastddp.errors import see
from fastddp.exchange.descriptions import Exchange, Pipelined, Setting


@dataclass(frozen=True)
class Sharded(Exchange):
    """The first half of ``exchange``: what it sends is added up, and the sums stay where they are."""

    exchange: Pipelined

    def group(self, setting: Setting) -> dist.ProcessGroup | None:
        """As :meth:`fastddp.exchange.descriptions.Exchange.group`."""
        return self.exchange.group(setting)

    def make(self, setting: Setting) -> _C.Pipeline:
        """As :meth:`fastddp.exchange.descriptions.Exchange.make`."""
        assert setting.sharding is not None
        return _C.Pipeline.sharded(self.exchange.make(setting), setting.sharding)


def check_shardable(exchange: Exchange, setting: Setting) -> None:
    """Raise if a sharded optimizer cannot take gradients that travel like this.

    Raises:
        ValueError: it is a hook in Python, ``noop_hook`` or PowerSGD; or it is over other ranks than the model's.
    """
    group, ranks_of = exchange.group(setting), dist.get_process_group_ranks
    if not isinstance(exchange, Pipelined) or exchange.takes_whole_parameters:
        raise ValueError(
            f"A ShardedOptimizer takes gradients as they are, as fp16, bf16 or 8 bits, and not by {_kind(exchange)}, "
            "which needs whole gradients on each rank. Use one of those hooks, or an optimizer that is not sharded."
            + see("FD042")
        )
    if group is None or ranks_of(group) != ranks_of(setting.process_group):
        raise ValueError(
            "A ShardedOptimizer is sharded over the ranks of the model, and the communication hook names another "
            "process group. Leave the hook's process group at None." + see("FD042")
        )


def in_shards(exchange: Exchange, setting: Setting) -> Exchange:
    """``exchange`` as a sharded optimizer takes it. Without one it is returned as it is; in two levels, too.

    Raises:
        ValueError: as :func:`check_shardable`.
    """
    if setting.sharding is None or not setting.plan:
        return exchange
    check_shardable(exchange, setting)
    assert isinstance(exchange, Pipelined)
    return Sharded(exchange) if setting.hierarchy is None else exchange


def _kind(exchange: Exchange) -> str:
    return {"PythonHook": "a hook in Python", "Noop": "noop_hook"}.get(type(exchange).__name__, type(exchange).__name__)
