"""Replicas under torchft that are killed and come back, while the others train on: make demo-elastic.

A lighthouse, three replicas, and one that dies every few seconds. A killed replica's place is taken by a process that
has imported everything already, as launchers with spares have them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager, ProcessGroupGloo
from torchft._torchft import LighthouseServer
from torchft.optim import OptimizerWrapper

from fastddp import elastic

WIDTH = 256
COMPUTES = 0.05  # seconds that a step's own work takes, on top of the small model's


def train(replica: int, lighthouse: str, log: str, heartbeat: float) -> None:
    """One replica, until it is killed. Each step is a line of the log: when, which, how many took part, parameters."""
    torch.set_num_threads(1)
    model: nn.Module
    optimizer: Any
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=2)),  # also for replicas that are lost while they meet
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=2,
        use_async_quorum=False,
        replica_id=str(replica),
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        timeout=timedelta(seconds=30),
    )
    model = elastic.DistributedDataParallel(manager, module, heartbeat=heartbeat, lighthouse=lighthouse)
    optimizer = OptimizerWrapper(manager, torch.optim.AdamW(model.parameters(), lr=1e-3))
    with Path(log).open("a", buffering=1) as lines:
        while True:
            time.sleep(COMPUTES)
            optimizer.zero_grad()
            step = manager.current_step()
            inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1000 * step + replica))
            model(inputs).square().mean().backward()
            optimizer.step()
            bits = b"".join(parameter.detach().numpy().tobytes() for parameter in module.parameters())
            digest = hashlib.sha256(bits).hexdigest()[:12]
            is_committed = manager.current_step() > step
            lines.write(json.dumps([time.time(), step, is_committed, manager.num_participants(), digest]) + "\n")


class Show:
    """The whole of it, for some seconds; ``kills`` of replicas, one every so many seconds.

    ``stops``: replicas stand still first, and are killed when the others have gone on.
    """

    def __init__(
        self, replicas: int, every: float, kills: int, seconds: float, heartbeat: float, *, stops: bool = False
    ) -> None:
        self.killed: list[float] = []  # seconds after the begin
        self._replicas, self._every, self._kills = replicas, every, kills
        self._seconds, self._heartbeat, self._stops = seconds, heartbeat, stops
        self._folder = tempfile.TemporaryDirectory(prefix="fastddp-elastic-")
        self._logs: list[Path] = []
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["fastddp.elastic", "torchft", "torch.optim"])

    def run(self, *, speaks: bool = False) -> None:
        """Train, and kill."""
        ms = round(1000 * self._heartbeat)
        lighthouse = LighthouseServer(
            bind="[::]:0", min_replicas=2, join_timeout_ms=200, heartbeat_timeout_ms=ms, quorum_tick_ms=20
        )
        running = {replica: self._start(replica, lighthouse.address()) for replica in range(self._replicas)}
        while min((len(steps) for steps in self._steps()), default=0) < 10:  # all of them train
            time.sleep(0.1)
        self._begin = time.time()
        try:
            while time.time() < self._begin + self._seconds:
                time.sleep(0.05)
                if len(self.killed) < self._kills and time.time() > self._begin + self._every * (len(self.killed) + 1):
                    replica = len(self.killed) % self._replicas
                    self.killed.append(time.time() - self._begin)
                    if self._stops:
                        os.kill(running[replica].pid, signal.SIGSTOP)
                        time.sleep(self._heartbeat + 1)
                    running[replica].kill()
                    if speaks:
                        print(f"{self.killed[-1]:5.1f} s: replica {replica} is killed", flush=True)
                    running[replica].join()
                    running[replica] = self._start(replica, lighthouse.address())
        finally:
            for process in running.values():
                process.kill()
                process.join()
            lighthouse.shutdown()

    def _start(self, replica: int, lighthouse: str) -> Any:
        log = Path(self._folder.name, f"{len(self._logs)}.jsonl")
        log.touch()
        self._logs.append(log)
        process = self._context.Process(
            target=train, args=(replica, lighthouse, str(log), self._heartbeat), daemon=True
        )
        process.start()
        return process

    def _steps(self) -> Iterator[list[Any]]:
        """What each process has logged."""
        for log in self._logs:
            yield [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def _in_time(self) -> list[list[Any]]:
        end = self._begin + self._seconds
        return [[step for step in steps if self._begin <= step[0] <= end] for steps in self._steps()]

    def committed(self) -> int:
        """Steps that any replica has committed."""
        return len({step for steps in self._in_time() for _, step, is_committed, _, _ in steps if is_committed})

    def lost_steps(self) -> list[int]:
        """For each kill, the most steps that a replica has computed in vain until the next one."""
        ends = [*self.killed, self._seconds][1:]
        return [
            max(
                sum(not step[2] and begin <= step[0] - self._begin < end for step in steps) for steps in self._in_time()
            )
            for begin, end in zip(self.killed, ends, strict=True)
        ]

    def gaps(self) -> list[float]:
        """For each kill, seconds without a commit around it, less a step's."""
        times = sorted({round(step[0] - self._begin, 4) for steps in self._in_time() for step in steps if step[2]})
        found = []
        for moment in self.killed:
            before = max((at for at in times if at <= moment), default=0.0)
            after = min((at for at in times if at > before and at > moment), default=self._seconds)
            found.append(after - before)
        return found

    def replicas_are_equal(self) -> bool:
        """Whether all that have committed a step had the same parameters after it, bit by bit."""
        digests: dict[int, set[str]] = {}
        for steps in self._steps():
            for _, step, is_committed, _, digest in steps:
                if is_committed:
                    digests.setdefault(step, set()).add(digest)
        return all(len(found) == 1 for found in digests.values())

    def throughput(self) -> tuple[list[float], list[float]]:
        """Committed steps a second, second by second."""
        first: dict[int, float] = {}
        for steps in self._in_time():
            for at, step, is_committed, _, _ in steps:
                if is_committed:
                    first[step] = min(at - self._begin, first.get(step, at))
        seconds = list(range(int(self._seconds)))
        return [second + 0.5 for second in seconds], [
            float(sum(second <= at < second + 1 for at in first.values())) for second in seconds
        ]


def main() -> None:
    """The demo."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--every", type=float, default=6.0, help="seconds from kill to kill (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--heartbeat", type=float, default=0.5, help="seconds (default: %(default)s)")
    options = parser.parse_args()
    os.environ.setdefault("RUST_LOG", "error")  # torchft's
    show = Show(options.replicas, options.every, options.kills, options.every * (options.kills + 1), options.heartbeat)
    show.run(speaks=True)
    for second, steps in zip(*show.throughput(), strict=True):
        print(f"{second:5.1f} s  {'█' * int(steps)} {steps:.0f} steps")
    equal = "equal, bit by bit" if show.replicas_are_equal() else "NOT EQUAL"
    print(f"{show.committed()} steps committed, {len(show.killed)} replicas killed; replicas were {equal}.")
    print(f"Without a commit for {max(show.gaps(), default=0):.2f} s at most; steps lost a kill: {show.lost_steps()}.")


if __name__ == "__main__":
    main()
