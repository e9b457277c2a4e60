"""How a bit flips: in memory, or in what a process group gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_WORDS = {2: torch.int16, 4: torch.int32}


def flip_bit(tensor: Tensor, bit: int, element: int) -> None:
    """In place; of a contiguous tensor whose elements have 2 or 4 bytes."""
    words = tensor.detach().view(-1).view(_WORDS[tensor.itemsize])
    words[element] ^= torch.tensor(1 << bit).to(words.dtype)


@dataclass(frozen=True)
class Damage:
    """To one element of the sum of a bucket, as it comes back to a rank."""

    bucket: int
    element: int
    bit: int
    rank: int
    """Which gets it. A rank sends itself nothing: where it adds this element up, the next one is taken."""
    dtype: torch.dtype
    """Of the wire."""


class _Message(dist.Work):
    """One of gloo's between two ranks.

    Waited for twice, it would wait for another one. And a wait that times out closes all connections: fastddp knows
    that of gloo's own messages, but not of those that come from Python.
    """

    def __init__(self, work: dist.Work) -> None:
        super().__init__()
        self._work = work
        self._is_over = False

    def wait(self, timeout: object = None) -> bool:
        if not self._is_over:
            self._work.wait()
            self._is_over = True
        return True


class Flipping(dist.ProcessGroup):
    """A process group that damages sums on their way back.

    It knows both ways in which fastddp adds up over gloo on the CPU: an allreduce a bucket; and messages in pairs, by
    which shards of a wire, as many as ranks, go to their owners and sums come back. Of these the tag tells bucket and
    round (`tag_of()`, `csrc/transport/owners.h`).
    """

    _FIRST_TAG = 0x46440000
    _MOST_PIECES = 256
    _OF_A_MODEL = 1 << 17  # pieces
    _MOST_ROUNDS = 4
    _BACK = 1  # the second round of one level

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        cpu = torch.device("cpu")
        self._register_backend(cpu, dist.ProcessGroup.BackendType.GLOO, group._get_backend(cpu))  # which tells its name
        self._group = group
        self._damage: Damage | None = None
        self._calls = 0
        self._kept: list[dist.Work] = []  # for as long as others use it
        self.has_flipped = False

    def begin_step(self, damage: Damage | None) -> None:
        """What is to be damaged in this step, on whichever rank; None: nothing."""
        self._damage = damage
        self._calls = 0
        self._kept.clear()

    def allreduce(self, *arguments: Any) -> dist.Work:
        """A wire, which in a step come in the order of buckets; or what ranks say at its end."""
        ((wire,), *_) = arguments
        damage = self._damage
        if damage is not None and wire.dtype != damage.dtype:
            return self._group.allreduce(*arguments)
        bucket, self._calls = self._calls, self._calls + 1
        work = self._group.allreduce(*arguments)
        if damage is not None and (damage.bucket, damage.rank) == (bucket, self.rank()):
            work.wait()
            self._flip(wire, damage.element)
        return work

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        """A shard of this rank's wire to its owner; or a sum."""
        return self._keep(_Message(self._group.send(tensors, peer, tag)))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        """Another rank's share of a sum; or a sum from its owner."""
        message = self._keep(_Message(self._group.recv(tensors, peer, tag)))
        element = self._element(peer, tag, tensors[0])
        if element is not None:
            message.wait()
            self._flip(tensors[0].view(torch.int16), element)
        return message

    def _keep(self, message: _Message) -> _Message:
        self._kept.append(message)
        return message

    def _element(self, owner: int, tag: int, shard: Tensor) -> int | None:
        """Of a message with this tag, from the shard's owner, in bytes: what is to be damaged, if anything is."""
        damage = self._damage
        piece, number = divmod(tag - self._FIRST_TAG, self._MOST_ROUNDS)
        if damage is None or number != self._BACK:
            return None
        elements = shard.numel() // 2
        rank = damage.rank if damage.rank != owner else (owner + 1) % self.size()
        is_meant = (damage.bucket * self._MOST_PIECES, rank) == (piece % self._OF_A_MODEL, self.rank())
        return damage.element % elements if is_meant and damage.element // elements == owner else None

    def _flip(self, wire: Tensor, element: int) -> None:
        assert self._damage is not None
        flip_bit(wire, self._damage.bit, element)
        self.has_flipped = True
