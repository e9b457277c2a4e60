"""A row of numbers from each rank to all: a small collective that nobody waits for."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fastddp._C import unrecorded
from fastddp.ranks.together import finish, start_gather


class Gathering:
    """Rows of all ranks of ``group``, on their way, made everywhere in one order; ``row``: [columns], all as long."""

    def __init__(self, row: Tensor, group: dist.ProcessGroup) -> None:
        self._rows = self._on_host = row.new_empty(group.size(), len(row))
        self._group = group
        self._work = unrecorded(lambda: start_gather(self._rows, row, group))
        self._event: torch.Event | None = None

    def is_done(self) -> bool:
        """Whether the collective is over. Ranks that share no gradients may be steps apart."""
        return self._work.is_completed()

    def has_arrived(self, stream: torch.Stream | None) -> bool:
        """Whether the host can read the rows; no ``stream``: it waits; else the first call starts a copy."""
        if stream is None:
            finish(self._work, self._group)
            return True
        if self._event is None:
            with stream:
                finish(self._work, self._group)
                self._on_host = torch.empty(self._rows.shape, dtype=self._rows.dtype, pin_memory=True)
                self._on_host.copy_(self._rows, non_blocking=True)
                self._event = torch.Event(stream.device)
                self._event.record()
            return False
        return self._event.query()

    def rows(self) -> Tensor:
        """[ranks, columns], on the host, after they have arrived."""
        return self._on_host


def waiting_stream(device: torch.device) -> torch.Stream | None:
    """A stream that waits for rows, so that no other has to; None on the CPU."""
    return None if device.type == "cpu" else torch.Stream(device=device)
