"""Which of the job's processes this one is, as its launcher says in the environment."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Seat:
    """One rank's place."""

    rank: int
    size: int
    local_rank: int  # among the ranks of its machine
    address: str  # of the store
    port: int
    has_agent: bool  # torchrun holds the store; otherwise rank 0 does

    def store(self, limit: float) -> dist.Store:
        """The launcher's store, within so many seconds.

        Raises:
            RuntimeError: it cannot be reached.
        """
        holds = self.rank == 0 and not self.has_agent
        timeout = datetime.timedelta(seconds=limit)
        # Not waiting for others: who does not come is to be named.
        store = dist.TCPStore(self.address, self.port, self.size, holds, timeout, wait_for_workers=False)
        return dist.PrefixStore("fastddp doctor", store)


def seat(environment: Mapping[str, str]) -> Seat | None:
    """The seat of a process that torchrun started, or another launcher that sets the same variables; None: it is alone.

    Raises:
        ValueError: RANK is there and something else is missing, or not a number.
    """
    if "RANK" not in environment:
        return None
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise ValueError(
            f"RANK is set, as by torchrun, and {', '.join(missing)} is not: unset it, or start with torchrun"
        )
    rank = int(environment["RANK"])
    return Seat(
        rank,
        int(environment["WORLD_SIZE"]),
        int(environment.get("LOCAL_RANK", rank)),
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )
