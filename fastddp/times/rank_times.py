"""Which rank keeps the others waiting, and in which phase, by the own times of all ranks in several samples.

Note [Own times]

All ranks leave a step at the same moment. So the whole step, waits included, lasts as long on quick ranks as on slow
ones. Ranks differ in their *own* time, without waits: outside of the model, in forward, backward, hook and optimizer. A
rank is late by its own time minus the median of all ranks (of two medians the lower one, so that two ranks are compared
with the quicker one). A phase in which it is quicker makes up for another if it is fastddp's or the model's. It does
not if it is the user's code: there the other ranks may have waited for this rank, in a collective of the user's own.

The time for which the exchange is exposed, or parameters are waited for, is no rank's own. A rank that comes late finds
the others there and sees the network's time alone; the others see the network's time and their wait. So the least of
all ranks is the network's time. Only durations are compared, because clocks of machines differ.

Note [Verdicts]

A rank is *slow* if it was late in each of the last twelve samples, by at least 5 % of the step and 1 ms. Its typical
lateness (the median) must also be four times its noise, and four times the mean rank's noise. Noise is the mean
distance of the samples from their median, without the largest distance. So a single pause is no verdict, nor are ranks
that are late by turns. Where all own times were noise as large as a quarter of the step, one sample in 20,000 made a
verdict. A verdict ends when the typical lateness falls below half of the least that makes one. If no rank is slow and
the network has taken 10 % of each of the last twelve steps, the verdict is the network.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PHASES = ("outside", "forward", "loss", "backward", "hook", "optimizer")
_OF_THE_USER = torch.tensor([phase in ("outside", "loss", "hook") for phase in PHASES])
_IN_WORDS = {
    "outside": "outside of its steps (data loading or other code of yours)",
    "forward": "in forward",
    "loss": "between forward and backward",
    "backward": "in backward",
    "hook": "in its communication hook",
    "optimizer": "in the optimizer",
}

SAMPLES = 12  # that a verdict takes
_LEAST_MS = 1.0
_LEAST_SHARE, _LEAST_OF_NETWORK = 0.05, 0.1  # of the step
_TIMES_NOISE = 4

# A row: the number of the sampled window; in ms, its step, the exposed part of its exchange, and the own times.
_WINDOW, _STEP, _EXPOSED, _OWN = range(4)
COLUMNS = _OWN + len(PHASES)


def row(window: int, step: float, exposed: float, own: Mapping[str, float]) -> list[float]:
    """A rank's message to the others about a step; a rank without times sends NaN."""
    return [window, step, exposed, *(own[phase] for phase in PHASES)]


@dataclass(frozen=True)
class RankTimes:
    """A rank's own times in one step, in ms; NaN where it has none, out of inputs or not yet so far."""

    rank: int
    """Within the model's process group."""
    outside: float
    """Data loading, logging, evaluation: all that is none of the following."""
    forward: float
    """In the module."""
    loss: float
    """Between a forward and its backward."""
    backward: float
    """To its last gradient."""
    hook: float
    """In a communication hook in Python."""
    optimizer: float
    """In the optimizer's step."""
    exposed: float
    """By the exchange, and by waits for parameters: the least of all ranks is the network's time, the rest is this
    rank's wait."""
    late: float
    """By how much it comes later than the median rank; below 0: earlier."""


@dataclass(frozen=True)
class Delay:
    """A verdict that holds: what makes every step longer. str() is a sentence."""

    rank: int | None
    """The slow rank, within the model's process group; None: the network is slow."""
    cause: str
    """The phase in which the rank loses most, a name of :class:`RankTimes`; or "network"."""
    ms: float
    """How late the rank is, or how long the network takes. This and the next two are medians over the last samples."""
    in_cause: float
    """The part of ``ms`` that is lost in that phase."""
    share: float
    """The part of the step that it would save, at most, if this rank came as early as those that are not slow."""
    since: int
    """Number, from 1, of the step that was the verdict's first sample."""

    def __str__(self) -> str:
        share = f"{100 * self.share:.0f} % of every step"
        if self.rank is None:
            return f"no rank is slow: {_short(self.ms)} ms, {share}, go to the network, since step {self.since}"
        where = _IN_WORDS[self.cause]
        if self.in_cause < 0.8 * self.ms:
            where = f"({_short(self.in_cause)} of them {where})"
        return f"rank {self.rank} comes {_short(self.ms)} ms late {where}, since step {self.since}; costs {share}"

    def over(self, step: int) -> str:
        """A sentence that says that the verdict is over.

        Args:
            step: when that was seen.
        """
        if self.rank is None:
            return f"the network takes less again, at step {step}: it was slow since step {self.since}"
        return (
            f"rank {self.rank} comes in time again, at step {step}: it was late {_IN_WORDS[self.cause]} since step "
            f"{self.since}"
        )


def _short(ms: float) -> str:
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"


