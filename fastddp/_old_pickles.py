"""Lets pickles load that were made when fastddp had no folders: they name these classes by the modules of then.

Pickles of wrappers hold all of them, and those of :class:`fastddp.comm_hooks.PowerSGDState` that one. Nothing else is
to be had under the old names.
"""

from __future__ import annotations

import sys
from types import ModuleType

from fastddp.exchange.power_sgd import PowerSGDState
from fastddp.module.buffers import BufferSync
from fastddp.module.meshes import LocalParts
from fastddp.module.mixed_precision import LowPrecision
from fastddp.module.parameters import NamedParameters
from fastddp.module.stand_ins import StandIns, _Replacement
from fastddp.planning.delayed import Delayed
from fastddp.planning.pinned_plan import PinnedPlan

PLACES: dict[str, tuple[type, ...]] = {
    "fastddp.buffers": (BufferSync,),
    "fastddp.delayed": (Delayed,),
    "fastddp.meshes": (LocalParts,),
    "fastddp.mixed_precision": (LowPrecision,),
    "fastddp.parameters": (NamedParameters,),
    "fastddp.pinned_plan": (PinnedPlan,),
    "fastddp.power_sgd": (PowerSGDState,),
    "fastddp.stand_ins": (StandIns, _Replacement),
}


def answer_to_old_names() -> None:
    """From now on ``pickle`` finds the classes in their old places."""
    for place, classes in PLACES.items():
        module = ModuleType(place, "Only for pickles.")
        vars(module).update({cls.__name__: cls for cls in classes})
        sys.modules[place] = module
