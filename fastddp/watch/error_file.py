"""Adds fastddp's reports to the file in which torch's ``@record`` writes the exception of a failed process.

``torchrun`` names the file in ``TORCHELASTIC_ERROR_FILE``, and reads it if the process ends with a status other than 0.
Nothing is written before an exception ends the process. So a step that stood still and went on leaves nothing, and no
healthy rank is blamed. ``torchrun`` calls the earliest error the root cause, and takes the moment at which it looks for
that of a rank without a file. So every error is written, and one that follows from another rank's counts as later.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fastddp.errors import see
from fastddp.watch.corruption import CorruptionError

_LATER = 10  # seconds: a rank is looked at soon after it has ended, and others may take a while to notice that
_OF_OTHERS = see("FD010"), see("FD015"), "gloo/transport/"  # the last: of a user's own collective


def leave_reports(reports: Iterable[str]) -> None:
    """Write into that file the exception that ends this process, and what fastddp knows of it.

    If ``@record`` has written the exception already, the reports are added to it: stall reports in JSON, as C++ writes
    them, of the steps in which this process ends. Empty ones are left out; they are only made if there is such a file.
    """
    path = _path()
    error: BaseException | None = getattr(sys, "last_value", None)
    if path is None or not (isinstance(error, Exception) or path.exists()):
        return
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # no second error now
        stalls = [json.loads(text) for text in dict.fromkeys(reports) if text]
        corruptions = [asdict(of.corruption) for of in _chain(error) if isinstance(of, CorruptionError)]
        whole = json.loads(path.read_text()) if path.exists() else _as_torch_writes(error)
        info = whole["message"]["extraInfo"]
        if any(isinstance(of, dist.DistError) or any(said in str(of) for said in _OF_OTHERS) for of in _chain(error)):
            info["timestamp"] = str(int(info["timestamp"]) + _LATER)
        for stall in stalls:
            if stall["message"] not in info["py_callstack"]:
                info["py_callstack"] += "\n" + stall["message"]
        if stalls or corruptions:
            whole["fastddp"] = {"stalls": stalls, "corruptions": corruptions}
        path.write_text(json.dumps(whole))


def _path() -> Path | None:
    """None: no file is named, or it is not a regular one, as /dev/null."""
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")
    path = Path(name) if name else None
    return None if path is None or (path.exists() and not path.is_file()) else path


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _as_torch_writes(error: BaseException | None) -> dict[str, Any]:
    """As elastic's ErrorHandler.record_exception, with one call; the traceback is on stderr already."""
    assert error is not None
    calls = "".join(traceback.format_exception(error, limit=1))
    extra = {"py_callstack": calls, "timestamp": str(int(time.time()))}
    return {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}
