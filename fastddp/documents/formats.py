"""JSON files that begin with their format: its name and version, then the content.

A file may come from anywhere, and hold anything. It is read up to a size and a depth, so that reading takes bounded
memory and time. If it is no such file, a ValueError says so, with a remedy.
"""

from __future__ import annotations

import json
import os
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastddp.documents.typed_json import parsed, shown
from fastddp.errors import see

MIB = 2**20


@dataclass(frozen=True)
class DocumentFormat:
    """The format of one kind of file."""

    name: str
    version: int
    noun: str  # the name of its content in errors
    remedy: str  # how to get a file that can be read
    largest: int = 16 * MIB  # that is read: a plan of 100,000 parameters, which takes up to 30 times as much memory

    def save(self, path: str | os.PathLike[str], content: dict[str, Any]) -> None:
        """Write ``content`` to ``path`` in ASCII, so that no reader finds half of it.

        Raises OSError, or ValueError if a number is not finite, which JSON cannot express.
        """
        whole = {"format": self.name, "version": self.version, **content}
        text = json.dumps(whole, indent=1, allow_nan=False) + "\n"
        path = Path(path)
        if path.exists() and not path.is_file():  # a device or a pipe, which must not be replaced by a file
            path.write_text(text, encoding="ascii")
            return
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            temporary.write_text(text, encoding="ascii")
            temporary.replace(path)
        except OSError as error:  # name the path that was asked for
            raise OSError(error.errno, error.strerror, str(path)) from None
        finally:
            with suppress(OSError):
                temporary.unlink()

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Read a file that :meth:`save` has written.

        Raises OSError, or ValueError if the file is too large or too deep, no JSON, or of another format or version.
        """
        path = Path(path)
        # A pipe that nobody writes to is not waited for: it is empty.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            os.set_blocking(file.fileno(), True)
            data = file.read(self.largest + 1)  # its stated size is not trusted
        if len(data) > self.largest:
            raise ValueError(
                f"{path} holds no {self.noun}: it has more than {self.largest // MIB} MiB, and none is so large. "
                f"{self.remedy}" + see("FD026")
            )
        try:
            content = parsed(data)
        except ValueError as error:
            raise ValueError(
                f"{path} holds no {self.noun}: it is not JSON, or it was cut short ({error}). {self.remedy}"
                + see("FD026")
            ) from None
        if not isinstance(content, dict) or content.get("format") != self.name:
            raise ValueError(
                f'{path} holds no {self.noun}: it does not begin with "format": "{self.name}".' + see("FD026")
            )
        if content.get("version") != self.version:
            raise ValueError(
                f"{path} holds a {self.noun} of version {shown(content.get('version'))}, and this fastddp reads "
                f"version {self.version}. {self.remedy}" + see("FD026")
            )
        return content
