"""The settings of ``auto_hook``, and the memory of its exchanges."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastddp.compression.choice import PLAIN, allowed, error_of, vectors_of
from fastddp.errors import see
from fastddp.exchange.block8 import Block8, BlockState
from fastddp.exchange.descriptions import AllReduce, Pipelined, Setting
from fastddp.exchange.per_bucket import PerBucket
from fastddp.exchange.power_sgd import PowerSGD, PowerSGDState
from fastddp.exchange.power_sgd_loading import checked
from fastddp.exchange.saved_state import SavedState

FORMAT = 1
_KIND = "AutoState"
CANDIDATES = (PLAIN, "bf16", "int8", "fp8", "powersgd4")


class AutoState:
    """Settings and memory of :func:`fastddp.comm_hooks.auto_hook`.

    Args:
        process_group: the ranks to average over; None: those of the model.
        error_budget: by how much one rounding may change a value, as a part of the largest magnitude beside it (in the
            block of 256 values, or in 16 bits the value itself). "plain" needs 0, "bf16" 1/256, "int8" 1/254, "fp8"
            1/28. Rounding errors of 8 bits are added to the next gradient. PowerSGD has no such bound, and needs a
            budget of 1 or more.
        candidates: the names that may be chosen: "plain", "bf16", "int8", "fp8" (e4m3) and "powersgdN" of rank N, 1 to
            32. Plain is always a candidate.

    Raises:
        ValueError: it names a setting that is out of its range.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        error_budget: float = 0.01,
        candidates: Sequence[str] = CANDIDATES,
    ) -> None:
        is_number = isinstance(error_budget, (int, float)) and not isinstance(error_budget, bool)
        if not is_number or not 0 <= error_budget < math.inf:
            raise ValueError(f"error_budget must be a finite number >= 0, got {error_budget!r}." + see("FD024"))
        if isinstance(candidates, str) or not all(isinstance(name, str) for name in candidates):
            raise ValueError(f"candidates must be a sequence of names, got {candidates!r}." + see("FD024"))
        for name in candidates:
            error_of(name)
        self.process_group = process_group
        self.error_budget = float(error_budget)
        self.candidates = tuple(candidates)
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._blocks = BlockState(self.process_group)
        self._power_sgd = {
            name: PowerSGDState(self.process_group, vectors, start_powerSGD_iter=2)
            for name in self.candidates
            if (vectors := vectors_of(name)) is not None
        }
        self._belong: tuple[Sequence[str], Sequence[Tensor], Callable[[], int]] | None = None

    # ------------------------------------------------------------------------------------------------- for the schedule

    def belong_to(self, names: Sequence[str], parameters: Sequence[Tensor], windows: Callable[[], int]) -> None:
        """Use the state for these parameters. ``windows`` counts the model's synchronisations.

        Raises:
            ValueError: the state belongs to another model.
        """
        self._blocks.belong_to(names, parameters, windows)
        for power_sgd in self._power_sgd.values():
            power_sgd.belong_to(names, parameters)
        self._belong = (names, parameters, windows)

    def follow(self, by_parameter: Mapping[str, str], per_bucket: PerBucket, setting: Callable[[], Setting]) -> None:
        """Use ``per_bucket`` from the next window on, and drop the memory of gradients that it does not compress.

        Args:
            by_parameter: the candidate of each parameter.
            per_bucket: the exchange.
            setting: returns the model's setting.
        """
        assert self._belong is not None
        eight_bits = {name for name, candidate in by_parameter.items() if candidate in ("int8", "fp8")}
        self._blocks.forget(by_parameter.keys() - eight_bits)
        for candidate, power_sgd in self._power_sgd.items():
            for memory in (power_sgd.errors, power_sgd.qs):
                for name in [name for name in memory if by_parameter.get(name) != candidate]:
                    del memory[name]
        for number, exchange in enumerate(per_bucket.exchanges):
            if isinstance(exchange, PowerSGD):
                _follow(exchange, number, per_bucket, self._belong[2], setting)

    def forget(self) -> None:
        """Drop all memory, when compression ends."""
        belong = self._belong
        self._begin_anew()
        if belong is not None:
            self.belong_to(*belong)

    def numbers(self) -> dict[str, float]:
        """The numbers that must be the same on all ranks, by name."""
        wanted = allowed(self.candidates, self.error_budget)
        told = {"error_budget": self.error_budget, "iter": float(self._blocks.iter)}
        told |= {name: float(name in wanted) for name in ("bf16", "int8", "fp8")}
        vectors = [vectors_of(name) or 0 for name in wanted]
        told |= {"powersgd": float(sum(2**number for number in vectors if number))}
        return told | {"powersgd's iter": float(sum(power_sgd.iter for power_sgd in self._power_sgd.values()))}

    # ---------------------------------------------------------------------------------------------- in checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return what training needs to go on: the errors of compressed gradients, as tensors, numbers and names.

        Errors are stored under this rank's number. The plan is not saved: machines and network may change, and are
        measured again. Before the plan is made there are no errors, so DCP has no tensors to load into: load what
        torch.save has written on each rank.
        """
        return {
            "format": FORMAT,
            "blocks": self._blocks.saved(),
            "power_sgd": {name: power_sgd.state_dict() for name, power_sgd in self._power_sgd.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a :meth:`state_dict`, of any rank, under any buckets. All ranks load, between the same two steps.

        Errors wait until the plan is made, which takes some steps. Errors of gradients that the plan does not
        compress in the same way are then dropped.

        Args:
            state: what it returned.

        Raises:
            ValueError: the state is of another model, of other candidates or an unknown format; or it names a part that
                is missing, of another type, dtype or shape, or a number out of its range. Nothing has been changed.
        """
        saved = SavedState(_KIND, state, FORMAT)
        blocks = saved.mapping(saved.part("blocks"), "blocks")
        power_sgd = saved.mapping(saved.part("power_sgd"), "power_sgd")
        unknown = power_sgd.keys() - self._power_sgd.keys()
        if unknown:
            wanted = f"of the candidates {', '.join(self.candidates)}"
            raise saved.refuse("power_sgd", wanted, ", ".join(sorted(unknown)))
        for name, part in power_sgd.items():
            own = self._power_sgd[name]
            checked(part, own.matrix_approximation_rank, own._model, own._dtypes, own._group().rank())
        self._blocks.load_state_dict(blocks)
        for name, part in power_sgd.items():
            self._power_sgd[name].load_state_dict(part)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"process_group": None, "_belong": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.process_group = dist.distributed_c10d._get_default_group()


