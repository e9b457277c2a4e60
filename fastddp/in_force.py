"""What a model's gradients go through now: read by all that looks on, changed by :mod:`fastddp.engine` alone."""

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
    """Belongs to one engine, and goes with it."""

    module: nn.Module
    """What was wrapped."""
    parameters: NamedParameters
    main_gradients: MainGradients
    number: ModelNumber
    process_group: dist.ProcessGroup
    """The model's ranks."""
    device: torch.device
    """Of the first parameter: where tensors must live for the group's collectives."""
    reducer: _C.Reducer
    setting: Setting
    exchange: Exchange = field(init=False)
    """That of the window that comes."""
    is_uneven: bool = False
    """Whether ranks may have different numbers of inputs (torch's Join)."""
    counts_ranks_with_inputs: bool = False
    """Whether a mean is over these alone."""
