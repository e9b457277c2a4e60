"""What every bench shares: fair order, order statistics, the facts of the machine, tables and JSON rows."""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.util
import json
import os
import platform
import re
import shlex
import statistics
import string
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch.multiprocessing.spawn import spawn

ROOT = Path(__file__).resolve().parent.parent

Row = dict[str, Any]


def spawn_ranks(
    measure: Callable[..., list[Row]],
    arguments: Sequence[Any],
    ranks: int,
    threads: int,
    backend: str = "gloo",
    enter: Callable[[int], None] | None = None,
) -> list[Row]:
    """What `measure`, called with these arguments on each of so many fresh processes in one group, returns on rank 0.

    Everything is pickled. Each rank calls `enter` with its number before it meets the others.
    """
    # Read when torch is imported, which the ranks do anew; threads that torch did not start (gloo's) obey it too.
    os.environ["OMP_NUM_THREADS"] = str(threads)
    with tempfile.TemporaryDirectory() as meeting_place:
        # As daemons they end with this process, however it ends.
        call = partial(measure, *arguments)
        spawn(_spawned_rank, (ranks, threads, backend, meeting_place, enter, call), nprocs=ranks, daemon=True)
        rows: list[Row] = json.loads(Path(meeting_place, "rows.json").read_text())
    return rows


def _spawned_rank(
    rank: int,
    ranks: int,
    threads: int,
    backend: str,
    meeting_place: str,
    enter: Callable[[int], None] | None,
    measure: Callable[[], list[Row]],
) -> None:
    if enter:
        enter(rank)
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(threads)
    dist.init_process_group(backend, f"file://{meeting_place}/store", rank=rank, world_size=ranks)
    rows = measure()
    if rank == 0:
        Path(meeting_place, "rows.json").write_text(json.dumps(rows))
    dist.barrier()  # a rank that leaves early can abort one that still uses the group
    dist.destroy_process_group()


def of_all_ranks(row: Row) -> list[Row]:
    """A collective: each rank's row."""
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, row)
    return rows


def round_order(contestants: int, round_index: int) -> list[int]:
    """The order in which contestants 0..n-1 take their turns in one round.

    A Williams design: over n rounds (2n where n is odd) everyone takes every place, and everyone follows everyone else,
    equally often. A plain rotation would give each contestant the same predecessor, with its hot or cold caches and its
    state of the allocator, in every round but one.

    >>> [round_order(4, r) for r in range(4)]
    [[0, 1, 3, 2], [1, 2, 0, 3], [2, 3, 1, 0], [3, 0, 2, 1]]
    """
    zigzag = [0]
    low, high = 1, contestants - 1
    while low <= high:
        zigzag.append(low)
        if low != high:
            zigzag.append(high)
        low, high = low + 1, high - 1
    order = [(place + round_index) % contestants for place in zigzag]
    mirrored = contestants % 2 == 1 and (round_index // contestants) % 2 == 1
    return order[::-1] if mirrored else order


@contextmanager
def no_collection() -> Iterator[None]:
    """Python's cyclic garbage is collected before and not within.

    What is there before is not looked at when a caller collects within: with torch imported that takes 0.1 s each time.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def turns(
    contestants: int, rounds: range, advance: Callable[[], None] = lambda: None
) -> Iterator[tuple[int, int, int]]:
    """Round after round, whose turn it is: the round's place among all, its number, and the contestant's.

    Cycles, which can hold an autograd graph and its gradients, are freed between rounds and never within one.
    """
    with no_collection():
        for place, number in enumerate(rounds):
            for contestant in round_order(contestants, place):
                yield place, number, contestant
            gc.collect()
            advance()


@dataclass(frozen=True)
class Percentiles:
    """Order statistics of one contestant's samples, in the samples' unit."""

    p10: float
    median: float
    p90: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Percentiles:
        """Interpolated between neighbours; a single sample is all three."""
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        deciles = statistics.quantiles(samples, n=10, method="inclusive")
        return cls(deciles[0], statistics.median(samples), deciles[-1])

    def columns(self, unit: str, scale: float = 1.0) -> Row:
        """As rows have them, times `scale`.

        >>> Percentiles(1.0, 2.0, 3.0).columns("us", 1e6)
        {'median_us': 2000000.0, 'p10_us': 1000000.0, 'p90_us': 3000000.0}
        """
        return {f"{name}_{unit}": scale * getattr(self, name) for name in ("median", "p10", "p90")}


def paired_ratio(samples: Sequence[float], reference: Sequence[float]) -> float:
    """The median of the ratios round by round: what slowed one whole round down cancels out."""
    return statistics.median(sample / other for sample, other in zip(samples, reference, strict=True))


def paired_difference(samples: Sequence[float], reference: Sequence[float]) -> float:
    """The same of differences."""
    return statistics.median(sample - other for sample, other in zip(samples, reference, strict=True))


def rounded(row: Row, digits: int) -> Row:
    """Its floats with so many digits after the point."""
    return {key: round(value, digits) if isinstance(value, float) else value for key, value in row.items()}


def grouped(rows: Iterable[Row], *columns: str) -> dict[tuple[Any, ...], list[Row]]:
    """By what these columns hold, in the order in which it comes first.

    >>> list(grouped([{"a": 1, "b": 2}, {"a": 1, "b": 3}], "a"))
    [(1,)]
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(column) for column in columns), []).append(row)
    return groups


