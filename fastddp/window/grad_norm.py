"""The norm of the averaged gradients, which the reducer measures anyway."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from fastddp.errors import see

if TYPE_CHECKING:
    from fastddp._C import Reducer


def measured(reducer: Reducer) -> Tensor:
    """The sum of squares of the synchronised gradients, and how many elements are not finite.

    Raises:
        RuntimeError: no synchronisation has ended since the last forward.
    """
    if reducer.state != "finished":
        raise RuntimeError(
            "The norm of gradients, and whether they are finite, is known between the backward that synchronises them "
            "and the next forward. Ask for it after backward() and before the model is called again; a backward whose "
            "forward ran under no_sync() synchronises nothing." + see("FD014")
        )
    return reducer.measure()
