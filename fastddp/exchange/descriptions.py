"""Descriptions of how gradients travel. Each makes a way (``csrc/trip/way.h``), which a reducer takes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from fastddp import _C
from fastddp.errors import see
from fastddp.kernel_loading.launching import load_kernels, load_sum_kernels
from fastddp.ranks.backends import backend_of, check_numbers
from fastddp.ranks.groups import symmetric_twin
from fastddp.ranks.hierarchy import Hierarchy
from fastddp.ranks.lanes import lanes_for
from fastddp.ranks.placement import nodes_of, processes_of, reads_beat_allreduces

Spans: TypeAlias = dict[int, tuple[int, int]]
"""Spans by number of the parameter: first element and end, in the order of the parameter's memory."""


@dataclass(frozen=True)
class Setting:
    """What an exchange has to know of its model."""

    process_group: dist.ProcessGroup
    """The ranks to average over, unless the exchange names others."""
    names: Sequence[str]
    parameters: Sequence[Tensor]
    """Tensors with the gradients' shapes, strides, dtypes and devices. They may have no memory."""
    plan: list[list[int]]
    several_lanes: bool = False
    """Whether buckets are so large that a second lane pays."""
    reads_pay: bool = False
    """Whether gradients are so many that reads may beat allreduces: :func:`.placement.reads_beat_allreduces`."""
    lanes_were_measured: bool = False
    """Whether measured times say that a second lane pays: Note [Lanes over NCCL], ``lanes.py``."""
    divide_in_collective: bool = False
    """Whether the average of ``process_group`` does the division: see :func:`.agreement.divides_first`."""
    corruption: bool = False
    """Whether ``Watch.corruption`` is set: pack measures gradients (Note [Local sums], ``csrc/pack/local_sums.h``)."""
    hierarchy: Hierarchy | None = None
    """Which ranks of ``process_group`` share a node; None: there is one level."""
    between_nodes: dist.ProcessGroup | None = None
    """The ranks to exchange with, whatever group an exchange names: see :func:`.ways.for_shards`."""
    spans: Spans | None = None
    """What this rank exchanges between nodes; None: all of each gradient."""
    sharding: _C.Sharding | None = None
    """Which rank keeps what of the gradients, for a sharded optimizer; None: each rank gets all."""
    shards: Sequence[_C.Shard] = ()
    """By bucket: what this rank keeps of ``sharding``."""
    symmetric: bool = False
    """Whether wires go over groups of their own, in symmetric memory, and in one lane (``wire_memory="symmetric"``)."""
    place: str = ""
    """Added to the name of a bucket's memory, where ranks of a node have different shards of the bucket."""

    @property
    def sharding_group(self) -> dist.ProcessGroup:
        """The ranks that have a part each, if gradients are sharded."""
        return self.process_group if self.hierarchy is None else self.hierarchy.node

    @property
    def device(self) -> torch.device:
        """Of the first parameter; all are on devices of one type."""
        return self.parameters[0].device

    def group_for(self, named: dist.ProcessGroup | None) -> dist.ProcessGroup:
        """The ranks of an exchange that names this group, or no group."""
        return self.between_nodes or named or self.process_group

    def carrier_of(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """The group over which wires go, with the ranks of ``group``. A collective if :attr:`symmetric` is set."""
        return symmetric_twin(group, self.device) if self.symmetric else group

    def lanes_over(self, group: dist.ProcessGroup, *, with_reads: bool = True) -> _C.Lanes:
        """Groups of the ranks of ``group`` to deal buckets over. A collective: all its ranks call it together.

        With ``with_reads`` ranks may read each other's memory (Note [Reads], ``csrc/transport/reads.h``).
        """
        group = self.carrier_of(group)
        several = self.several_lanes and not self.symmetric
        groups = lanes_for(group, self.device, measured=self.lanes_were_measured) if several else [group]
        return _C.Lanes(groups, processes_of(group, self.device) if with_reads else ())

    @functools.cached_property
    def bucket_ends(self) -> tuple[tuple[str, str, int], ...]:
        """Each bucket's first and last parameter, and the bytes of its gradients."""
        return tuple(
            (self.names[bucket[0]], self.names[bucket[-1]], sum(self.parameters[index].nbytes for index in bucket))
            for bucket in self.plan
        )

    def carries(self, index: int) -> bool:
        """Whether the exchange has gradients of parameter number ``index``."""
        return self.spans is None or index in self.spans

    def load_kernels(self, wire: torch.dtype | None = None) -> None:
        """Load the kernels that pack gradients into wires of this dtype (None: their own), where kernels are used."""
        wanted = {(tensor.device, tensor.dtype, wire or tensor.dtype) for tensor in self.parameters}
        load_kernels(wanted, self.corruption)


class Exchange:
    """One way for gradients to travel. Equal descriptions mean the same exchange."""

    def group(self, setting: Setting) -> dist.ProcessGroup | None:
        """The ranks that exchange gradients with this rank, which is among them; None: this rank keeps its own."""
        raise NotImplementedError

    def make(self, setting: Setting) -> _C.Way:
        """Make the way for one reducer, in one level, and load the kernels that it needs."""
        raise NotImplementedError


class Pipelined(Exchange):
    """An exchange by a codec, which can go between nodes, and by which a rank can get its own part alone."""

    takes_whole_parameters: ClassVar[bool] = False
    """Whether it needs whole gradients, for example to read them as matrices."""


Schedule = Callable[[int], Exchange]
"""Which exchange window number 0, 1, ... uses."""


@dataclass(frozen=True)
class CompressState:
    """Settings for ``fp16_compress_hook`` and ``bf16_compress_hook``, in place of a process group.

    Args:
        process_group: the ranks to average over; None: those of the model.
        accumulate: the dtype in which gradients of 16 bits are added up. ``"fp32"``: each rank adds up its share of the
            gradients in fp32, between an all-to-all and an all-gather. A sum is rounded once, and no partial sum
            overflows. (Over gloo on the CPU, with several ranks on each of several machines, each machine adds up
            first, and a sum is rounded twice.) ``"wire"``: the backend's allreduce adds up in 16 bits. None:
            ``"fp32"`` over gloo, whose own 16-bit sums are slow and lose as many bits; else ``"wire"``.

    Raises:
        ValueError: ``accumulate`` is something else.
    """

    process_group: dist.ProcessGroup | None = None
    accumulate: Literal["fp32", "wire"] | None = None

    def __post_init__(self) -> None:
        if self.accumulate not in (None, "fp32", "wire"):
            raise ValueError(f'accumulate must be "fp32", "wire" or None, got {self.accumulate!r}.' + see("FD024"))


@dataclass(frozen=True)
class AllReduce(Pipelined):
    """The average over the ranks of ``process_group`` (None: those of the model), by allreduces or sums of our own."""

    process_group: dist.ProcessGroup | None = None
    wire: torch.dtype | None = None
    accumulate: Literal["fp32", "wire"] | None = None
    """For a wire of 16 bits: the dtype of the sums. None: fp32 over gloo, where that is also the faster way."""

    def group(self, setting: Setting) -> dist.ProcessGroup:
        """As :meth:`Exchange.group`."""
        return setting.group_for(self.process_group)

    def make(self, setting: Setting) -> _C.Way:
        """As :meth:`Exchange.make`."""
        setting.load_kernels(self.wire)
        codec, group = _C.Codec.cast(self.wire), self.group(setting)
        check_numbers(group)
        lanes = setting.lanes_over(group)
        over_gloo = backend_of(group, setting.device) == dist.Backend.GLOO
        wire, accumulate = self.wire, self.accumulate
        if wire is not None and wire.itemsize == 2 and (accumulate == "fp32" or (accumulate is None and over_gloo)):
            load_sum_kernels({tensor.device for tensor in setting.parameters}, wire)
            # Only over gloo on the CPU do nodes make a difference: Way::meet().
            in_pairs = over_gloo and setting.device.type == "cpu"
            nodes = nodes_of(group) if in_pairs else [0] * group.size()
            return _C.Way(codec, lanes, nodes=nodes)
        if setting.reads_pay and self._adds_alike(setting) and reads_beat_allreduces(group, setting.device):
            return _C.Way(codec, lanes, nodes=[0] * group.size())
        divides = setting.divide_in_collective and group is setting.process_group  # no other group was tried
        return _C.Way(codec, lanes, divides=divides)

    def _adds_alike(self, setting: Setting) -> bool:
        """Whether sums of our own have the bits of an allreduce of two ranks: for 16 bits they would be in fp32."""
        wires = {self.wire or tensor.dtype for tensor in setting.parameters}
        return all(torch.finfo(wire).bits >= 32 for wire in wires)


@dataclass(frozen=True)
class Noop(Exchange):
    """No communication: each rank keeps its own gradients."""

    def group(self, setting: Setting) -> None:
        """As :meth:`Exchange.group`."""

    def make(self, setting: Setting) -> _C.Way:
        """As :meth:`Exchange.make`."""
        if setting.corruption:
            setting.load_kernels()
        return _C.Way.nowhere()


# Torch's modules of hooks in which an optimizer steps.
_WITH_OPTIMIZERS = tuple(
    f"torch.distributed.algorithms.ddp_comm_hooks.{name}" for name in ("ddp_zero_hook", "optimizer_overlap_hooks")
)


@dataclass(frozen=True, eq=False)
class PythonHook(Exchange):
    """A hook written for torch's DDP, called for each bucket."""

    state: object
    hook: Callable[..., object]

    def group(self, setting: Setting) -> dist.ProcessGroup:
        """As :meth:`Exchange.group`; the ranks of the hook itself are not known."""
        return setting.process_group

    def make(self, setting: Setting) -> _C.Way:
        """As :meth:`Exchange.make`."""
        setting.load_kernels()
        name = name_of(self.hook)
        hook = _returning_futures(self.hook, name)
        held = (self.state, *getattr(self.state, "__dict__", {}).values())
        groups = [one for one in held if isinstance(one, dist.ProcessGroup)]  # over which it sends, as torch's hooks do
        way = _C.Way.by_hook(self.state, hook, name, setting.process_group, groups)
        way.steps_optimizers = getattr(self.hook, "__module__", None) in _WITH_OPTIMIZERS
        return way


def name_of(hook: Callable[..., object]) -> str:
    """The name of a hook in errors."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(hook, "__qualname__", type(hook).__qualname__)


def _returning_futures(hook: Callable[..., object], name: str) -> Callable[..., object]:
    """``hook`` with a check that the result is a future: torch would take None for one, and crash."""

    def call(state: object, bucket: dist.GradBucket) -> object:
        future = hook(state, bucket)
        if not isinstance(future, torch._C.Future):  # the type of collectives' futures; torch.futures.Future is one
            raise TypeError(
                f"The communication hook {name} returned an object of type {type(future).__qualname__} for bucket "
                f"{bucket.index()}, not a torch.futures.Future. Return a future that holds the bucket's gradients, for "
                "example dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])."
                + see("FD034")
            )
        return future

    return call


def check_wire(exchange: Exchange, setting: Setting) -> None:
    """Raise if ``exchange`` casts gradients to a dtype in which one of them cannot travel.

    Raises:
        ValueError: a gradient is complex, and the wire is bf16: torch has no complex numbers of that dtype.
    """
    if not isinstance(exchange, AllReduce) or exchange.wire is not torch.bfloat16:
        return
    for name, parameter in zip(setting.names, setting.parameters, strict=True):
        if parameter.is_complex():
            raise ValueError(
                f"The gradients of parameter {name} are complex, and cannot travel as bf16: torch has no complex "
                "numbers of that dtype. Use fp16, or 8 bits, or leave gradients as they are." + see("FD037")
            )
