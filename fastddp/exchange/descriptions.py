"""How gradients travel, as descriptions: which exchange (``csrc/pipeline/exchange.h``) a reducer runs, and how."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from fastddp import _C
from fastddp.bucket_plan import Buckets
from fastddp.exchange.backends import backend_of, check_numbers
from fastddp.exchange.groups import zero_cta_twin
from fastddp.exchange.hierarchy import Hierarchy
from fastddp.exchange.lanes import lanes_for
from fastddp.exchange.launching import load_kernels, load_sum_kernels
from fastddp.exchange.placement import nodes_of

Spans: TypeAlias = dict[int, tuple[int, int]]
"""Parts of parameters, by number of the parameter: first element and end, in the order of its memory."""


@dataclass(frozen=True)
class Setting:
    """What an exchange has to know of the model it is for."""

    process_group: dist.ProcessGroup
    """The ranks to average over, where the exchange names no others."""
    names: Sequence[str]
    parameters: Sequence[Tensor]
    """As their gradients are: shapes, strides, dtypes and devices. They may have no memory."""
    plan: Buckets
    several_lanes: bool = False
    """Whether buckets are so large that a second lane pays."""
    lanes_were_measured: bool = False
    """Whether times have shown it: Note [Lanes over NCCL], ``lanes.py``."""
    divide_in_collective: bool = False
    """Whether the average of ``process_group`` shall do the division: see :func:`.averages.divides_first`."""
    sum_audit: _C.SumAudit | None = None
    """What looks on where wires are added up, if anybody does."""
    carried: frozenset[int] | None = None
    """Which buckets of the plan the exchange carries; None: all. Others have the rest."""
    measures_gradients: bool = False
    """Whether what packs gradients also measures them (Note [Local sums], ``csrc/pack/local_sums.h``)."""
    hierarchy: Hierarchy | None = None
    """Which ranks of ``process_group`` share a node, where that makes a difference."""
    between_nodes: dist.ProcessGroup | None = None
    """The ranks to exchange with, whatever group an exchange names: see :func:`.two_level.for_shards`."""
    spans: Spans | None = None
    """What this rank exchanges between nodes; None: all of each gradient."""
    zero_cta: bool = False
    """Whether wires go over groups of their own, in symmetric memory, and in one lane (``wire_memory="symmetric"``)."""
    place: str = ""
    """What is added to the name of a bucket's memory, where ranks of a node have other shards of the bucket."""

    @property
    def device(self) -> torch.device:
        """Of a parameter; all are on devices of one type."""
        return self.parameters[0].device

    def group_for(self, named: dist.ProcessGroup | None) -> dist.ProcessGroup:
        """The ranks of an exchange that names this group, or none."""
        return self.between_nodes or named or self.process_group

    def carrier_of(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """The group of the same ranks that wires go over; a collective where :attr:`zero_cta` is set."""
        return zero_cta_twin(group, self.device) if self.zero_cta else group

    def lanes_over(self, group: dist.ProcessGroup) -> list[dist.ProcessGroup]:
        """Groups of the ranks of ``group`` to deal buckets over; a collective where :attr:`several_lanes` is set."""
        group = self.carrier_of(group)
        if not self.several_lanes or self.zero_cta:
            return [group]
        return lanes_for(group, self.device, measured=self.lanes_were_measured)

    @functools.cached_property
    def bucket_ends(self) -> tuple[tuple[str, str, int], ...]:
        """Of each bucket its first and last parameter and the bytes of its gradients."""
        return tuple(
            (self.names[bucket[0]], self.names[bucket[-1]], sum(self.parameters[index].nbytes for index in bucket))
            for bucket in self.plan
        )

    def carries(self, index: int) -> bool:
        """Whether the exchange has gradients of parameter number ``index``."""
        is_in_bucket = self.carried is None or index in self._carried_parameters
        return is_in_bucket and (self.spans is None or index in self.spans)

    @functools.cached_property
    def _carried_parameters(self) -> frozenset[int]:
        return frozenset(index for bucket in self.carried or () for index in self.plan[bucket])

    def load_kernels(self, wire: torch.dtype | None = None) -> None:
        """Load what packs the gradients into wires of this dtype (None: their own), where kernels are loaded at all."""
        wanted = {(tensor.device, tensor.dtype, wire or tensor.dtype) for tensor in self.parameters}
        load_kernels(wanted, self.measures_gradients)


class Exchange(Protocol):
    """One way for gradients to travel. Equal descriptions mean the same exchange."""

    can_be_between_nodes: ClassVar[bool]
    """Whether :func:`.two_level.for_shards` can be its setting."""

    @property
    def takes_whole_parameters(self) -> bool:
        """Whether it takes gradients for matrices, of which a part is another one."""

    remembers: ClassVar[bool]
    """Whether what it does depends on earlier windows: then NaN would stay, and it needs an average and not a sum."""

    def group(self, setting: Setting) -> dist.ProcessGroup | None:
        """The ranks that get gradients of each other, this one among them; None: this one keeps its own."""

    def make(self, setting: Setting) -> _C.Exchange:
        """The exchange for one reducer; loads the kernels that it takes."""


Schedule = Callable[[int], Exchange]
"""Which exchange window number 0, 1, ... uses."""


@dataclass(frozen=True)
class AllReduce:
    """The average over the ranks of ``process_group`` (None: the model's own), by one allreduce a bucket."""

    process_group: dist.ProcessGroup | None = None
    wire: torch.dtype | None = None
    accumulate: Literal["fp32", "wire"] | None = None
    """For a wire of 16 bits: the dtype of the sums. None: fp32 over gloo, where that is also the faster way."""
    can_be_between_nodes: ClassVar[bool] = True
    takes_whole_parameters: ClassVar[bool] = False
    remembers: ClassVar[bool] = False

    def group(self, setting: Setting) -> dist.ProcessGroup:
        """As :meth:`Exchange.group`."""
        return setting.group_for(self.process_group)

    def make(self, setting: Setting) -> _C.Exchange:
        """As :meth:`Exchange.make`."""
        setting.load_kernels(self.wire)
        transport = self._transport(setting)
        if setting.sum_audit is not None:
            transport = _C.Transport.audited(transport, setting.sum_audit)
        return _C.Exchange.pipeline(_C.Codec.cast(self.wire), transport)

    def _transport(self, setting: Setting) -> _C.Transport:
        group = self.group(setting)
        check_numbers(group)
        lanes = setting.lanes_over(group)
        over_gloo = backend_of(group, setting.device) == dist.Backend.GLOO
        if self.wire is not None and self._adds_in_fp32(self.wire, over_gloo):
            load_sum_kernels({tensor.device for tensor in setting.parameters}, self.wire)
            # Only there do nodes make a difference: transport.h.
            in_pairs = over_gloo and setting.device.type == "cpu"
            nodes = nodes_of(group) if in_pairs else [0] * group.size()
            return _C.Transport.sharded_sum(lanes, nodes, setting.device)
        divides = setting.divide_in_collective and group is setting.process_group  # another was not asked
        return _C.Transport.all_reduce(lanes, divides)

    def _adds_in_fp32(self, wire: torch.dtype, over_gloo: bool) -> bool:
        return wire.itemsize == 2 and (self.accumulate == "fp32" or (self.accumulate is None and over_gloo))


@dataclass(frozen=True)
class Noop:
    """No communication: each rank keeps its own gradients."""

    can_be_between_nodes: ClassVar[bool] = False
    takes_whole_parameters: ClassVar[bool] = False
    remembers: ClassVar[bool] = False

    def group(self, setting: Setting) -> None:
        """As :meth:`Exchange.group`."""

    def make(self, setting: Setting) -> _C.Exchange:
        """As :meth:`Exchange.make`."""
        if setting.measures_gradients:
            setting.load_kernels()
        return _C.Exchange.noop()


@dataclass(frozen=True, eq=False)
class PythonHook:
    """A hook written for torch's DDP, called for each bucket."""

    state: object
    hook: Callable[..., object]
    can_be_between_nodes: ClassVar[bool] = False
    takes_whole_parameters: ClassVar[bool] = True
    remembers: ClassVar[bool] = True

    def group(self, setting: Setting) -> dist.ProcessGroup:
        """As :meth:`Exchange.group`; what the hook itself does is known to nobody else."""
        return setting.process_group

    def make(self, setting: Setting) -> _C.Exchange:
        """As :meth:`Exchange.make`."""
        setting.load_kernels()
        name = _name_of(self.hook)
        hook = _returning_futures(self.hook, name)
        return _C.Exchange.python_hook(self.state, hook, name, setting.process_group, _groups_in(self.state))


def _groups_in(state: object) -> list[dist.ProcessGroup]:
    """Process groups that a hook's state is or has: as those of torch's hooks, it sends over them."""
    return [one for one in (state, *getattr(state, "__dict__", {}).values()) if isinstance(one, dist.ProcessGroup)]


def _name_of(hook: Callable[..., object]) -> str:
    """What an error calls a hook."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(hook, "__qualname__", type(hook).__qualname__)


def _returning_futures(hook: Callable[..., object], name: str) -> Callable[..., object]:
    """``hook``, but a result that is no future is an error: torch takes None for one, and crashes."""

    def call(state: object, bucket: dist.GradBucket) -> object:
        future = hook(state, bucket)
        if not isinstance(future, torch._C.Future):  # what collectives return; torch.futures.Future is one, too
            raise TypeError(
                f"The communication hook {name} returned an object of type {type(future).__qualname__} for bucket "
                f"{bucket.index()}, not a torch.futures.Future. Return a future that holds the bucket's gradients, for "
                "example dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])."
            )
        return future

    return call


def check_wire(exchange: Exchange, setting: Setting) -> None:
    """Raise unless all gradients can travel in what ``exchange`` casts them to, if it does.

    Raises:
        ValueError: a gradient is complex, and the wire is bf16: torch has no complex numbers of it.
    """
    if not isinstance(exchange, AllReduce) or exchange.wire is not torch.bfloat16:
        return
    for name, parameter in zip(setting.names, setting.parameters, strict=True):
        if parameter.is_complex():
            raise ValueError(
                f"The gradients of parameter {name} are complex, and cannot travel as bf16: torch has no complex "
                "numbers of that dtype. Use fp16, or 8 bits, or leave gradients as they are."
            )
