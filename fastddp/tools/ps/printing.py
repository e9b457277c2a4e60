"""Live ranks in words, as a table and as JSON."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fastddp.tools.ps.live import FOLDER, LiveRank, Node, in_jobs
from fastddp.tools.trace.wording import LONGEST_NAME, UNKNOWN, printable, shortened

VERSION = 3  # of the JSON: it changes with the fields' names and meaning

NOTHING = (
    "No ranks to see: no process of this user on this node has a DistributedDataParallel of fastddp yet, or those that "
    "have one are in another container."
)
NO_SHARED_MEMORY = f"No ranks to see: there is no {FOLDER} here, where ranks say what they are doing."
_GONE = (
    "Gone: killed, or ended in haste, and this is what it did last. fastddp ps --remove-gone removes such status files."
)

_PROCESS = {
    "runs": "runs",
    "stopped": "stopped",
    "uninterruptible": "waits in the kernel",
    "gone": "gone",
    "unknown": "in another container",
}
_STYLES = {"gone": "red", "stopped": "red", "long": "yellow", None: ""}


def in_words(rank: LiveRank) -> str:
    """What the rank is doing, or waits for."""
    match rank.doing:
        case "nothing":
            return "no forward yet"
        case "forward":
            return "in forward, without gradients" if rank.window == "finished" else "in forward"
        case "after_forward":
            # An evaluated model gets no backward.
            return "after a forward without gradients" if rank.window == "finished" else "between forward and backward"
        case "backward":
            return _in_backward(rank)
        case "tick":
            return _in_tick(rank)
        case "finish":
            return f"waits for {_bucket_of(rank)}"
        case "closing" | "agree":
            return (
                "waits for the end of the step" if rank.doing == "closing" else "waits for all ranks, beside backward"
            )
        case "after_backward":
            return _after_backward(rank)
        case "optimizer":
            return "in the optimizer"
        case "gather":
            return f"waits for parameters of {_bucket_of(rank)}"
        case "after_optimizer":
            return "outside: data loading, evaluation or other code"


def _in_backward(rank: LiveRank) -> str:
    if rank.window not in ("armed", "reducing"):
        return "in a backward without synchronisation"
    if rank.missing:
        are = "is" if len(rank.missing) == 1 else "are"
        return f"in backward: {_gradients(rank)} of bucket {rank.bucket} {are} missing ({_names(rank)})"
    return "in backward: all gradients have come" if rank.all_came else "in backward"


def _in_tick(rank: LiveRank) -> str:
    if rank.runs_user_code:
        return "in a communication hook" + ("" if rank.bucket is None else f", bucket {rank.bucket}")
    return "sends the last buckets" if rank.bucket is None else f"sends {_bucket_of(rank)}"


def _after_backward(rank: LiveRank) -> str:
    if rank.window == "failed":
        return "after a step that failed"
    if rank.window == "accumulating":
        return "after a backward without synchronisation"
    if rank.missing:
        return f"after a backward without {_gradients(rank)} ({_names(rank)})"
    return "between backward and the optimizer"


def _bucket_of(rank: LiveRank) -> str:
    return "a bucket" if rank.bucket is None else f"bucket {rank.bucket} of {rank.buckets}"


def _gradients(rank: LiveRank) -> str:
    count = len(rank.missing)
    return f"{count} gradient{'' if count == 1 else 's'}"


def _names(rank: LiveRank) -> str:
    first = shortened(printable(rank.missing[0]), LONGEST_NAME)
    return first if len(rank.missing) == 1 else f"{first}, ..."


def duration(seconds: float) -> str:
    """4.2 s, 12 min 3 s, 3 h 5 min."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 59.95 else "1 min 0 s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def page(node: Node, with_gone: bool = True) -> RenderableType:
    """The page for a screen: a table a job. Without ``with_gone``, jobs that are gone share a line."""
    jobs = in_jobs(node.ranks)
    folded = [] if with_gone else [job for job in jobs if all(rank.process == "gone" for rank in job)]
    old = [] if with_gone else [of for of in node.unreadable if of.process == "gone"]
    parts: list[RenderableType] = []
    for job in jobs:
        if job not in folded:
            parts += [Text(heading(job), style="bold"), _table(job), Text("")]
    parts += [Text(printable(of.problem), style="yellow") for of in node.unreadable if of not in old]
    if folded or old:
        parts.append(Text(_of_gone(folded, len(old))))
    elif any(rank.process == "gone" for rank in node.ranks):
        parts.append(Text(_GONE))
    return Group(*parts) if parts else Text(NOTHING if FOLDER.is_dir() else NO_SHARED_MEMORY)


