"""Replicas under torchft as processes of their own, with a lighthouse in this one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("elastic_replica.py")
Event = dict[str, Any]


class Replica:
    """One process; started again, it is another."""

    def __init__(
        self, number: int, lighthouse: str, *arguments: object, enter: Callable[[], None] | None = None
    ) -> None:
        self.number = number
        self.events: list[Event] = []
        self.errors: list[str] = []
        environment = os.environ | {"TORCHFT_LIGHTHOUSE": lighthouse, "OMP_NUM_THREADS": "1", "RUST_LOG": "error"}
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "--replica", str(number), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            preexec_fn=enter,  # into a network namespace
        )
        self._threads = [
            threading.Thread(target=self._read, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.events.append(json.loads(line))

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(self.process.stderr)

    def of(self, event: str) -> list[Event]:
        """What it has said of this kind."""
        return [said for said in list(self.events) if said["event"] == event]

    @property
    def committed(self) -> dict[int, Event]:
        """By step."""
        return {said["step"]: said for said in self.of("step") if said["committed"]}

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
        """Until it holds; the test's own timeout is generous."""
        end = time.monotonic() + seconds
        while not condition():
            if self.process.poll() not in (None, 0, -signal.SIGKILL) or time.monotonic() > end:
                self.end()
                raise AssertionError(f"replica {self.number}: {what}\n{''.join(self.errors[-60:])}")
            time.sleep(0.02)

    def end(self) -> None:
        """Kill it, stopped or not."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for thread in self._threads:
            thread.join(5)


class Job:
    """The replicas of one lighthouse."""

    def __init__(self, lighthouse: str) -> None:
        self.lighthouse = lighthouse
        self.replicas: list[Replica] = []

    def start(self, number: int, *arguments: object, enter: Callable[[], None] | None = None) -> Replica:
        """A process for this replica."""
        replica = Replica(number, self.lighthouse, *arguments, enter=enter)
        self.replicas.append(replica)
        return replica

    def digests(self) -> dict[int, set[str]]:
        """Of the parameters after each step that was committed, by all replicas."""
        found: dict[int, set[str]] = {}
        for replica in self.replicas:
            for step, said in replica.committed.items():
                found.setdefault(step, set()).add(said["digest"])
        return found


@contextmanager
def job(
    heartbeat: float = 0.5, *, where: Callable[[Callable[[], None]], None] = lambda start: start(), host: str = ""
) -> Iterator[Job]:
    """A lighthouse, until all replicas have ended. ``where``: calls what starts it, at the address ``host``."""
    from torchft._torchft import LighthouseServer

    started = []

    def start() -> None:
        ms = round(1000 * heartbeat)
        started.append(LighthouseServer("[::]:0", 2, join_timeout_ms=2000, heartbeat_timeout_ms=ms, quorum_tick_ms=20))

    where(start)
    (lighthouse,) = started
    address = lighthouse.address()
    running = Job(f"http://{host}:{address.rsplit(':', 1)[1]}" if host else address)
    try:
        yield running
    finally:
        for replica in running.replicas:
            replica.end()
        lighthouse.shutdown()
