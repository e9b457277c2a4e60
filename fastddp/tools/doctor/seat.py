"""Which of the job's processes this one is, by the launcher's environment variables."""

from __future__ import annotations

import datetime
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

_MOST_RANKS = 10**6 - 1


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
        """The launcher's store, within ``limit`` seconds.

        Raises:
            RuntimeError: it cannot be reached.
        """
        holds = self.rank == 0 and not self.has_agent
        timeout = datetime.timedelta(seconds=limit)
        # Does not wait for others: missing ranks are to be named.
        store = dist.TCPStore(self.address, self.port, self.size, holds, timeout, wait_for_workers=False)
        return dist.PrefixStore("fastddp doctor", store)


def seat(environment: Mapping[str, str]) -> Seat | None:
    """The seat of a process started by torchrun, or by a launcher that sets the same variables; None: it is alone.

    Raises:
        ValueError: RANK is set, and another variable is missing or has a value that no launcher would set.
    """
    if "RANK" not in environment:
        return None
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing:
        raise ValueError(
            f"RANK is set, as by torchrun, and {', '.join(missing)} is not: unset it, or start with torchrun"
        )
    size = _whole(environment, "WORLD_SIZE", 1, _MOST_RANKS)
    rank = _whole(environment, "RANK", 0, size - 1, f" (WORLD_SIZE is {size})")
    return Seat(
        rank,
        size,
        _whole(environment, "LOCAL_RANK", 0, _MOST_RANKS) if "LOCAL_RANK" in environment else rank,
        environment["MASTER_ADDR"],
        _whole(environment, "MASTER_PORT", 1, 65535),
        environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _whole(environment: Mapping[str, str], name: str, least: int, most: int, why: str = "") -> int:
    text = environment[name].strip()
    # By its length first: Python refuses to convert thousands of digits.
    if re.fullmatch("[0-9]{1,9}", text) is None or not least <= int(text) <= most:
        what = f"{name} is {reprlib.repr(text)}, not a whole number from {least} to {most}{why}"
        raise ValueError(f"{what}: set it right, or start with torchrun")
    return int(text)
