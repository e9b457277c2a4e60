"""Finds slow ranks: every n-th step, a small all-gather of each rank's own times, for which nobody waits."""

from __future__ import annotations

import functools
import logging
import math
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fastddp._C import Reducer, SampledStep, is_capturing
from fastddp.times.rank_times import COLUMNS, Delay, RankHistory, changes, row
from fastddp.times.step_report import split_of
from fastddp.watch.gathering import Gathering, waiting_stream

_log = logging.getLogger("fastddp")

_MOST_LINES = 8  # at once


class SlowRanks:
    """Gathers what the reducer samples, by collectives on ``device``, and says who is slow, for one model.

    Rows are sent in the first forward of a window that synchronises: the same window on all ranks, whatever each of
    them has sampled. Window ``first`` and every ``every``-th one are sent one window later; on a device, which lags
    behind its host, four windows later. A rank that lags even more sends a row without times.
    """

    def __init__(self, every: int, first: int, process_group: dist.ProcessGroup, device: torch.device) -> None:
        self.history = RankHistory()
        self._every = every
        self._later = 1 if device.type == "cpu" else 4
        self._due = first + self._later
        self._process_group = process_group
        self._device = device
        self._window = -1  # how many had ended at the last call
        self._steps: deque[SampledStep] = deque()  # not sent yet
        self._newest = -1  # window of the newest step sampled
        self._sent: deque[Gathering] = deque()

    def begin_window(self, reducer: Reducer) -> None:
        """Judge rows that have come, and send what is due: a collective in each ``every``-th window."""
        windows = reducer.windows()
        if windows == self._window or is_capturing(self._device):  # a graph would be replayed without the host
            return
        self._window = windows
        self._judge()
        step = reducer.sampled()
        if step is not None and step.window > self._newest:
            self._steps.append(step)
            self._newest = step.window
        if windows < self._due:
            return
        # A backward may be a window of its own, so there may be windows without a forward between two calls.
        self._due += self._every * ((windows - self._due) // self._every + 1)
        self._send(self._take(windows - self._later))

    def _take(self, last: int) -> SampledStep | None:
        """The newest step up to window ``last``, if over; older ones go."""
        newest = None
        while self._steps and self._steps[0].window <= last:
            newest = self._steps.popleft()
        return newest if newest is not None and newest.is_over() else None

    def _send(self, step: SampledStep | None) -> None:
        numbers = torch.full((COLUMNS,), math.nan, dtype=torch.float64, pin_memory=self._device.type != "cpu")
        if step is not None:
            times = step.times()
            exposed = split_of(times).exposed + times.gather_after
            said = row(step.window, times.next, exposed, times.own)
            numbers.copy_(torch.tensor(said, dtype=torch.float64))
        self._sent.append(Gathering(numbers.to(self._device, non_blocking=True), self._process_group))

    @functools.cached_property
    def _stream(self) -> torch.Stream | None:
        return waiting_stream(self._device)

    def _judge(self) -> None:
        while self._sent and self._sent[0].is_done() and self._sent[0].has_arrived(self._stream):
            before = self.history.delays
            self.history.add(self._sent.popleft().rows())
            if self._process_group.rank() == 0:
                self._tell(*changes(before, self.history.delays))

    def _tell(self, begun: Sequence[Delay], over: Sequence[Delay]) -> None:
        lines = [str(delay) for delay in begun] + [delay.over(self.history.step) for delay in over]
        for line in lines[:_MOST_LINES]:
            _log.warning("%s.", line)
        if len(lines) > _MOST_LINES:
            _log.warning("... and %d more such lines; step_report().delays has all.", len(lines) - _MOST_LINES)
