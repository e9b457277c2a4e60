"""Where this process' Python code is, for a report."""

from __future__ import annotations

import sys
import sysconfig
import threading
import traceback
from collections.abc import Collection
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from fastddp._C import calls_in_lines

_FOLDERS = ("site-packages", "dist-packages")
_LOADER = "torch/utils/data/dataloader.py"
_COLLECTIVES = ("torch/distributed/distributed_c10d.py", "fastddp/ranks/together.py")
_BETWEEN_TWO = ("send", "recv")
_STATES = {"R": "runs", "S": "sleeps", "D": "waits in the kernel", "T": "is stopped", "t": "is stopped"}


def libraries() -> list[tuple[str, int]]:
    """Folders of library code, and how many leading letters of their paths to leave out."""
    of_python = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    installed = {path for path in sys.path if path.endswith(_FOLDERS)}
    packages = [Path(torch.__file__).parent, Path(__file__).parents[1]]  # may be in no folder above
    return [(f"{folder}/", len(folder) + 1) for folder in sorted(of_python | installed)] + [
        (f"{package}/", len(str(package.parent)) + 1) for package in packages
    ]


def lines_of_main_thread(ranks: Collection[int] = ()) -> list[str]:
    """Its calls, the innermost last; then what it waits for: workers of a data loader, or a collective of ``ranks``.

    These are global ones, of a model. Empty: no collective is looked for.
    """
    ident = threading.main_thread().ident
    frame = None if ident is None else sys._current_frames().get(ident)
    if frame is None:
        return []
    calls = [(call.filename, call.lineno or 0, call.name, call.line or "") for call in traceback.extract_stack(frame)]
    return calls_in_lines(calls, libraries()) + _workers_of_its_data_loader(frame) + _collective(frame, ranks)


def _collective(frame: FrameType, ranks: Collection[int]) -> list[str]:
    """The line is known in ``csrc/watch/diagnosis.cpp``."""
    for outer, _ in traceback.walk_stack(frame) if ranks else ():
        code = outer.f_code
        if code.co_filename.endswith(_COLLECTIVES) and "group" in code.co_varnames and code.co_name not in _BETWEEN_TWO:
            group = outer.f_locals.get("group") or dist.group.WORLD
            if isinstance(group, dist.ProcessGroup) and {*ranks} <= {*dist.get_process_group_ranks(group)}:
                return [f"(a collective of all ranks of the model: {code.co_name})"]
    return []


def _workers_of_its_data_loader(frame: FrameType) -> list[str]:
    for outer, _ in traceback.walk_stack(frame):
        if outer.f_code.co_filename.endswith(_LOADER):
            workers = getattr(outer.f_locals.get("self"), "_workers", None)
            if workers:
                states = ", ".join(f"{worker.pid} {state_of(worker.pid)}" for worker in workers)
                return [f"(workers of this data loader: {states})"]
    return []


def state_of(pid: int) -> str:
    """What a process of this machine does, as a verb in words."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "is gone"
    return _STATES.get(stat.rpartition(")")[2].split()[0], "is gone")
