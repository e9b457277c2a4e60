"""An exchange for each bucket: several exchanges divide the buckets of a plan (``Pipeline::per_bucket``)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch.distributed as dist

from fastddp import _C
from fastddp.exchange.descriptions import Pipelined, Setting


@dataclass(frozen=True, eq=False)
class PerBucket:
    """Bucket b of the plan travels by ``exchanges[of_buckets[b]]``. Equal to itself only."""

    exchanges: tuple[Pipelined, ...]
    """They are over the same ranks, and each has at least one bucket."""
    of_buckets: tuple[int, ...]
    is_pipelined: ClassVar[bool] = True
    remembers: ClassVar[bool] = True

    @property
    def takes_whole_parameters(self) -> bool:
        """Whether one of them does."""
        return any(exchange.takes_whole_parameters for exchange in self.exchanges)

    def group(self, setting: Setting) -> dist.ProcessGroup | None:
        """As :meth:`fastddp.exchange.descriptions.Exchange.group`."""
        return self.exchanges[0].group(setting)

    def make(self, setting: Setting) -> _C.Pipeline:
        """As :meth:`fastddp.exchange.descriptions.Exchange.make`.

        Raises:
            ValueError: ``setting`` has another number of buckets.
        """
        if len(self.of_buckets) != len(setting.plan):
            raise ValueError(
                f"Exchanges were chosen for {len(self.of_buckets)} buckets, and the plan has {len(setting.plan)}."
            )
        made = [exchange.make(self.setting_of(number, setting)) for number, exchange in enumerate(self.exchanges)]
        return _C.Pipeline.per_bucket(made, self.of_buckets)

    def setting_of(self, number: int, setting: Setting) -> Setting:
        """The setting of exchange ``number``: its own buckets."""
        carried = frozenset(bucket for bucket, owner in enumerate(self.of_buckets) if owner == number)
        return dataclasses.replace(setting, carried=carried)
