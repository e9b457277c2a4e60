"""One process of a node compiles a kernel; the others wait and find it in Triton's cache.

Note [Compiled once a node]: the ranks of a node share Triton's cache folder, and want the same kernels at the same
moment. Triton looks into its cache before it compiles. So a rank that waits for a file lock while another rank compiles
finds the result there. Each kernel has its own lock. The system releases the lock of a process that dies. The lock only
saves work: if a rank cannot get it in time, or at all (the file system has no locks, or the folder may not be written),
it compiles for itself.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

PATIENCE_SECONDS = 60.0
"""How long a rank waits for another rank: many times what the slowest kernel takes."""


@contextmanager
def alone_on_this_node(folder: Path, what: str, patience: float = PATIENCE_SECONDS) -> Iterator[None]:
    """Hold the lock of ``what`` while the body runs; go on without it if it cannot be had.

    Args:
        folder: Triton's cache, which is made if it is not there.
        what: any text that names a kernel, equal in all processes that would compile the same.
        patience: seconds to wait for the lock.
    """
    locks = folder / "fastddp-locks"
    lock = FileLock(locks / hashlib.sha256(what.encode()).hexdigest()[:32], timeout=patience)
    try:
        locks.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except (OSError, NotImplementedError):  # filelock's Timeout is an OSError
        yield
        return
    try:
        yield
    finally:
        lock.release()