@dataclass(frozen=True)
class _Sample:
    """One step. All numbers of a rank that did not sample it are NaN."""

    window: int
    step: float
    network: float
    own: Tensor  # [ranks, phases]
    exposed: Tensor  # [ranks]

    @classmethod
    def of(cls, rows: Tensor) -> _Sample | None:
        """The sample in these rows; None: fewer than two ranks sampled the step."""
        windows = rows[:, _WINDOW].nan_to_num(-1)
        window = windows.max()
        rows = rows.where((windows == window).unsqueeze(1), math.nan)
        if window < 0 or rows[:, _WINDOW].isfinite().sum() < 2:
            return None
        exposed = rows[:, _EXPOSED]
        network = exposed.nan_to_num(math.inf).min().item()
        return cls(int(window), rows[:, _STEP].nanmedian().item(), network, rows[:, _OWN:], exposed)


class RankHistory:
    """The last samples of all ranks, and their verdicts: notes [Own times] and [Verdicts]."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=SAMPLES)
        self.delays: tuple[Delay, ...] = ()  # the verdicts that hold

    def add(self, rows: Tensor) -> None:
        """Add a sample: [ranks, COLUMNS], fp64, on the CPU. One that fewer than two ranks have does not count."""
        sample = _Sample.of(rows)
        if sample is None or (self._samples and sample.window <= self._samples[-1].window):
            return
        self._samples.append(sample)
        if len(self._samples) == SAMPLES:
            self.delays = self._slow_ranks() or self._slow_network()

    @property
    def step(self) -> int:
        """Number of the last sampled step, from 1; 0: there is none."""
        return self._samples[-1].window + 1 if self._samples else 0

    @property
    def ranks(self) -> tuple[RankTimes, ...]:
        """Of the last sampled step."""
        if not self._samples:
            return ()
        last = self._samples[-1]
        late, _ = self._lateness()
        rows = torch.column_stack([last.own, last.exposed, late[-1]]).tolist()
        return tuple(RankTimes(rank, *times) for rank, times in enumerate(rows))

    def _lateness(self) -> tuple[Tensor, Tensor]:
        """Return how late each rank was, [samples, ranks], and its median excess by phase, [ranks, phases]."""
        own = torch.stack([sample.own for sample in self._samples])
        excess = own - own.nanmedian(1, keepdim=True).values
        typical = excess.nanmedian(0).values
        counts = ~_OF_THE_USER | (typical > 0)
        late = excess.where(counts, 0).sum(2)
        return late - late.nanmedian(1, keepdim=True).values, typical

    def _slow_ranks(self) -> tuple[Delay, ...]:
        late, with_what = self._lateness()
        typical = late.nanmedian(0).values
        varies = (late - typical).abs().sort(0).values[:-1].nanmean(0)
        noise = varies.clamp(min=varies.nanmean())
        least = self._least(_LEAST_SHARE)
        is_slow = (late >= least.unsqueeze(1)).all(0) & (typical >= _TIMES_NOISE * noise)
        goes_on = {
            delay.rank: delay
            for delay in self.delays
            if delay.rank is not None and typical[delay.rank] >= least.median() / 2
        }
        fades = goes_on.keys() - set(is_slow.nonzero().flatten().tolist())
        is_slow[list(goes_on)] = True
        in_time = typical.where(~is_slow, 0).nan_to_num(0).max()
        delays = []
        for rank in is_slow.nonzero().flatten().tolist():
            # While a delay fades, its cause stays: the greatest excess may be noise by then.
            cause = PHASES.index(goes_on[rank].cause) if rank in fades else int(with_what[rank].argmax())
            share = (typical[rank] - in_time).clamp(min=0).item() / self._step()
            since = goes_on[rank].since if rank in goes_on else self._samples[0].window + 1
            in_cause = with_what[rank, cause].item()
            delays.append(Delay(rank, PHASES[cause], typical[rank].item(), in_cause, share, since))
        return tuple(delays)

    def _slow_network(self) -> tuple[Delay, ...]:
        taken = torch.tensor([sample.network for sample in self._samples], dtype=torch.float64)
        least = self._least(_LEAST_OF_NETWORK)
        typical = taken.median().item()
        since = next((delay.since for delay in self.delays if delay.rank is None), None)
        goes_on = since is not None and typical >= least.median().item() / 2
        if not goes_on and not bool((taken >= least).all()):
            return ()
        return (Delay(None, "network", typical, typical, typical / self._step(), since or self._samples[0].window + 1),)

    def _least(self, share: float) -> Tensor:
        """For each sample, [samples], the least ms that may make a verdict."""
        steps = torch.tensor([sample.step for sample in self._samples], dtype=torch.float64)
        return (share * steps).clamp(min=_LEAST_MS)

    def _step(self) -> float:
        return torch.tensor([sample.step for sample in self._samples]).median().item()


def changes(before: Sequence[Delay], after: Sequence[Delay]) -> tuple[list[Delay], list[Delay]]:
    """Return the delays that have begun, and those that are over."""
    known, known_after = {delay.rank for delay in before}, {delay.rank for delay in after}
    return [new for new in after if new.rank not in known], [old for old in before if old.rank not in known_after]