def environment(module: str, device: torch.device, threads: int) -> Row:
    """The columns that say where, when and from what commit and command a row comes."""
    commit, is_dirty = commit_of_this_copy()
    row: Row = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": _command(module),
        "commit": commit or "unknown",
        "dirty": is_dirty,
        "host_system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_1m_at_start": round(os.getloadavg()[0], 2),
        "gpu": None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": device.type,
        "threads": threads,
    }
    if device.type == "cuda":
        row["gpu"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(device)}"
    return row


# What `make gpu-carry` leaves beside the fastddp that it compiled: the commit, and whether something differs from it.
CARRIED_COMMIT = ROOT / "build" / "first-run" / "commit.json"


def commit_of_this_copy() -> tuple[str, bool | None]:
    """The commit, empty if nobody knows it; and whether something differs from it that is not a result."""
    fastddp = importlib.util.find_spec("fastddp")
    if fastddp is not None and CARRIED_COMMIT.parent in Path(fastddp.origin or "").parents:
        carried: tuple[str, bool | None] = tuple(json.loads(CARRIED_COMMIT.read_text()))
        return carried
    commit = _git("rev-parse", "HEAD")
    # Results of the run before, not committed yet, change nothing that is measured.
    return commit, bool(_git("status", "--porcelain", "--", ".", ":!bench/results")) if commit else None


def _git(*arguments: str) -> str:
    """What git answers about the repository, or an empty string where there is no git, repository or commit."""
    try:
        result = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return result.stdout.strip()


def _command(module: str) -> str:
    launcher = ["python"]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        launcher = ["torchrun", f"--nproc-per-node={os.environ['LOCAL_WORLD_SIZE']}"]
    return shlex.join([*launcher, "-m", module, *sys.argv[1:]])


def _cpu_model() -> str:
    """Linux's name of the CPU; `platform.processor()` is empty on many distributions."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def resident(what: str) -> float:
    """Of this process, in MiB: VmRSS is now, VmHWM was at most."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def describe(row: Row) -> str:
    """The facts of `environment` that a reader of a table needs, in three lines."""
    where = row["gpu"] or f"{row['cores']} cores"
    dirty = {True: " + uncommitted changes", False: "", None: ""}[row["dirty"]]
    return (
        f"{row['cpu']}, {where}, {row['memory_gib']} GiB, load {row['load_1m_at_start']} at the start\n"
        f"torch {row['torch']}, Python {row['python']}, {row['threads']} thread(s) a rank, {row['date']}\n"
        f"commit {row['commit'][:12]}{dirty}: {row['command']}"
    )


