"""Starts processes in a moment: a process that has imported torch and fastddp, and forks. It runs as a script.

Ranks are forked from it before it has any thread, and end as scripts do, with the interpreter's end. A line of JSON on
its standard input is a process to start, and the answer is its pid. Where the input ends, however the launcher has
ended, it kills all that it has started.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":
    # Not by the environment, which the ranks' DataLoader workers and tests would inherit.
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from bench.faults.rank import Setting, run_rank, serve_store

_PR_SET_PDEATHSIG = 1


class Forking:
    """Processes of one launcher."""

    def __init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def start(self, role: str, setting: Setting) -> int:
        """Start a "rank" or a "store"; its pid, which is that of its group of processes too."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([role, dataclasses.asdict(setting)]) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def stop(self) -> None:
        """Kill all that is left."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextlib.contextmanager
def forking() -> Iterator[Forking]:
    """For as long as the block lasts."""
    process = Forking()
    try:
        yield process
    finally:
        process.stop()


def kill_group(pid: int) -> None:
    """Kill a process that was started here, and all of its children that stayed with it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def main() -> None:
    # Whoever ends is gone at once: nobody asks for exit statuses.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    started = []
    # Read without a buffer, whose rest a child would inherit.
    while (line := sys.stdin.buffer.raw.readline()).endswith(b"\n"):  # type: ignore[union-attr]
        role, fields = json.loads(line)
        setting = Setting.of(fields)
        pid = os.fork()
        if pid == 0:
            _become(f"{role}.{setting.rank}", setting)
            {"rank": run_rank, "store": serve_store}[role](setting)
            return
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)  # the child does so too: whoever comes first
        started.append(pid)
        os.write(1, f"{pid}\n".encode())
    for pid in started:
        kill_group(pid)


def _become(name: str, setting: Setting) -> None:
    """A child: its own group of processes, its own output, and an end with its parent's."""
    with contextlib.suppress(PermissionError):
        os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = os.open(Path(setting.folder, f"log.{name}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(output)
    os.close(nothing)
    if setting.machine is not None:
        setting.machine.become(Path(setting.folder))


if __name__ == "__main__":
    main()
