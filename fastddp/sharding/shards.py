"""Parameters in flat memory, and this rank's part of them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._guards import CompileContext
from torch.utils.hooks import RemovableHandle

from fastddp import _C
from fastddp.errors import see
from fastddp.exchange.in_force import InForce
from fastddp.module.main_gradients import without_memory
from fastddp.planning.bucket_plan import Buckets
from fastddp.sharding.arriving import ModulesWithArriving
from fastddp.sharding.notice import ShardedGradient, zeroing

_16_BITS = (torch.float16, torch.bfloat16)


class Span(NamedTuple):
    """This rank's part of a parameter."""

    parameter: int  # its number in the model
    begin: int
    end: int  # elements in the order of the parameter's memory
    holder: Tensor
    """What the optimizer steps: a tensor of the parameter's shape if the part is all of it, else of one dimension."""
    place: int  # where it begins in the bucket's flat memory, in numbers
    like: Tensor  # a tensor without memory, with the holder's shape and strides
    bucket: int  # its number

    def __repr__(self) -> str:
        # Without ``like``, whose memory cannot be printed.
        return f"Span({self.begin} to {self.end} of parameter {self.parameter}, in bucket {self.bucket})"


@dataclass
class OneBucket:
    """One bucket's parameters."""

    flat: Tensor  # all parameters of the bucket, laid out like its gradients' wire, with zeros between them
    run: tuple[int, int]  # this rank's part of ``flat``
    main: Tensor | None
    """The run in fp32, where ``flat`` has fewer bits or travels in fewer; None: the optimizer steps ``flat`` itself."""
    wire: torch.dtype | None  # in which parameters travel; None: as they are
    spans: list[Span]
    travels: Tensor | None = None  # what is being gathered, if it is not ``flat``


