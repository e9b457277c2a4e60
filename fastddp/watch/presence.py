"""Says once that fastddp is there: a line about the first wrapper, or that a script under it has made none."""

from __future__ import annotations

import logging
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from fastddp._version import __version__
from fastddp.exchange.in_force import InForce
from fastddp.watch.options import Watch

to_stderr = False  # whether whoever started the job asked for fastddp: a line shows them that they have it
starts_processes = False  # whether this process has started others afresh, which may have the wrappers

_has_wrapper = mmap.mmap(-1, 1)  # its byte is 1 once this process has made a wrapper, or one that was forked from it
_pids: set[int] = set()  # of this process, once it has told of its first wrapper
_logger = logging.getLogger("fastddp")


def tell(now: InForce, watch: Watch, hook: Callable[..., object] | None) -> None:
    """On rank 0, a line about the first wrapper of this process; ``hook``: the one that it was given."""
    is_first = os.getpid() not in _pids
    _pids.add(os.getpid())
    _has_wrapper[0] = 1
    if is_first:
        say_on_rank_0(_line(now, watch, hook), now.process_group)


def say_on_rank_0(text: str, group: dist.ProcessGroup) -> None:
    """Tell whoever asked for fastddp; ``group``: for a process without a default one."""
    if (dist.get_rank() if dist.is_initialized() else group.rank()) == 0:
        _say(text)


@contextmanager
def telling_if_absent() -> Iterator[None]:
    """After the context, which runs a script, say so if it has made no wrapper. An error of the script is enough."""
    try:
        yield
    except SystemExit as end:
        if not end.code:
            _tell_if_absent()
        raise
    _tell_if_absent()


def _tell_if_absent() -> None:
    if not _has_wrapper[0] and not starts_processes and os.environ.get("RANK", "0") == "0":
        _say(
            "the script has ended without a DistributedDataParallel, so nothing of it ran under fastddp. (A class that "
            "the script's own code derives from torch's stays torch's.)"
        )


def _line(now: InForce, watch: Watch, hook: Callable[..., object] | None) -> str:
    setting = now.setting
    megabytes = sum(parameter.nbytes for parameter in setting.parameters) / 2**20
    backend = dist.get_backend(now.process_group)
    faults = ("stalls", watch.stall), ("corruption", watch.corruption), ("replicas that differ", watch.audit_every)
    return ", ".join(
        [
            f"version {__version__} in place of torch's DDP: {_ranks(now.process_group.size())} over {backend}",
            f"{len(setting.parameters)} gradients ({megabytes:.1f} MiB) in {_count(len(setting.plan), 'bucket')}",
            *([] if hook is None else [f"hook {hook.__name__}"]),
            f"watching for {' and '.join(fault for fault, choice in faults if choice is not None) or 'nothing'}",
        ]
    )


def _ranks(count: int) -> str:
    on_node = os.environ.get("LOCAL_WORLD_SIZE", "")  # torchrun's
    nodes = -(-count // int(on_node)) if on_node.isdigit() and int(on_node) else 1
    return _count(count, "rank") + (f" on {nodes} nodes" if nodes > 1 else "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _say(text: str) -> None:
    if to_stderr:
        print(f"fastddp: {text}", file=sys.stderr, flush=True)
    else:
        _logger.info(text)
