"""Compares replicas: a part of them in each step, and nobody waits for the answer.

Note [What an audit sends]

Once a window, in the first forward that synchronises, each rank takes digests of a part of its tensors. The digests of
several windows (a tenth of a round) make one row of numbers, because a collective costs more than its contents. Each
rank sends its row, of a fixed size, to all others. The audit counts windows, not forwards: a rank may repeat a forward.
Ranks read the rows in the next window's forward. On a device with streams they do so one window later, when the host no
longer has to wait.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from fastddp._C import Digests, Reducer, is_capturing
from fastddp.exchange.descriptions import Exchange, Setting
from fastddp.ranks.listing import ranks as ranks_in_words
from fastddp.watch.audited_tensors import AuditedTensors, Part, Round
from fastddp.watch.corruption import Corruption, OnCorruption, deliver
from fastddp.watch.gathering import Gathering, waiting_stream

_ROWS_IN_A_ROUND = 10
_WINDOWS_WITHOUT_STATE = 3  # an optimizer has no state before its first step
_MOST_DIGESTS = 128, 32  # per window, if it has its own row or shares one; more slices share digests

# A row: whether this rank's tensors count; a hash of what it compares; then digests.
_PRESENT, _DESCRIPTION, _DIGESTS = range(3)


class Audit:
    """Compares replicas, for one reducer: each tensor once in ``every`` steps, by collectives on ``device``.

    Reports use the numbers of ranks in ``process_group``.
    """

    def __init__(
        self,
        every: int,
        tell: OnCorruption,
        tensors: AuditedTensors,
        process_group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self.tensors = tensors
        self._every = every
        self._to = tell
        self._process_group = process_group
        self._device = device
        self._windows_in_a_row = max(1, every // _ROWS_IN_A_ROUND)
        self._most_digests = _MOST_DIGESTS[self._windows_in_a_row > 1]
        self._digests = Digests()
        self._window = -1  # how many windows had ended at the last audit
        self._audited = 0  # windows
        self._round: Round | None = None
        self._look_again = 0  # for so many windows: optimizers may create state
        self._row = _Row()
        self._sent: deque[_Sent] = deque()
        self._differing: set[tuple[str, int]] = set()  # slices that differ, reported

    def plan_again(self) -> None:
        """Plan the round again in the next window. All ranks still compare the same part next."""
        self._round = None
        self._look_again = _WINDOWS_WITHOUT_STATE

    def begin_window(self, reducer: Reducer, exchange: Exchange, setting: Setting, counts: bool) -> None:
        """Report what earlier windows have shown, and send this window's digests; a collective.

        ``counts``: whether this rank's tensors are compared; not if it has no inputs (torch's Join). CorruptionError:
        ``Watch.corruption`` is "raise". The user's callable may raise any error. A further call goes on.
        """
        windows = reducer.windows()
        if windows == self._window or is_capturing(self._device):  # a graph would be replayed without the host
            return
        self._tell()
        self._window = windows
        group = exchange.group(setting)
        if group is not self._row.group:  # a row is of one group
            self._row = _Row(group)
        if group is None or group.size() == 1:
            return
        self._take_digests(counts)
        self._audited += 1
        if self._audited % self._windows_in_a_row == 0:
            self._send(group)

    def _take_digests(self, counts: bool) -> None:
        number = self._audited % self._every
        may_have_changed = number == 0 or self._look_again > 0  # counting takes time
        self._look_again = max(0, self._look_again - 1)
        if self._round is None or (may_have_changed and self._round.count != self.tensors.count()):
            self._round = self.tensors.round(self._every)
        part, description = self._round.parts[number], self._round.description
        slices = part.found() if counts else []
        if any(tensor is None for tensor, _, _ in slices):  # it has gone
            self._round = None
        digests = _together(self._digests.of(slices, self._device), self._most_digests)
        if self._row.numbers is None:
            count = _DIGESTS + self._windows_in_a_row * self._most_digests
            self._row.numbers = torch.zeros(count, dtype=torch.int64, device=self._device)
        first = _DIGESTS + len(self._row.parts) * self._most_digests
        self._row.numbers[first : first + len(digests)] = digests
        self._row.counts = self._row.counts and counts
        self._row.descriptions.append(description)
        self._row.parts.append((self._window + 1, part))

    def _send(self, group: dist.ProcessGroup) -> None:
        row, self._row = self._row, _Row(group)
        numbers = row.numbers
        assert numbers is not None
        # Python's hash of numbers is the same in every process.
        head = torch.tensor([row.counts, hash(tuple(row.descriptions))], dtype=torch.int64)
        if self._device.type != "cpu":
            head = head.pin_memory()
        numbers[:_DIGESTS].copy_(head, non_blocking=True)
        self._sent.append(_Sent(group, row.parts, self._most_digests, Gathering(numbers, group)))

    @functools.cached_property
    def _stream(self) -> torch.Stream | None:
        return waiting_stream(self._device)

    def _tell(self) -> None:
        while self._sent and self._sent[0].gathering.has_arrived(self._stream):
            sent = self._sent.popleft()
            for corruption in list(self._differences(sent, sent.rows())):
                if self._to != "report" or sent.group.rank() == 0:  # all ranks know it, and the log says it once
                    deliver(corruption, self._to)

    def _differences(self, sent: _Sent, rows: Mapping[int, list[int]]) -> Iterator[Corruption]:
        if len(rows) == 1 and not self._differing:
            return  # the usual case
        rows = {rank: row for rank, row in rows.items() if row[_PRESENT]}
        described = {rank: row[_DESCRIPTION] for rank, row in rows.items()}
        if len(set(described.values())) > 1:
            if ("", 0) not in self._differing:
                yield self._different_tensors(sent, described)
            self._differing.add(("", 0))
            return
        found: dict[tuple[int, tuple[int, ...]], list[str]] = {}  # names, by step and ranks that differ
        for column, step, part, slices in sent.digests():
            digests = {rank: row[_DIGESTS + column] for rank, row in rows.items()}
            key = (part.names[slices.start], part.slices[slices.start][1])
            if len(set(digests.values())) <= 1:
                self._differing.discard(key)
            elif key not in self._differing:
                self._differing.add(key)
                found.setdefault((step, _outvoted(digests)), []).extend(dict.fromkeys(part.names[slices]))
        for (step, ranks), repeated in found.items():
            names = list(dict.fromkeys(repeated))
            others = f" (and {len(names) - 1} more, or some of these)" if len(names) > 1 else ""
            yield Corruption(
                "replicas",
                step,
                self._ranks(ranks, sent.group),
                names[0],
                f"Replicas differ, first seen before step {step}: '{names[0]}'{others} "
                f"{self._whose(ranks, rows, sent.group)}. A bit has flipped in a memory or a sum, or something "
                "changed it on some ranks only. From here on ranks train different models: go back to a checkpoint "
                "from before this step, and check the machines of these ranks.",
            )

    def _different_tensors(self, sent: _Sent, described: Mapping[int, int]) -> Corruption:
        ranks = _outvoted(described)
        return Corruption(
            "replicas",
            sent.step,
            self._ranks(ranks, sent.group),
            None,
            f"Replicas differ, first seen before step {sent.step}: what is to be audited (names, shapes and dtypes of "
            f"parameters, optimizer state and buffers) {self._whose(ranks, described, sent.group)}. Call audit() with "
            "the same optimizers and buffers on every rank, and let every rank step its optimizer equally often.",
        )

    def _ranks(self, ranks: Iterable[int], group: dist.ProcessGroup) -> tuple[int, ...]:
        """Ranks of ``group``, as the model's process group numbers them."""
        if group is self._process_group:
            return tuple(ranks)
        everywhere = [dist.get_global_rank(group, rank) for rank in ranks]
        known = dist.get_process_group_ranks(self._process_group)
        return tuple(known.index(rank) if rank in known else rank for rank in everywhere)

    def _whose(self, ranks: tuple[int, ...], of: Iterable[int], group: dist.ProcessGroup) -> str:
        """The end of a sentence: "... of rank 2 is not that of ranks 0, 1, 3"."""
        wrong = ranks_in_words(self._ranks(ranks, group))
        right = self._ranks([rank for rank in of if rank not in ranks], group)
        if right:
            return f"of {wrong} is not that of {ranks_in_words(right)}"
        if len(ranks) == 2:
            return f"is not the same on {wrong}: it is wrong on one of the two"
        return f"is not the same on {wrong}, and no value is that of most"


