"""Gradients as numbers of 8 bits, with a scale for each block: settings, memory, and the exchange that uses them.

Ranks send each other shards of bytes, add them up in fp32 and send the sum as bytes again. So a value is rounded twice,
however many ranks there are. Rounding errors are added to the next gradient (error feedback: Seide et al., 2014,
https://www.microsoft.com/en-us/research/publication/1-bit-stochastic-gradient-descent; Karimireddy et al., 2019,
https://arxiv.org/abs/1901.09847). The floating-point formats are those of ``torch.float8_e4m3fn`` and
``torch.float8_e5m2`` (Micikevicius et al., 2022, https://arxiv.org/abs/2209.05433).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fastddp import _C
from fastddp.compression.saved_state import (
    SavedState,
    Shapes,
    check_model,
    check_name,
    check_tensor,
    refuse,
    warn_of_ranks,
)
from fastddp.errors import see
from fastddp.exchange.descriptions import Exchange, Pipelined, Setting, Spans
from fastddp.exchange.of_model import OfModel
from fastddp.kernel_loading.launching import load_block8_kernels
from fastddp.ranks.agreement import difference, gather_numbers

logger = logging.getLogger("fastddp.block8")

Number = Literal["int8", "e4m3", "e5m2"]


class _Error(NamedTuple):
    """The rounding errors of a span of a parameter, in the order of its memory."""

    begin: int
    end: int
    values: Tensor  # two for a complex element


FORMAT = 1
_KIND = "BlockState"
_NUMBERS = ("int8", "e4m3", "e5m2")
_SETTINGS = ("block_size", "error_feedback", "stochastic_rounding", "random_seed")


class BlockState:
    """Settings and memory of ``int8_compress_hook`` and ``fp8_compress_hook``.

    Args:
        process_group: the ranks to average over; None: those of the model.
        block_size: elements that share a scale, 128 or 256. A scale is an fp32 number, so 3 or 1.6 % more bytes travel.
        fp8: the format of ``fp8_compress_hook``: "e4m3" has 3 bits of mantissa; "e5m2" has 2, and a wider range.
        error_feedback: remember rounding errors, and add them to the next gradient. Takes 8 bytes an element.
        stochastic_rounding: round up or down by chance, so that the mean of many roundings is the number itself.
            Otherwise round to the nearest number of the format.
        random_seed: of stochastic rounding. With the same seed, a rerun trains in the same way.

    Raises:
        ValueError: it names a setting that is out of its range.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        block_size: int = 256,
        fp8: Literal["e4m3", "e5m2"] = "e4m3",
        error_feedback: bool = True,
        stochastic_rounding: bool = False,
        random_seed: int = 0,
    ) -> None:
        if block_size not in (128, 256):
            raise ValueError(f"block_size must be 128 or 256, got {block_size!r}." + see("FD024"))
        if fp8 not in ("e4m3", "e5m2"):
            raise ValueError(f'fp8 must be "e4m3" or "e5m2", got {fp8!r}.' + see("FD024"))
        if isinstance(random_seed, bool) or not isinstance(random_seed, int) or not 0 <= random_seed < 2**53:
            raise ValueError(f"random_seed must be an integer, 0 to 2**53 - 1, got {random_seed!r}." + see("FD024"))
        self.process_group = process_group
        self.block_size = block_size
        self.fp8 = fp8
        self.error_feedback = bool(error_feedback)
        self.stochastic_rounding = bool(stochastic_rounding)
        self.random_seed = random_seed
        self._windows: Callable[[], int] | None = None
        self._seen = 0
        self._iter = 0
        self.was_loaded = False  # whether it has been loaded since an exchange was made of it
        self._model: Shapes = {}  # names and shapes of the model's parameters
        self._complex: set[str] = set()  # names of the complex parameters
        self._spans: Spans = {}  # what this rank exchanges
        self._errors = _C.Block8Errors()

    @property
    def iter(self) -> int:
        """Synchronisations up to now. The draws of stochastic rounding depend on this number."""
        if self._windows is not None:
            windows = self._windows()
            self._iter += windows - self._seen
            self._seen = windows
        return self._iter

    @property
    def errors(self) -> dict[str, Tensor]:
        """This rank's rounding errors by parameter name: fp32, [elements] in the order of the parameter's memory.

        In two levels they are of the :attr:`spans` that this rank exchanges. They are in units of the average. The
        tensors are the ones in use; there are none before the first step.
        """
        known = zip(self._model, self._errors.of_parameters, strict=False)
        return {name: error for name, error in known if error is not None}

    @property
    def spans(self) -> dict[str, tuple[int, int]]:
        """In two levels: first element and end of each of :attr:`errors` that is not of its whole parameter."""
        names, whole, errors = list(self._model), self._whole(), self.errors
        partial = {names[number]: span for number, span in self._spans.items() if span != whole[number]}
        return {name: span for name, span in partial.items() if name in errors}

    # -------------------------------------------------------------------------------------------------- whose it is

    def belong_to(self, of_model: OfModel) -> None:
        """Use the state for this model, and count its synchronisations; ValueError: it belongs to another one."""
        names, parameters, windows = of_model.setting().names, of_model.setting().parameters, of_model.windows
        model = {name: tuple(parameter.shape) for name, parameter in zip(names, parameters, strict=True)}
        check_model(self, self._model, model)
        iterations = self.iter  # counted with the model before
        self._model = model
        self._complex = {name for name, parameter in zip(names, parameters, strict=True) if parameter.is_complex()}
        if not self._spans:
            self._spans = self._whole()
        self._iter, self._windows, self._seen = iterations, windows, windows()

    def exchange_spans(self, spans: Spans | None) -> None:
        """Say which spans of parameters this rank exchanges; None: whole parameters.

        Errors stay with their elements. Elements that another rank of the node exchanged before begin without errors.
        What exchanges them now is not disturbed: it has the object of before.
        """
        wanted = self._whole() if spans is None else spans
        errors = self._errors.copy()
        if wanted != self._spans:
            own = enumerate(self._errors.of_parameters)
            known = {number: _Error(*self._spans[number], error) for number, error in own if error is not None}
            self._spans = wanted
            errors.of_parameters = [
                self._of_span(number, name, known.get(number)) for number, name in enumerate(self._model)
            ]
        self._errors = errors

    def _whole(self) -> Spans:
        return {number: (0, math.prod(shape)) for number, shape in enumerate(self._model.values())}

    def _numbers(self, name: str) -> int:
        """Of each element of the parameter's gradient: two of a complex one."""
        return 2 if name in self._complex else 1

    def _of_span(self, number: int, name: str, known: _Error | None) -> Tensor | None:
        """The error of the span that this rank exchanges, taken from the error of any span; None: none is known."""
        if known is None or number not in self._spans:
            return None
        each, span = self._numbers(name), self._spans[number]
        begin, end = max(known.begin, span[0]), min(known.end, span[1])
        if begin >= end:
            return None
        found = known.values.new_zeros((span[1] - span[0]) * each)
        found[(begin - span[0]) * each : (end - span[0]) * each] = known.values[
            (begin - known.begin) * each : (end - known.begin) * each
        ]
        return found

    # ------------------------------------------------------------------------------------------- in another group

    settings: ClassVar[list[str]] = []
    """What all ranks must have alike: nothing, since the newest rank hands its settings out."""

    def hand_out(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What all ranks of another group take from the newest one: settings and ``iter``."""
        return {name: getattr(self, name) for name in ("iter", *_SETTINGS)}, {}

    def take_over(self, numbers: dict[str, Any], tensors: dict[str, Tensor], *, is_new: bool) -> None:
        """Go on with what another rank has handed out; ``is_new``: this rank was not there before, so has no errors."""
        if self._windows is not None:
            self._seen = self._windows()
        self._iter = numbers.pop("iter")
        for name, value in numbers.items():
            setattr(self, name, value)
        for error in self._errors.of_parameters if is_new else ():
            if error is not None:
                error.zero_()

    # ---------------------------------------------------------------------------------------------- in checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return everything that training needs to go on, as tensors, numbers and names.

        Errors are stored under this rank's number, so that DCP keeps those of all ranks. With torch.save each rank
        writes a file of its own. The tensors are the ones in use, not copies. Where there are none yet, zeros are made,
        so that DCP has tensors to load into.
        """
        if self.error_feedback:
            self._make_errors()
        group = self._group()
        return {
            "format": FORMAT,
            "iter": self.iter,
            "world_size": group.size(),
            "shapes": {name: list(shape) for name, shape in self._model.items()},
            "errors": {f"rank {group.rank()}": self.errors},
            "spans": {f"rank {group.rank()}": {name: list(span) for name, span in self.spans.items()}},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a :meth:`state_dict`, of any rank, under any buckets.

        A rank that finds errors under its own number takes them. Other ranks begin with none, so their last rounding
        errors are lost once. Errors fit any format and block size.

        Args:
            state: what it returned.

        Raises:
            ValueError: the state is of another model or an unknown format; or it names a part that is missing, of
                another type, dtype or shape, or a number out of its range. Nothing has been changed.
        """
        group = self._group()
        saved = SavedState(_KIND, state, FORMAT)
        iterations, world_size = saved.count("iter"), saved.count("world_size", least=1)
        shapes = saved.shapes(self._model)
        errors = saved.of_rank("errors", group.rank())
        spans = saved.of_rank("spans", group.rank()) or {}
        loaded = {name: self._checked(name, error, spans.get(name), shapes) for name, error in (errors or {}).items()}
        if self.error_feedback and (world_size != group.size() or errors is None):
            warn_of_ranks("Errors of 8-bit gradients", world_size, group, errors is not None)
        self._model = shapes
        if not self._spans:
            self._spans = self._whole()
        self._iter = iterations
        if self._windows is not None:
            self._seen = self._windows()
        self._take(loaded)
        self.was_loaded = True

    def _checked(self, name: str, error: object, span: object, shapes: Shapes) -> _Error:
        """A saved error, of the whole parameter if ``span`` is None; ValueError if it cannot be one."""
        what = f"the error of {name!r}"
        check_name(_KIND, name, what, shapes)
        tensor = check_tensor(_KIND, error, what, (torch.float32,))
        elements = math.prod(shapes[name])
        bounds = [0, elements] if span is None else span
        if not (isinstance(bounds, list) and [type(bound) for bound in bounds] == [int, int]):
            raise refuse(_KIND, f"the span of {what}", "a list of two numbers", repr(span))
        begin, end = bounds
        if not 0 <= begin <= end <= elements:
            raise refuse(_KIND, f"the span of {what}", f"within [0:{elements}]", "beyond it")
        possible = [(end - begin) * self._numbers(name)]
        if not self._complex and not self._windows:  # the model is not known yet, and the parameter may be complex
            possible.append(2 * (end - begin))
        if tensor.dim() != 1 or tensor.numel() not in possible:
            wanted = " or ".join(f"of shape [{count}]" for count in possible)
            raise refuse(_KIND, what, wanted, f"of shape {list(tensor.shape)}")
        return _Error(begin, end, tensor)

    def _take(self, loaded: Mapping[str, _Error]) -> None:
        known = self._all_errors()
        for number, name in enumerate(self._model):
            error, new = known[number], self._of_span(number, name, loaded.get(name))
            if error is not None:
                error.zero_() if new is None else error.copy_(new)
            elif new is not None:
                known[number] = new
        self._errors.of_parameters = known

    def _all_errors(self) -> list[Tensor | None]:
        """The error of each parameter, or None."""
        known = self._errors.of_parameters
        return [*known, *[None] * (len(self._model) - len(known))]

    def _make_errors(self) -> None:
        known = self._all_errors()
        for number, name in enumerate(self._model):
            if known[number] is None and number in self._spans:
                begin, end = self._spans[number]
                known[number] = torch.zeros((end - begin) * self._numbers(name))
        self._errors.of_parameters = known

    def __getstate__(self) -> dict[str, Any]:
        logger.warning("A BlockState is saved without its process group.")
        errors = [None if error is None else error.clone() for error in self._errors.of_parameters]
        changed = {"process_group": None, "_windows": None, "_iter": self.iter, "_seen": 0, "_errors": errors}
        return self.__dict__ | changed

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._errors = _C.Block8Errors()
        self._errors.of_parameters = state["_errors"]
        self.process_group = dist.distributed_c10d._get_default_group()
        logger.warning("A loaded BlockState uses the default process group; set process_group for another one.")

    def _group(self) -> dist.ProcessGroup:
        return self.process_group or dist.distributed_c10d._get_default_group()


@dataclass(frozen=True, eq=False)
class Block8(Pipelined):
    """The exchange. Each registered hook has one object, which is equal only to itself."""

    state: BlockState
    number: Number

    def group(self, setting: Setting) -> dist.ProcessGroup:
        """As :meth:`fastddp.exchange.descriptions.Exchange.group`."""
        return setting.group_for(self.state.process_group)

    def make(self, setting: Setting) -> _C.Way:
        """As :meth:`fastddp.exchange.descriptions.Exchange.make`."""
        state, group = self.state, self.group(setting)
        if setting.corruption:
            setting.load_kernels()
        wanted = {(tensor.device, tensor.dtype) for tensor in setting.parameters}
        load_block8_kernels(wanted, self.number, state.block_size, state.stochastic_rounding)
        state.exchange_spans(setting.spans)
        codec = _C.Codec.block8(
            self.number,
            state.block_size,
            state._errors if state.error_feedback else None,
            seed=state.random_seed if state.stochastic_rounding else None,
            first_window=state.iter,
            rank=group.rank(),
        )
        state.was_loaded = False
        # All ranks exchange with all, as on one node: a sum inside each node first would round once more.
        return _C.Way(codec, setting.lanes_over(group), nodes=[0] * group.size())


class Block8Schedule:
    """One exchange for all windows. Before the first window ranks compare their settings."""

    def __init__(self, exchange: Block8, setting: Callable[[], Setting]) -> None:
        self._exchange = exchange
        self.state = exchange.state
        self._setting = setting
        self._calls = 0

    def __call__(self, window: int) -> Exchange:
        """Return the exchange of window number ``window``; RuntimeError: ranks have different settings."""
        # The first call registers the hook, which is no collective.
        self._calls += 1
        if self._calls == 2:
            self._compare()
        if self._exchange.state.was_loaded:
            self._exchange = Block8(self._exchange.state, self._exchange.number)  # goes on from the loaded iter
        return self._exchange

    def _compare(self) -> None:
        state, setting = self._exchange.state, self._setting()
        told = [_NUMBERS.index(self._exchange.number), *(float(getattr(state, name)) for name in _SETTINGS)]
        by_rank = gather_numbers(told, self._exchange.group(setting), setting.device)
        found = difference(["number", *_SETTINGS], by_rank)
        if found is not None:
            raise RuntimeError(
                f"Ranks compress gradients in different ways: {found} (numbers are {', '.join(_NUMBERS)}). Register "
                "the same hook on all ranks, with the same arguments of BlockState." + see("FD004")
            )