def exchange_of(state: AutoState, candidate: str) -> Pipelined:
    """The exchange of a candidate, with the memory in ``state``."""
    return _exchange(candidate, state.process_group, state._blocks, state._power_sgd.get(candidate))


def exchange_to_try(state: AutoState, candidate: str) -> Pipelined:
    """The exchange of a candidate, for trials, with a memory of its own."""
    group, vectors = state.process_group, vectors_of(candidate)
    power_sgd = None if vectors is None else PowerSGDState(group, vectors, start_powerSGD_iter=2)
    return _exchange(candidate, group, BlockState(group), power_sgd)


def _exchange(
    candidate: str, group: dist.ProcessGroup | None, blocks: BlockState, power_sgd: PowerSGDState | None
) -> Pipelined:
    if power_sgd is not None:
        return PowerSGD(power_sgd, False, None)
    if candidate in ("int8", "fp8"):
        return Block8(blocks, "int8" if candidate == "int8" else "e4m3")
    return AllReduce(group, None if candidate == PLAIN else torch.bfloat16)


def _follow(
    exchange: PowerSGD,
    number: int,
    per_bucket: PerBucket,
    windows: Callable[[], int],
    setting: Callable[[], Setting],
) -> None:
    def own() -> Setting:
        return per_bucket.setting_of(number, setting())

    exchange.state.follow(windows, lambda: exchange.elements(own()), lambda: exchange.allocate(own()))