@dataclass
class _Row:
    """What this rank tells the others about one or more windows."""

    group: dist.ProcessGroup | None = None
    parts: list[tuple[int, Part]] = field(default_factory=list)  # (step, part), by window
    numbers: Tensor | None = None  # the row
    descriptions: list[int] = field(default_factory=list)
    counts: bool = True


@dataclass
class _Sent:
    """This rank's row on its way to all ranks, and their rows to this one."""

    group: dist.ProcessGroup
    parts: list[tuple[int, Part]]
    most_digests: int
    gathering: Gathering

    @property
    def step(self) -> int:
        """The first step in the row."""
        return self.parts[0][0]

    def rows(self) -> dict[int, list[int]]:
        """By rank of the group; rank 0's only, if all are equal."""
        rows = self.gathering.rows()
        if bool((rows == rows[0]).all()):
            return {0: rows[0].tolist()}
        return dict(enumerate(rows.tolist()))

    def digests(self) -> Iterator[tuple[int, int, Part, slice]]:
        """For each digest: its column, its step, its part, and the slices that it stands for."""
        for number, (step, part) in enumerate(self.parts):
            count = len(part.names)
            together = _how_many_together(count, self.most_digests)
            for place, first in enumerate(range(0, count, together)):
                yield number * self.most_digests + place, step, part, slice(first, min(count, first + together))


def _how_many_together(count: int, most: int) -> int:
    return max(1, -(-count // most))


def _together(digests: Tensor, most: int) -> Tensor:
    """At most ``most`` digests: neighbours are added up, each times another odd number."""
    together = _how_many_together(len(digests), most)
    if together == 1:
        return digests
    padded = torch.nn.functional.pad(digests, (0, -len(digests) % together)).view(-1, together)
    return (padded * torch.arange(1, 2 * together, 2, device=digests.device)).sum(1)


def _outvoted(values: Mapping[int, int]) -> tuple[int, ...]:
    """The ranks without the most frequent value; all ranks, if two values are equally frequent."""
    (most, votes), *others = Counter(values.values()).most_common(2)
    if others and others[0][1] == votes:
        return tuple(values)
    return tuple(rank for rank, value in values.items() if value != most)
