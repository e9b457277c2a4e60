"""Another process stops rank 1 for some seconds, by SIGSTOP, while a model trains. What do the other ranks say?"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.nn.parallel
from torch import nn

import fastddp
from report import PATIENCE, STOPPED_RANK, Span, Stall
from training import Contestant, Job, Training, build_gpt, ddp_options, enter, train_step

STEPS_BEFORE = 20  # more than the watch takes its idea of a long step from: the first steps take longer
STEPS_AFTER = 12
LONGEST_STOP = 40.0  # if no report comes
LOOK_ON = 1.0  # for which the rank stays stopped after the report
# Arguments: a process; for how many seconds it is stopped at most; a file whose coming ends that, and after how many.
STOP = """
kill -STOP "$1"
timeout "$2" sh -c 'until [ -e "$0" ]; do sleep 0.1; done' "$3" && sleep "$4"
kill -CONT "$1"
"""


class Listener:
    """Keeps the report that this rank makes, if it is the one that does, and lets the stopped rank go on."""

    def __init__(self, goes_on: Path) -> None:
        self.goes_on = goes_on
        self.report: dict[str, Any] | None = None
        self.at: float | None = None

    def __call__(self, report: fastddp.StallReport) -> None:
        """Called by the watch, from a thread of its own."""
        if self.report is None and not report.is_soft:
            self.report, self.at = json.loads(report.to_json()), time.time()
            self.goes_on.touch()


def stop_under_both(arguments: Namespace, job: Job, training: Training) -> tuple[Stall, Stall]:
    """Under fastddp until its report is there, then under torch's DDP for as long."""
    folder = common_folder(job)
    listener, nobody = Listener(folder / "reported"), Listener(folder / "never")
    watch = fastddp.Watch(stall=listener, patience=PATIENCE)

    def model_under(ddp: Callable[..., nn.Module], **options: Any) -> nn.Module:
        return ddp(build_gpt(arguments, job), **ddp_options(arguments, job), **options)

    ours = stop_under(
        "fastddp", model_under(fastddp.DistributedDataParallel, watch=watch), training, LONGEST_STOP, listener
    )
    theirs = stop_under(
        "torch's DDP", model_under(torch.nn.parallel.DistributedDataParallel), training, ours.seconds, nobody
    )
    if job.rank == 0:
        shutil.rmtree(folder)
    return ours, theirs


def common_folder(job: Job) -> Path:
    """A new folder, of one name on all ranks. On another machine there is none: there the longest stop ends it."""
    names = [tempfile.mkdtemp(prefix="fastddp-demo-") if job.rank == 0 else None]
    dist.broadcast_object_list(names, src=0, device=job.device)
    return Path(str(names[0]))


def stop_under(name: str, model: nn.Module, training: Training, longest: float, listener: Listener) -> Stall:
    """Train, stop the rank, train on, and gather what all ranks saw and said."""
    dist.barrier()
    with all_that_is_said() as said:
        spans = train_with_a_stop(enter(name, model), training, longest, listener.goes_on)
        dist.barrier()
    ranks: list[Any] = [None] * training.job.world_size
    dist.all_gather_object(ranks, (spans, "".join(said), listener.report, listener.at))
    report, at = next(((report, at) for _, _, report, at in ranks if report), (None, None))
    return Stall(name, [spans for spans, *_ in ranks], "".join(text for _, text, *_ in ranks), report, at)


def train_with_a_stop(contestant: Contestant, training: Training, longest: float, goes_on: Path) -> list[Span]:
    """The steps of this rank. No barrier between them, so the others wait for the stopped one where training does."""
    spans: list[Span] = []
    for step in range(STEPS_BEFORE + STEPS_AFTER):
        stops = step == STEPS_BEFORE
        batch = training.batch(step)
        if stops and training.job.rank == STOPPED_RANK:
            spans.append(stop_this_process(longest, goes_on))
        begin = time.time()
        train_step(contestant, batch)
        training.job.synchronize()
        waits = stops and training.job.rank != STOPPED_RANK
        spans.append(Span("waits" if waits else "step", begin, time.time()))
    return spans


def stop_this_process(longest: float, goes_on: Path) -> Span:
    """Have a shell stop this process and let it go on.

    The shell has a session of its own, so Ctrl-C does not end it before it lets this process go on.
    """
    begin = time.time()
    arguments = (os.getpid(), longest, goes_on, LOOK_ON)
    subprocess.run(["sh", "-c", STOP, "sh", *map(str, arguments)], start_new_session=True, check=True)
    return Span("stopped", begin, time.time())


@contextmanager
def all_that_is_said() -> Iterator[list[str]]:
    """Keep what this process writes to stderr, its C++ included: the list has it at the end."""
    said: list[str] = []
    sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield said
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            said.append(file.read().decode(errors="replace"))
            if sys.exc_info()[0]:  # nobody will look at the list
                sys.stderr.write(said[0])
