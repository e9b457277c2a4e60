"""How gradients travel, as descriptions: which exchange of ``csrc/exchange.h`` a reducer runs, with which settings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fastddp._C import Reducer
from fastddp.bucket_plan import Buckets
from fastddp.lanes import lanes_for
from fastddp.launching import load_kernels


@dataclass(frozen=True)
class Setting:
    """What an exchange has to know of the model it is for."""

    process_group: dist.ProcessGroup
    """The ranks to average over, where the exchange names no others."""
    names: Sequence[str]
    parameters: Sequence[Tensor]
    plan: Buckets
    several_lanes: bool = False
    """Whether buckets are so large that a second lane pays."""
    divide_in_collective: bool = False
    """Whether the average of ``process_group`` shall do the division: see :func:`.averages.divides_first`."""

    @functools.cached_property
    def bucket_ends(self) -> tuple[tuple[str, str, int], ...]:
        """Of each bucket its first and last parameter and the bytes of its gradients."""
        return tuple(
            (self.names[bucket[0]], self.names[bucket[-1]], sum(self.parameters[index].nbytes for index in bucket))
            for bucket in self.plan
        )

    def load_kernels(self, wire: torch.dtype | None = None) -> None:
        """Load what packs the gradients into wires of this dtype (None: their own), where kernels are loaded at all."""
        load_kernels({(tensor.device, tensor.dtype, wire or tensor.dtype) for tensor in self.parameters})


class Exchange(Protocol):
    """One way for gradients to travel. Equal descriptions mean the same exchange."""

    def install(self, reducer: Reducer, setting: Setting) -> None:
        """Make ``reducer`` exchange gradients this way, from its next window on; load the kernels that it takes."""


Schedule = Callable[[int], Exchange]
"""Which exchange window number 0, 1, ... uses."""


@dataclass(frozen=True)
class AllReduce:
    """The mean over the ranks of ``process_group`` (None: the model's own), by one allreduce a bucket."""

    process_group: dist.ProcessGroup | None = None
    wire: torch.dtype | None = None
    accumulate: Literal["fp32", "wire"] | None = None
    """For a wire of 16 bits: the dtype of the sums. None: fp32 over gloo, where that is also the faster way."""

    def install(self, reducer: Reducer, setting: Setting) -> None:
        """As :meth:`Exchange.install`."""
        setting.load_kernels(self.wire)
        group = self.process_group or setting.process_group
        lanes = lanes_for(group) if setting.several_lanes else [group]
        if self.wire is not None and self.wire.itemsize == 2 and self._adds_in_fp32(group):
            reducer.set_wide_sum(lanes, self.wire)
        else:
            divide = setting.divide_in_collective and group is setting.process_group  # another group was not asked
            reducer.set_all_reduce(lanes, self.wire, divide)

    def _adds_in_fp32(self, group: dist.ProcessGroup) -> bool:
        if self.accumulate is None:
            return dist.get_backend(group) == dist.Backend.GLOO
        return self.accumulate == "fp32"


@dataclass(frozen=True)
class Noop:
    """No communication: each rank keeps its own gradients."""

    def install(self, reducer: Reducer, setting: Setting) -> None:
        """As :meth:`Exchange.install`."""
        reducer.set_noop()


@dataclass(frozen=True, eq=False)
class PythonHook:
    """A hook written for torch's DDP, called for each bucket."""

    state: object
    hook: Callable[..., object]

    def install(self, reducer: Reducer, setting: Setting) -> None:
        """As :meth:`Exchange.install`."""
        setting.load_kernels()
        reducer.set_python_hook(self.state, self.hook)
