"""Turns a user's paths into runs, and files into recordings, by their contents."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastddp.tools.trace import chrome
from fastddp.tools.trace.as_json import holds_reports
from fastddp.tools.trace.chrome import Progress
from fastddp.tools.trace.recording import Recording, TraceError

SUFFIXES = (".json", ".json.gz", ".sqlite", ".nsys-rep")


@dataclass(frozen=True)
class Run:
    """Files that belong together, one or more ranks in each."""

    name: str
    files: tuple[Path, ...]
    is_folder: bool  # which may have files that are no traces


def find_inputs(paths: Sequence[Path]) -> list[Run | Path]:
    """Runs (a folder each; loose traces are one) and files of reports; TraceError: a path has no traces."""
    for path in paths:
        if not path.exists():
            raise TraceError(f"{path} does not exist.")
        if not (path.is_file() or path.is_dir()):
            raise TraceError(f"{path} is a pipe or a device, which can be read once only. Give a file or a folder.")
    names = _names_of_folders([path for path in paths if path.is_dir()])
    loose = [path for path in paths if not path.is_dir() and not holds_reports(path)]
    found: list[Run | Path] = []
    for path in paths:
        if path.is_dir():
            found.append(Run(names[path], _traces_in(path), True))
        elif path not in loose:
            found.append(path)
        elif path is loose[0]:
            name = path.name if len(loose) == 1 else f"{path.name} and {len(loose) - 1} more"
            found.append(Run(name, tuple(loose), False))
    return found


def _names_of_folders(folders: list[Path]) -> dict[Path, str]:
    """As many last parts of their paths as tell them apart."""
    parts = {folder: folder.resolve().parts for folder in folders}
    longest = max(map(len, parts.values()), default=0)
    for count in range(1, longest + 1):
        names = {folder: "/".join(of_folder[-count:]) for folder, of_folder in parts.items()}
        if len(set(names.values())) == len(set(parts.values())):
            return names
    return {folder: str(folder) for folder in folders}


def _traces_in(folder: Path) -> tuple[Path, ...]:
    files = [path for path in folder.iterdir() if path.name.endswith(SUFFIXES) and path.is_file()]
    files.sort(key=lambda path: (_by_numbers(path.name), path.name))
    exported = {path.with_suffix("") for path in files if path.suffix == ".sqlite"}
    files = [path for path in files if path.suffix != ".nsys-rep" or path.with_suffix("") not in exported]
    if not files:
        raise TraceError(f"{folder} has no trace: no file that ends in {', '.join(SUFFIXES)}.")
    return tuple(files)


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """A key that sorts rank2 before rank10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def read(path: Path, progress: Progress = lambda count: None, step_range: str | None = None) -> list[Recording]:
    """The recordings in a file; ``progress``: is told bytes; TraceError: it is no trace, or cannot be read."""
    from fastddp.tools.trace import nsight

    if holds_reports(path):
        raise TraceError(
            f"{path} is a report of this command, and no trace. To compare with it, name the file by itself."
        )
    try:
        with path.open("rb") as file:
            start = file.read(len(nsight.SQLITE))
        if path.suffix == ".nsys-rep":
            return nsight.read_report(path, step_range)
        if start == nsight.SQLITE:
            return nsight.read(path, step_range)
        return [chrome.read(path, progress, step_range)]
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}.") from None
