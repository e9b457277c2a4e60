"""The measurements of a run: enough to plan its buckets again, for this network or another one."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from fastddp.documents.formats import DocumentFormat
from fastddp.errors import see
from fastddp.planning.model import Gradient, Link

HOW_TO_WRITE = 'train with bucket_cap_mb="auto" and call model.save_profile(path).'
MOST_RANKS = 10**9 - 1
_MOST = 10**18  # seconds, bytes, bytes a second: no real number is as large, and arithmetic with more might overflow
# Version 1 had no parameter_bytes, which cannot be derived. Version 2 had bandwidths that nothing supported.
_FILE = DocumentFormat("fastddp profile", 3, "profile", f"Write it anew: {HOW_TO_WRITE}")


@dataclass(frozen=True)
class ProfiledGradient:
    """One gradient of a step."""

    name: str
    """The name of its parameter in the module."""
    ready: float
    """Seconds from the beginning of forward until the gradient was ready on the last rank; a median over steps."""
    bytes: int
    """Bytes that travel."""
    parameter_bytes: int
    """Bytes of the parameter, which may be more than travel. Sizes of buckets are counted in these."""
    dtype: str
    """Of the parameter, as torch calls it without ``torch.``. Only gradients of one dtype and device share a bucket."""
    device: str
    """Of the parameter, as torch writes it."""

    def __post_init__(self) -> None:
        for text in ("name", "dtype", "device"):
            _check_text(text, getattr(self, text))
        _check_number("ready", self.ready)
        _check_whole("bytes", self.bytes)
        _check_whole("parameter_bytes", self.parameter_bytes)


@dataclass(frozen=True)
class Profile:
    """A measured step of a model: when gradients were ready, and what its process group's collectives cost.

    Raises:
        ValueError: there is no gradient, or a field has an impossible value.
    """

    gradients: tuple[ProfiledGradient, ...]
    """In the order of the module's parameters."""
    ranks: int
    """How many there were."""
    backend: str
    """Of the process group: "gloo", "nccl"."""
    lanes: int
    """The number of groups over which collectives are dealt."""
    link: Link | None
    """None: the measurements support no bandwidth, or there was one rank, from which nothing travels."""

    def __post_init__(self) -> None:
        if not self.gradients:
            raise ValueError("there are no gradients")
        _check_whole("ranks", self.ranks, 1, MOST_RANKS)
        _check_whole("lanes", self.lanes, 1)
        _check_text("backend", self.backend)
        if self.link is not None:
            _check_number("latency of link", self.link.latency)
            _check_number("bandwidth of link", self.link.bandwidth, 1)

    def model_gradients(self) -> list[Gradient]:
        """The gradients for :mod:`fastddp.planning.model`, in the same order."""
        return [Gradient(g.ready, g.bytes, (g.dtype, g.device)) for g in self.gradients]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile as JSON. All ranks may do so at the same time, since they write the same.

        Args:
            path: of the file.

        Raises:
            OSError: the file cannot be written.
        """
        _FILE.save(path, asdict(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile that :meth:`save` has written.

        Args:
            path: of the file.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is not JSON, or was cut short; it holds something else, a profile in another version of
                this format, or no valid profile.
        """
        content = _FILE.load(path)
        try:
            values = _values(cls, content, "it")
            of_link = values.pop("link")
            link = None if of_link is None else Link(**_values(Link, of_link, "link"))
            return cls(gradients=tuple(_gradients(values.pop("gradients"))), link=link, **values)
        except ValueError as error:
            raise ValueError(f"{path} holds no valid profile: {error}. {_FILE.remedy}" + see("FD026")) from None


def _gradients(entries: object) -> Iterator[ProfiledGradient]:
    if not isinstance(entries, list):
        raise ValueError(f"gradients is {reprlib.repr(entries)}, not a list")
    for number, entry in enumerate(entries):
        values = _values(ProfiledGradient, entry, f"gradient {number}")
        try:
            yield ProfiledGradient(**values)
        except ValueError as error:
            raise ValueError(f"of gradient {number}, {error}") from None


def _values(kind: type, entry: object, where: str) -> dict[str, Any]:
    """The value in ``entry`` of each field of ``kind``."""
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is {reprlib.repr(entry)}, not an object with names")
    names = [field.name for field in fields(kind)]
    for name in names:
        if name not in entry:
            raise ValueError(f"{where} has no {name!r}")
    return {name: entry[name] for name in names}


# A file's values may be of any type, so these check them first.


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {reprlib.repr(value)}, not a text")


def _check_number(name: str, value: Any, least: int = 0) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not least <= value <= _MOST:
        raise ValueError(f"{name} is {reprlib.repr(value)}, not a number from {least} to {_MOST:g}")


def _check_whole(name: str, value: Any, least: int = 0, most: int = _MOST) -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or not least <= value <= most:
        raise ValueError(f"{name} is {reprlib.repr(value)}, not a whole number from {least} to {most:g}")