def parser(module: str, about: str | None) -> argparse.ArgumentParser:
    """Of `python -m module`, with what its docstring says before the first colon."""
    return argparse.ArgumentParser(prog=f"python -m {module}", description=(about or "").partition(":")[0] + ".")


_COMMON = {
    "rounds": "that count",
    "warmup": "rounds before",
    "ranks": "processes on this machine, with gloo on the CPU",
    "threads": "CPU threads of each rank",
    "seed": "of what is drawn",
}


def add_common(to: argparse.ArgumentParser, a_row_for: str, **defaults: int) -> None:
    """`--json`, and those of the arguments that many benches have that get a default here."""
    for name, default in defaults.items():
        to.add_argument(f"--{name}", type=int, default=default, help=f"{_COMMON[name]} (default: %(default)s)")
    to.add_argument("--json", type=Path, metavar="FILE", help=f"write a row for each {a_row_for}")


def add_selection(to: argparse.ArgumentParser, things: Sequence[Any], *flags: str) -> None:
    """An argument that takes some of these by `name`; the end of the help says what each is `about`."""
    names, word = [thing.name for thing in things], flags[0].lstrip("-")
    to.epilog = f"{word}s (default: all): " + "; ".join(f"{thing.name}: {thing.about}" for thing in things)
    to.add_argument(*flags, nargs="+", choices=names, default=names, metavar=word.upper(), help="default: all")


def console() -> Console:
    """Standard output, wide enough for the tables even where it is a file or a pipe."""
    out = Console()
    return out if out.is_terminal else Console(width=140)


class _Cells(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        """A dash where there is nothing, whatever the format; what is not true is to be seen."""
        if value is None or isinstance(value, bool):
            return {None: "-", True: "yes", False: "NO"}[value]
        return str(super().format_field(value, format_spec))


def cells(templates: Iterable[str], row: Row) -> list[str]:
    """What format strings make of a row.

    >>> cells(["{name}", "{median_ms:.2f}", "{p10_ms:.2f}"], {"name": "torch", "median_ms": 1.234, "p10_ms": None})
    ['torch', '1.23', '-']
    """
    return [_Cells().vformat(template, (), row) for template in templates]


def row_table(title: str, columns: Iterable[tuple[str, str]], rows: Iterable[Row], left: int = 1) -> Table:
    """A line for each row; of each column the heading, and the format string of its cells."""
    headings, templates = zip(*columns, strict=True)
    return table(title, headings, [cells(templates, row) for row in rows], left)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> Table:
    """A table whose first `left` columns are text and whose others are numbers; cells may have rich's markup."""
    result = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        result.add_column(column, justify="left" if index < left else "right", no_wrap=True)
    for row in rows:
        result.add_row(*row)
    return result


def write_json(path: Path, rows: Sequence[Row]) -> None:
    """A JSON list with a row a line, so that two result files can be compared with diff."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f"[\n{lines}\n]\n")


def report(rows: Sequence[Row], tables: Iterable[Any], path: Path | None) -> None:
    """How every bench ends: where and what it measured, its tables, and its rows in a file if there is to be one."""
    out = console()
    out.print(describe(rows[0]), highlight=False)
    for one in tables:
        out.print(one)
    if path is not None:
        write_json(path, rows)


def exit_if_wrong(rows: Iterable[Row], name: str, says: str) -> None:
    """Ends the program with 1 where a row says WRONG; `name` is a format string of what is at fault."""
    wrong = dict.fromkeys(name.format(**row) for row in rows if "WRONG" in row.values())
    if wrong:
        sys.exit(f"{says}: {', '.join(wrong)}")


@contextmanager
def progress(title: str, total: int, show: bool) -> Iterator[Any]:
    """A progress bar on standard error, moved by calling what this yields.

    It is drawn only between rounds: rich's own refresh thread would take the interpreter's lock in the middle of a
    measured step.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True, disable=not show)
    with bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.update(task, advance=1, refresh=True)