def heading(job: Sequence[LiveRank]) -> str:
    """The job's script, its start, how many of its ranks are here, and how far they are."""
    first = job[0]
    steps = [rank.step for rank in job]
    here, whole = len({(rank.rank, rank.pid) for rank in job}), max(rank.ranks for rank in job)
    started = None if first.started is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(first.started))
    parts = [
        printable(first.script) or "a script without a name",
        *([] if started is None else [f"started {started}"]),
        f"{here} of {whole} rank{'' if whole == 1 else 's'} on {first.host}",
        *([f"generation {first.generation}"] if first.generation else []),
        f"step {min(steps):,}" + (f" to {max(steps):,}" if max(steps) > min(steps) else ""),
    ]
    return ", ".join(parts)


def _of_gone(jobs: Sequence[Sequence[LiveRank]], unreadable: int) -> str:
    names = ", ".join(dict.fromkeys(printable(job[0].script) or "a script without a name" for job in jobs))
    parts = [f"{len(jobs)} job{'' if len(jobs) == 1 else 's'} that ended in haste ({names})"] if jobs else []
    if unreadable:
        parts.append(f"{unreadable} status file{'' if unreadable == 1 else 's'} of another version, of no process")
    return f"{' and '.join(parts)}: fastddp ps --all shows what was done last, --remove-gone forgets it."


def _table(ranks: Sequence[LiveRank]) -> Table:
    # Wrappers' numbers are shown only if a process has several.
    has_several = max(Counter((rank.pid, rank.process == "unknown") for rank in ranks).values()) > 1
    # Without lines between columns it fits 80 characters.
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for heading in ("rank", "pid", *(["wrapper"] if has_several else []), "process", "step"):
        table.add_column(heading, no_wrap=heading != "process", justify="right" if heading == "step" else "left")
    table.add_column("doing", overflow="fold")
    table.add_column("for", no_wrap=True, justify="right")
    table.add_column("last gradient", overflow="fold", max_width=LONGEST_NAME + len(" (bucket 999)"))
    table.add_column("steps/s", no_wrap=True, justify="right")
    for rank in ranks:
        cells = [
            f"{rank.rank} of {rank.ranks}",
            str(rank.pid),
            *([str(rank.wrapper)] if has_several else []),
            _PROCESS[rank.process],
            f"{rank.step:,}",
            in_words(rank),
            duration(rank.seconds),
            _last_gradient(rank),
            _three_digits(rank.steps_per_second),
        ]
        # As Text: brackets in a name are then no markup.
        table.add_row(*(Text(cell) for cell in cells), style=_STYLES[rank.concern])
    return table


def _last_gradient(rank: LiveRank) -> str:
    if rank.last_parameter is None:
        return UNKNOWN
    name = shortened(printable(rank.last_parameter), LONGEST_NAME)
    return name if rank.last_bucket is None else f"{name} (bucket {rank.last_bucket})"


def _three_digits(number: float | None) -> str:
    if number is None:
        return UNKNOWN
    return f"{number:,.{0 if number >= 100 else 1 if number >= 10 else 2}f}"


def as_json(node: Node) -> str:
    """One document, in ASCII (docs/commands.md)."""
    whole = {
        "format": "fastddp ps",
        "version": VERSION,
        "ranks": [_values(rank) for rank in node.ranks],
        "unreadable": [asdict(of) for of in node.unreadable],
    }
    return json.dumps(whole, indent=1, allow_nan=False)


def _values(rank: LiveRank) -> dict[str, Any]:
    known = asdict(rank)
    del known["all_came"], known["runs_user_code"]  # in_words has them
    also = {"in_words": in_words(rank), "steps_per_second": rank.steps_per_second, "concern": rank.concern}
    return known | also
