"""The reducer under the names of torch's, for frameworks that reach through the wrapper to ``model.reducer``."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor

from fastddp import _C
from fastddp.engine import Engine


class Reducer(_C.Reducer):
    """The compiled reducer, and the methods of torch's that Accelerate and Lightning call.

    fastddp itself calls none of the methods below: the wrapper's forward does their work. They serve code that runs a
    synchronising backward without a forward of the wrapper.
    """

    _engine: weakref.ref[Engine]

    def belongs_to(self, engine: Engine) -> None:
        """Say whose reducer this is. Call it once, before any other method."""
        self._engine = weakref.ref(engine)  # weak: it holds its reducer, and must be freed when its user drops it

    def prepare_for_forward(self) -> None:
        """Do nothing; under torch's DDP a forward resets counters here."""

    def prepare_for_backward(self, outputs: Tensor | Sequence[Tensor]) -> None:
        """Let the next backward synchronise gradients, including those that are only local up to now.

        A forward of the wrapper does the same outside ``no_sync``. As under torch's DDP, the caller synchronises
        buffers, by ``require_forward_param_sync``. The backward starts at ``outputs``, which are needed if it may bring
        no gradient at all. Raises RuntimeError if gradients of the previous backward are missing.
        """
        engine = self._owner()
        engine.check_none_missing()
        engine.reducer.begin_forward(grad_enabled=True)
        engine.begin_window()
        engine.arm(outputs)

    def _rebuild_buckets(self) -> bool:
        """Rebuild the buckets now, not in the next forward, if that is still to be done; return whether it was done.

        A collective, as under torch's DDP. With ``static_graph`` this ends the first step, which all others follow.
        """
        engine = self._owner()
        engine.check_none_missing()
        # A forward copied from torch's calls this each time, and under no_sync nothing else.
        self.begin_forward(grad_enabled=True)
        if engine.has_rebuilt_buckets:
            return False
        engine.rebuild_buckets()
        return engine.has_rebuilt_buckets

    def _delay_all_reduce(self) -> None:
        """Make sure that the last backward has synchronised all gradients; raise ``RuntimeError`` if it has not.

        Under torch's DDP with a static graph, the first backward leaves its collectives to this call. With fastddp,
        backward returns when its collectives are done.
        """
        self._owner().check_complete()

    def _owner(self) -> Engine:
        engine = self._engine()
        assert engine is not None, "a reducer is used after its model"
        return engine
