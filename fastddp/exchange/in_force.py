"""How a model's gradients travel now. Watchers read this; only :mod:`fastddp.engine` changes it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from fastddp import _C
from fastddp.exchange.descriptions import Exchange, Setting
from fastddp.module.main_gradients import MainGradients
from fastddp.module.numbering import ModelNumber
from fastddp.module.parameters import NamedParameters


@dataclass(eq=False)
class InForce:
    """One engine's current state; it lives as long as the engine."""

    module: nn.Module  # the wrapped module
    parameters: NamedParameters
    main_gradients: MainGradients
    number: ModelNumber
    process_group: dist.ProcessGroup  # the model's ranks
    device: torch.device  # of the first parameter: where tensors must live for the group's collectives
    reducer: _C.Reducer
    setting: Setting
    exchange: Exchange = field(init=False)  # the exchange of the coming window
    is_uneven: bool = False  # whether ranks may have different numbers of inputs (torch's Join)
    counts_ranks_with_inputs: bool = False  # whether a mean is only over ranks that have inputs