class Shards:
    """The flat memory of a model's parameters for one plan. Parameters are views of it from now on.

    ``whole``: each rank has whole parameters, not an equal part of each bucket. ``wire``: fp32 parameters travel in
    this dtype; None: as they are. ``waits_in_step``: all ranks wait for parameters in ``step()``, and none later.
    """

    def __init__(self, now: InForce, *, whole: bool, wire: torch.dtype | None, waits_in_step: bool) -> None:
        setting = now.setting
        self.group = group = setting.sharding_group
        self.plan: Buckets = setting.plan
        self.names = setting.names
        self.whole = whole
        self.sharding = _C.Sharding(
            setting.parameters,
            setting.names,
            setting.plan,
            ranks=group.size(),
            rank=group.rank(),
            whole=whole,
            for_optimizer=True,
        )
        self._parameters = now.parameters.tensors
        self._reducer, self._module = now.reducer, now.module
        self.notices: dict[int, ShardedGradient] = {}
        self.buckets = [self._lay_out(number, bucket, wire) for number, bucket in enumerate(self.plan)]
        holders = {span.parameter: span.holder for span in self.spans()}
        for index in chain.from_iterable(self.plan):
            zero, dtype = zeroing(holders.get(index)), setting.parameters[index].dtype
            self.notices[index] = ShardedGradient.of(self._parameters[index], dtype, self.names[index], zero)
        weakref.finalize(self, _forget, self._parameters, self.notices).atexit = False
        self._memory = [parameter.data_ptr() for parameter in self._parameters]
        lanes = setting.lanes_over(group, with_reads=waits_in_step)
        self._gather = _C.Gather(lanes, self.sharding, now.reducer.interruption, now.number.agreed)
        self._numbers = {
            id(self._parameters[index]): number for number, bucket in enumerate(self.plan) for index in bucket
        }
        self._coming: set[int] = set()  # buckets; one that is here is taken out when all is done, so without the lock
        self._receives = threading.RLock()  # note [Who receives parameters]
        self._arriving: ModulesWithArriving | None = None
        self.is_compiled = False  # dynamo has read parameters
        self.incomplete: dict[int, int] = {}  # versions of parameters whose gather has failed
        self._hooks: list[RemovableHandle] = []  # of modules, while there are such parameters
        self.versions = [parameter._version for parameter in self._parameters]

    def _lay_out(self, number: int, bucket: Sequence[int], wire: torch.dtype | None) -> OneBucket:
        parameters = [self._parameters[index] for index in bucket]
        places = self.sharding.places(number)
        dtype = parameters[0].detach().real.dtype  # pairs of numbers, for complex ones
        like = parameters[0].detach().new_empty(0, dtype=dtype)
        flat = _C.empty_in_huge_pages(self.sharding.length(number), like).zero_()
        with torch.no_grad():
            for parameter, place in zip(parameters, places, strict=True):
                view = _C.view_of(flat, parameter, place)
                view.copy_(parameter)
                parameter.data = view
        begin, end = self.sharding.run(number)
        wire = wire if dtype == torch.float32 else None
        main = flat[begin:end].to(torch.float32, copy=True) if dtype in _16_BITS or wire is not None else None
        spans = list(self._spans(number, flat, 0) if main is None else self._spans(number, main, begin))
        return OneBucket(flat, (begin, end), main, wire, spans)

    def _spans(self, number: int, memory: Tensor, first: int) -> Iterator[Span]:
        """``memory`` is the bucket's, from element ``first`` on."""
        for index, begin, end, place in self.sharding.spans(number):
            if begin == end:
                continue
            parameter = self._parameters[index]
            is_whole = end - begin == parameter.numel()
            like = parameter if is_whole else parameter.detach().new_empty(0).resize_(end - begin)
            view = _C.view_of(memory, like, place - first)
            holder = nn.Parameter(view.detach())
            yield Span(index, begin, end, holder, place, without_memory(holder, holder.dtype), number)

    def of_gradients(self) -> list[_C.Shard]:
        """By bucket: where the reducer writes gradients, to the spans' holders."""
        empty = torch.empty(0)
        holders = [[span.holder for span in bucket.spans] or [empty] for bucket in self.buckets]
        notices = [self.notices.get(index, empty) for index in range(len(self._parameters))]
        return self.sharding.shards(holders, notices)

    def spans(self) -> Iterator[Span]:
        """This rank's, of all buckets."""
        for bucket in self.buckets:
            yield from bucket.spans

    def release(self) -> None:
        """Parameters are elsewhere: give back their memory here, but not copies in fp32, which are state."""
        self._remove_hooks()
        for bucket in self.buckets:
            bucket.flat = without_memory(bucket.flat, bucket.flat.dtype)
            if bucket.main is None:
                for span in bucket.spans:
                    span.holder.data = span.like

    def main_of(self, span: Span) -> Tensor | None:
        """The copy of ``span`` in fp32; None: there is none."""
        return None if self.buckets[span.bucket].main is None else span.holder.detach()

    def gather_now(self, number: int, dtype: torch.dtype, of_span: Callable[[Span], Tensor | None]) -> Tensor:
        """A tensor laid out like bucket ``number``, with what each rank has for its spans, and zeros. A collective."""
        bucket = self.buckets[number]
        flat = torch.zeros(bucket.flat.numel(), dtype=dtype, device=bucket.flat.device)
        for span in bucket.spans:
            if (part := of_span(span)) is not None:
                _C.view_of(flat, span.like, span.place).copy_(part)
        self._send(number, flat)
        self._reducer.await_parameters(self._gather, number)
        return flat

    def _send(self, number: int, flat: Tensor) -> None:
        if flat.numel():  # gloo cannot gather nothing
            self._reducer.send_parameters(self._gather, number, flat)

    # ------------------------------------------------------------------------------------------------------- a step

    @torch.no_grad()
    def begin_step(self) -> None:
        """Before the optimizer steps: copies in fp32 follow what others have written to parameters."""
        self.wait()
        self._check_memory()
        for span in self.spans():
            bucket, version = self.buckets[span.bucket], self._parameters[span.parameter]._version
            if bucket.main is None or version == self.versions[span.parameter]:
                continue
            values = _C.view_of(bucket.flat, span.like, span.place)
            is_rounded = span.holder.to(bucket.wire or bucket.flat.dtype) == values
            span.holder.copy_(torch.where(is_rounded, span.holder, values))
            self.versions[span.parameter] = version

    def compare_mains(self) -> None:
        """Let the next step take parameters for those copies in fp32 that do not round to them."""
        self.versions = [-1] * len(self._parameters)

    def _check_memory(self) -> None:
        """Parameters are still views of the buckets' memory, which is what steps change."""
        for index in chain.from_iterable(self.plan):
            if self._parameters[index].data_ptr() != self._memory[index]:
                raise RuntimeError(
                    f"Parameter {self.names[index]} has other memory than its ShardedOptimizer has given it, so "
                    "steps would not change it: .data was assigned, or the module converted. Convert the module before "
                    "it is wrapped, and write values by parameter.copy_()." + see("FD042")
                )

    def start_gather(self, number: int) -> None:
        """The rank's part of bucket ``number`` has been stepped: send it to all, and receive theirs."""
        bucket = self.buckets[number]
        own = slice(*bucket.run)
        if bucket.wire is not None:
            bucket.travels = torch.empty_like(bucket.flat, dtype=bucket.wire)
        travels = bucket.flat if bucket.travels is None else bucket.travels
        if bucket.main is not None:
            travels[own].copy_(bucket.main)
        with self._noting_failure(number):
            self._send(number, travels)
        self._coming.add(number)

    # Note [Who receives parameters]
    # A forward, and whoever saves or averages parameters, may read them in several threads. The first one receives a
    # bucket: it waits, copies and raises versions. Then the bucket leaves `_coming`, and the others see it here, or
    # failed. Modules' dictionaries change under the same lock: a late reader must not end what the next step begins.

    @torch.no_grad()
    def wait_for(self, number: int) -> None:
        """Until bucket ``number`` is here; RuntimeError: its gather fails, or has failed in another thread.

        On a device only the current stream waits.
        """
        if number in self._coming:
            with self._receives:
                if number in self._coming:
                    self._receive(number)
        self.check(self.plan[number])

    def _receive(self, number: int) -> None:
        try:
            with self._noting_failure(number):
                self._reducer.await_parameters(self._gather, number)
                if number not in self._coming:  # it has been given up
                    return
                bucket = self.buckets[number]
                if bucket.travels is not None:
                    bucket.flat.copy_(bucket.travels)
                    bucket.travels = None
                parameters = [self._parameters[index] for index in self.plan[number]]
                torch.autograd.graph.increment_version(parameters)
                for index, parameter in zip(self.plan[number], parameters, strict=True):
                    self.versions[index] = parameter._version
        finally:
            self._coming.discard(number)

    def wait(self) -> None:
        """Until all parameters are here, or have failed; RuntimeError: their gather fails, or has failed."""
        with self._receives, ExitStack() as last_first:  # each, also if another one raises
            last_first.callback(self._end, unless=self.incomplete)
            for number in sorted(self._coming):
                last_first.callback(self.wait_for, number)
        self.check()

    def _end(self, unless: object = None) -> None:
        if self._arriving is not None and not unless:
            self._arriving.end()
            self._arriving = None

    @contextmanager
    def _noting_failure(self, number: int) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.lack({index: self._parameters[index]._version for index in self.plan[number]})
            raise

    def lack(self, versions: Mapping[int, int]) -> None:
        """Parameters with these numbers will not come, and are incomplete while they have these versions."""
        self.incomplete |= versions
        if versions and not self._hooks:
            modules = [*self._module.modules()]
            self._hooks = [one.register_state_dict_pre_hook(lambda *_: self.check()) for one in modules]
            self._hooks += [one.register_load_state_dict_pre_hook(self._before_load) for one in modules]

    def _before_load(self, *_: object) -> None:
        """Who loads parameters in place of incomplete ones has to read them."""
        with suppress(RuntimeError):
            self.wait()
        self._end()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def give_up(self) -> None:
        """Wait for no parameters any more. Those that have not come are incomplete."""
        coming = [*self._coming]  # without the lock: a thread that has it may wait for ranks that are gone
        self._coming.clear()
        self.lack({index: self._parameters[index]._version for number in coming for index in self.plan[number]})
        self._end()

    def check(self, indices: Sequence[int] | None = None) -> None:
        """Raise RuntimeError if a gather of parameters has failed, and nobody has written to them since.

        ``indices``: of these parameters; None: of all.
        """
        if not self.incomplete:
            return
        with self._receives:
            for index in self.incomplete if indices is None else self.incomplete.keys() & set(indices):
                if self._parameters[index]._version == self.incomplete[index]:
                    raise RuntimeError(
                        f"fastddp: parameter {self.names[index]} is incomplete: after the optimizer's last step this "
                        "rank did not get what other ranks had stepped. Start again from the last checkpoint."
                        + see("FD044")
                    )
            if indices is None:
                self.incomplete.clear()
                self._remove_hooks()

    def wait_where_read(self) -> None:
        """Let parameters arrive. Who reads one through the model's module or a module in it waits for its bucket.

        Buckets of parameters that may be read in another way are here when this returns: of a compiled model, all.
        """
        if self.is_compiled:  # its graphs ask for dictionaries of the same type
            self.wait()
            return
        with self._receives:
            self._end()
            self._arriving = arriving = ModulesWithArriving(self._module, self._numbers)
            if self._coming:
                arriving.begin(self._wait_for_parameter)
            else:  # modules do not hold this object
                arriving.begin(_weakly(self))
                weakref.finalize(self, arriving.end).atexit = False
        for number in sorted(arriving.unseen, reverse=True):
            self.wait_for(number)

    @torch._disable_dynamo
    def _wait_for_parameter(self, parameter: Tensor) -> None:
        if CompileContext.try_get() is not None:
            self.is_compiled = True
            self.wait()
        if (number := self._numbers.get(id(parameter))) is None:
            return
        is_coming = number in self._coming
        self.wait_for(number)
        if is_coming and not self._coming:
            self.wait()


def _weakly(shards: Shards) -> Callable[[Tensor], None]:
    this = weakref.ref(shards)

    def wait(parameter: Tensor) -> None:
        if (shards := this()) is not None:
            shards._wait_for_parameter(parameter)

    return wait


def _forget(parameters: Sequence[Tensor], notices: Mapping[int, Tensor]) -> None:
    """Gradients go with the optimizer that has them."""
    for index, notice in notices.items():
        if parameters[index].grad is notice:
            parameters[index].grad = None
