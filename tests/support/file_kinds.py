"""Files of all kinds, as somebody else may put them where fastddp opens one."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

SPARSE = 64 * 2**30


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, SPARSE)


def _socket(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)  # a name of a socket may have a hundred characters
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)


def _pipe_behind_a_link(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


def _closed(path: Path) -> None:
    path.write_bytes(b"x")
    path.chmod(0)


def _of_somebody_else(path: Path) -> None:
    path.write_bytes(b"x")
    os.chown(path, 4711, 4711)


FILE_KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "pipe behind a link": _pipe_behind_a_link,
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "socket": _socket,
    "folder": lambda path: path.mkdir(),
    "empty": lambda path: path.touch(),
    "closed": _closed,
    "sparse": _sparse,
}
if os.geteuid() == 0:
    FILE_KINDS |= {
        "somebody else's": _of_somebody_else,
        "device": lambda path: os.mknod(path, 0o20600, os.makedev(1, 5)),  # /dev/zero
    }
