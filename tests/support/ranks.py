"""Rank processes that live as long as the test session, with a fresh process group for each call.

    def averages(rank, scale):                      # at module level: it is pickled by reference
        tensor = torch.full((3,), scale * rank)
        dist.all_reduce(tensor)
        return tensor

    def test_it(ranks):
        assert ranks.run(averages, 2, 1.0)[0].tolist() == [1, 1, 1]

Processes are forks of one that has imported torch, which takes seconds. They stay, since joining a process group takes
milliseconds, and everything that one call could leave behind for the next is taken away after it: the process group,
random state, number of threads, global hooks.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import importlib.util
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIME_LIMIT = 60.0  # seconds for one call; a test that expects a hang sets its own
COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=30)  # shorter, so that a collective that hangs raises where it stands
SEED = 20


@dataclass(frozen=True)
class RankError:
    """An exception that one rank raised: what a test needs to judge it, and what a person needs to find it."""

    rank: int
    type_name: str
    message: str
    traceback: str
    raised_at: float = 0.0  # by the machine's monotonic clock
    had_group: bool = True  # whether the rank had joined the process group


class RanksFailed(RuntimeError):
    """One rank or more did not return. ``errors`` holds what they raised, the first to fail first."""

    def __init__(self, errors: list[RankError], headline: str = "") -> None:
        self.errors = errors = sorted(errors, key=lambda error: error.raised_at or float("inf"))
        headline = headline or "; ".join(f"rank {error.rank} raised {error.type_name}" for error in errors)
        super().__init__("\n".join([headline, *(f"--- rank {error.rank} ---\n{error.traceback}" for error in errors)]))


@dataclass
class _Process:
    """One rank process and the two ways to hear from it: its pipe, and the file its stacks are written to."""

    process: Any
    pipe: Connection
    stacks: Path

    def stack(self) -> str:
        """Every thread's Python stack of a process that no longer answers."""
        before = self.stacks.stat().st_size
        os.kill(self.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2
        while self.stacks.stat().st_size == before and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.05)  # the rest of the dump
        return self.stacks.read_text()[before:] or "no stack: the process does not handle signals"

    def obituary(self) -> str:
        """How a process ended that closed its pipe, and where it stood if the interpreter could still say."""
        self.process.join(timeout=5)
        code = self.process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"exited with code {code}"
        return f"the process {how}\n{self.stacks.read_text()}"


