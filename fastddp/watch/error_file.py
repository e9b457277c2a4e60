"""What torchrun shows of a process that has failed: a file, in which torch's ``@record`` writes its exception.

``torchrun`` names it in ``TORCHELASTIC_ERROR_FILE``, and reads it where the process has ended with another status than
0. So nothing is written before an exception ends the process: of a step that stood still and went on nothing is left,
and no rank is blamed that is well.
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

from fastddp.watch.corruption import CorruptionError

_VARIABLE = "TORCHELASTIC_ERROR_FILE"


def leave_reports(reports: Iterable[str]) -> None:
    """Write into that file what fastddp knows of the exception that ends this process; none of its own: do nothing.

    Where ``@record`` has written the exception already, the reports are added to it.

    Args:
        reports: stall reports in JSON, as C++ writes them, of steps in which this process ends; empty ones are left
            out. They are only asked for where there is such a file.
    """
    path = _path()
    error: BaseException | None = getattr(sys, "last_value", None)
    if path is None or (error is None and not path.exists()):
        return
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # this is no time for another
        stalls = [json.loads(text) for text in dict.fromkeys(reports) if text]
        corruptions = [asdict(of.corruption) for of in _chain(error) if isinstance(of, CorruptionError)]
        if not stalls and not corruptions:
            return
        whole = json.loads(path.read_text()) if path.exists() else _as_torch_writes(error)
        info = whole["message"]["extraInfo"]
        for stall in stalls:
            if stall["message"] not in info["py_callstack"]:
                info["py_callstack"] += "\n" + stall["message"]
        whole["fastddp"] = {"stalls": stalls, "corruptions": corruptions}
        path.write_text(json.dumps(whole))


def _path() -> Path | None:
    """None: nobody asks for it. What is no file, as /dev/null, is for nobody."""
    name = os.environ.get(_VARIABLE)
    path = Path(name) if name else None
    return None if path is None or (path.exists() and not path.is_file()) else path


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """It, and what it was raised from or behind."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _as_torch_writes(error: BaseException | None) -> dict[str, Any]:
    """What torch.distributed.elastic.multiprocessing.errors.ErrorHandler.record_exception writes."""
    assert error is not None
    calls = "".join(traceback.format_exception(error))
    extra = {"py_callstack": calls, "timestamp": str(int(time.time()))}
    return {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}
