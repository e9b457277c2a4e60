"""How a model's gradients travel now. Watchers read this; only :mod:`fastddp.engine` changes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastddp import _C
from fastddp.exchange.descriptions import Exchange, Setting
from fastddp.module.main_gradients import MainGradients
from fastddp.module.numbering import ModelNumber
from fastddp.module.parameters import NamedParameters
from fastddp.ranks.hierarchy import Hierarchy


@dataclass(eq=False)
class InForce:
    """One engine's current state; it lives as long as the engine. :class:`.Setting` explains what it is made of."""

    module: nn.Module  # the wrapped module
    parameters: NamedParameters
    main_gradients: MainGradients
    number: ModelNumber
    process_group: dist.ProcessGroup  # the model's ranks
    device: torch.device  # of the first parameter: where tensors must live for the group's collectives
    reducer: _C.Reducer
    like: Sequence[Tensor]  # tensors like the gradients: the setting's ``parameters``
    plan: list[list[int]]
    hierarchy: Hierarchy | None
    corruption: bool
    symmetric: bool
    several_lanes: bool = False
    reads_pay: bool = False
    lanes_were_measured: bool = False
    divide_in_collective: bool = False
    sharding: _C.Sharding | None = None
    shards: Sequence[_C.Shard] = ()
    exchange: Exchange = field(init=False)  # the exchange of the coming window
    is_uneven: bool = False  # whether ranks may have different numbers of inputs (torch's Join)
    counts_ranks_with_inputs: bool = False  # whether a mean is only over ranks that have inputs

    @property
    def setting(self) -> Setting:
        """What exchanges have to know of this model now."""
        return Setting(
            self.process_group,
            self.parameters.names,
            self.like,
            self.plan,
            self.several_lanes,
            self.reads_pay,
            self.lanes_were_measured,
            divide_in_collective=self.divide_in_collective and self.sharding is None,  # tried with allreduces
            corruption=self.corruption,
            hierarchy=self.hierarchy,
            sharding=self.sharding,
            shards=self.shards,
            symmetric=self.symmetric,
        )