@dataclass
class RankPool:
    """Rank processes, started when first needed and again after one of them hung or died.

    ``prepare``: called once in each process before its first call; at module level, since it is pickled by reference.
    """

    prepare: Callable[[], None] | None = None
    backend: str = "gloo"
    _processes: list[_Process] = field(default_factory=list)
    _store: dist.TCPStore | None = None
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def run(self, function: Callable[..., Any], world_size: int, *args: Any, **how: Any) -> list[Any]:
        """``function(rank, *args)`` on each rank, the default process group set up; the results by rank.

        ``how``: ``time_limit`` in seconds and ``backend``, or what the function takes by name. Raises ``RanksFailed``
        with each failing rank's traceback, or with the stacks of all ranks if one of them is not done in time, or with
        what is known of a process that died.
        """
        outcomes, errors = self._call(function, world_size, args, **how)
        if errors:
            raise RanksFailed(errors)
        return [outcomes[rank] for rank in range(world_size)]

    def errors(self, function: Callable[..., Any], world_size: int, *args: Any, **how: Any) -> list[RankError]:
        """Like ``run`` where every rank is expected to raise: the exceptions by rank. A rank that returns fails it."""
        outcomes, errors = self._call(function, world_size, args, **how)
        if outcomes:
            raise RanksFailed(errors, f"every rank should have raised, but {sorted(outcomes)} returned")
        return sorted(errors, key=lambda error: error.rank)

    def stop(self) -> None:
        """End all processes; the next call starts new ones."""
        for rank in self._processes:
            rank.process.kill()
        for rank in self._processes:
            rank.process.join()
            rank.pipe.close()
            rank.stacks.unlink(missing_ok=True)
            # Who is killed leaves them.
            for page in Path("/dev/shm").glob(f"fastddp-*-{rank.process.pid}-*"):
                page.unlink(missing_ok=True)
        self._processes = []

    def _call(
        self,
        function: Callable[..., Any],
        world_size: int,
        args: tuple[Any, ...],
        time_limit: float = TIME_LIMIT,
        backend: str | None = None,
        **kwargs: Any,
    ) -> tuple[dict[int, Any], list[RankError]]:
        """The results by rank, and the exceptions in the order in which they came."""
        message = pickle.dumps((next(self._numbers), backend or self.backend, world_size, function, args, kwargs))
        self._start(world_size)
        try:
            for rank in range(world_size):
                self._processes[rank].pipe.send_bytes(message)
            outcomes, errors = self._collect(world_size, time.monotonic() + time_limit, time_limit)
            if not all(error.had_group for error in errors):
                self.stop()  # ranks that did not all join count groups differently from now on
                return {}, errors
            for rank in outcomes:  # nobody leaves the group while another may still need it
                self._processes[rank].pipe.send_bytes(b"leave the group")
        except BaseException:  # also KeyboardInterrupt and a test's own timeout: what the ranks still do is unknown
            self.stop()
            raise
        return outcomes, errors

    def _start(self, world_size: int) -> None:
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        # Imported once. torch takes _dynamo, and fastddp triton, when a device is first used: two seconds of each rank.
        modules = ["torch.distributed", "torch.testing", "torch._dynamo", "triton"]
        # The process that imports them looks into the current folder first. Where fastddp is installed and not used in
        # place, it would find the sources there, with an extension for another torch.
        found = importlib.util.find_spec("fastddp")
        if found is not None and found.origin is not None and Path(found.origin).parents[1] == Path.cwd():
            modules.append("fastddp")
        context.set_forkserver_preload(modules)
        for rank in range(len(self._processes), world_size):
            ours, theirs = context.Pipe()
            handle, path = tempfile.mkstemp(prefix=f"fastddp-rank{rank}-")
            os.close(handle)
            process = context.Process(
                target=_serve, args=(theirs, rank, self._store.port, path, self.prepare), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(_Process(process, ours, Path(path)))

    def _collect(self, world_size: int, deadline: float, time_limit: float) -> tuple[dict[int, Any], list[RankError]]:
        outcomes: dict[int, Any] = {}
        errors: list[RankError] = []
        waiting = {self._processes[rank].pipe: rank for rank in range(world_size)}
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                hung = sorted(waiting.values())
                stacks = [RankError(rank, "Hang", "", self._processes[rank].stack()) for rank in hung]
                raise RanksFailed(errors + stacks, f"ranks {hung} not done after {time_limit:g} s; each rank's stack:")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    outcome = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    death = RankError(rank, "Death", "", self._processes[rank].obituary())
                    raise RanksFailed([*errors, death], f"rank {rank} died") from None
                if isinstance(outcome, RankError):
                    errors.append(outcome)
                else:
                    outcomes[rank] = outcome[0]
        return outcomes, errors


def _serve(pipe: Connection, rank: int, port: int, stacks: str, prepare: Callable[[], None] | None) -> None:
    """A rank process: calls come through the pipe until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the session's; it ends the ranks
    with Path(stacks).open("w") as file:
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no question to DNS in every call
        with contextlib.suppress(ImportError):
            import fastddp  # noqa: F401 - global hooks that it installs once are part of the clean state
        if prepare is not None:
            prepare()
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        clean = _GlobalState()
        left: deque[dist.ProcessGroup | None] = deque(maxlen=4)
        with contextlib.suppress(EOFError):
            while True:
                # A callback on a thread of gloo's may hold a reference to the group for a moment longer than the call
                # lasts (torch's PowerSGD has such), and a group that ends on a thread of its own aborts the process. So
                # it ends here, some calls later.
                left.append(_answer(pipe, rank, store, pickle_in=pipe.recv_bytes()))
                clean.restore()


def _answer(pipe: Connection, rank: int, store: dist.Store, pickle_in: bytes) -> dist.ProcessGroup | None:
    """One call: join its group, run it, answer, leave the group, which is returned unless the call failed."""
    had_group = False
    try:
        number, backend, world_size, function, args, kwargs = pickle.loads(pickle_in)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"call {number}", store),
            rank=rank,
            world_size=world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )
        had_group = True
        answer = pickle.dumps((function(rank, *args, **kwargs),))
    except BaseException as error:
        # It leaves at once: its peers' collectives then fail instead of waiting for their timeout.
        text = traceback.format_exc()
        _leave_group()
        known = RankError(rank, type(error).__name__, str(error), text, time.monotonic(), had_group)
        pipe.send_bytes(pickle.dumps(known))
        return None
    pipe.send_bytes(answer)
    pipe.recv_bytes()
    group = dist.group.WORLD
    _leave_group()
    return group


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class _GlobalState:
    """What a call can change for the whole process, as it was at the start."""

    def __init__(self) -> None:
        self._hooks = [(hooks, dict(hooks)) for hooks in _global_hooks()]
        self._default_dtype = torch.get_default_dtype()
        self._filters = list(warnings.filters)
        self.restore()

    def restore(self) -> None:
        gc.collect()  # modules and their hooks are held by reference cycles
        gc.freeze()  # what is left is what was imported: Inductor alone would take 0.1 s to search after each call
        for hooks, content in self._hooks:
            hooks.clear()
            hooks.update(content)
        torch.set_default_dtype(self._default_dtype)
        torch.set_grad_enabled(True)
        torch.set_num_threads(1)
        warnings.filters[:] = self._filters  # type: ignore[index]
        random.seed(SEED)
        torch.manual_seed(SEED)  # the same on each rank: models are equal unless a test makes them differ


def _global_hooks() -> list[Any]:
    from torch.nn.modules import module
    from torch.optim import optimizer

    named = [*vars(optimizer).items(), *vars(module).items()]
    return [hooks for name, hooks in named if name.startswith("_global_") and isinstance(hooks, dict)]
