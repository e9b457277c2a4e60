"""The faults: what the culprit does, and what has to be said about it. An entry each."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from bench.faults.network import SLOW

if TYPE_CHECKING:
    from bench.faults.rank import Run

EXCHANGES = ("plain", "fp16", "powersgd", "python-hook", "find-unused")
SHARDABLE = EXCHANGES[:2]
ALL_BUT_FIND_UNUSED = EXCHANGES[:-1]  # with it, a gradient that a rank leaves out is no fault
FOR_EVER = 1000.0  # seconds: the launcher ends the run long before
OUTAGE = 5.0  # seconds, of a network

Act = Callable[["Run"], None]

Place = Literal[
    "construction",  # before the module is wrapped
    "batch",  # before a batch is taken
    "step",  # before a step's forward
    "forward",
    "loss",
    "backward",  # after the gradients of the third layer, before those of the second one
    "hook",  # in a communication hook of Python's
    "after backward",
    "optimizer",
    "end",  # after the last step
]


@dataclass(frozen=True)
class Fault:
    """One way in which a run goes wrong."""

    name: str
    about: str  # what the culprit does
    act: Act
    at: Place
    causes: tuple[str, ...] = ()
    """Of a report's first finding, any of them; none and no `error`: there must be no report, or a soft one."""
    error: str = ""  # a regular expression: an error that a rank raises and that tells the cause
    says: str = ""  # a regular expression that the report's text has to match
    parameter: str = ""  # a regular expression of the parameter that has to be named, by the report or by the error
    culprits: tuple[int, ...] = (-1,)  # empty: whatever is done, all ranks do it
    ranks: tuple[int, ...] = (2, 4)
    exchanges: tuple[str, ...] = EXCHANGES
    store: Literal["launcher", "rank 0", "alone"] = "launcher"
    """Who serves the store; alone: a process that does nothing else."""
    network: Literal["", "one cable", "store apart"] = ""
    """Not empty: half of the ranks are on another machine; with or without another cable for the store alone."""
    reports: int = 1  # how many there are: one for each part of the job that cannot ask the other
    repeats: bool = False  # whether it happens in every step from the first one on, and not only in one
    several: bool = False  # whether there is a second wrapper, over a model of another size
    buffers: bool = False  # whether the model has a buffer, which a forward broadcasts
    sharded: bool = False  # whether fastddp's run has a ShardedOptimizer, whose part takes the step
    loader: bool = False  # whether batches come from torch's DataLoader with a worker
    may_be_soft: bool = False  # of a fault that is none: whether a soft report may say who is slow
    steps: int = 0  # how many there are; 0: as many as it takes
    at_end: Act | None = None  # what the culprit does after the last one, before a barrier

    @property
    def is_harmless(self) -> bool:
        """Whether nothing must be said, or only that a rank is slow."""
        return not self.causes and not self.error


def _kill(run: Run) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(run: Run) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _exit(status: int) -> Act:
    return lambda run: sys.exit(status)


def _sleep(run: Run) -> None:
    time.sleep(FOR_EVER)


def _ten_times_as_long(run: Run) -> None:
    time.sleep(9 * run.step_seconds)


def _gradients_drip(run: Run) -> None:
    """Gradients that come one by one, for longer than anybody's patience."""
    time.sleep(0.7 * run.patience)


def _worker_sleeps(run: Run) -> None:
    run.batches.stuck.value = 1


def _train_as_people_do(run: Run) -> None:
    """Pauses, garbage, checkpoints and evaluation: nobody is inside a step while others take long outside of it."""
    chance = random.Random(1000 * run.step + run.rank)
    if run.step % 60 == 30:
        time.sleep(chance.uniform(0, 0.6) * run.patience)
    if run.step % 25 == 0:
        gc.collect()
    if run.step % 50 == 49 and run.rank == 0:
        torch.save(run.module.state_dict(), Path(run.setting.folder, "checkpoint"))
    if run.step in (150, 225):
        if run.rank == 0:
            _evaluate(run, run.module if run.step == 150 else run.model)
        dist.barrier()


def _evaluate(run: Run, model: torch.nn.Module) -> None:
    until = time.monotonic() + 2.5 * run.patience
    with torch.no_grad():
        while time.monotonic() < until:
            model(run.inputs())
            time.sleep(run.step_seconds)


def _skip_backward(run: Run) -> None:
    run.skips = True


def _extra_forward(run: Run) -> None:
    run.model(run.inputs())


def _other_branch(run: Run) -> None:
    run.branch = True


def _freeze(run: Run) -> None:
    run.module.layers[1].weight.requires_grad_(False)


def _load_other_dtype(run: Run) -> None:
    loaded = {name: value.to(torch.bfloat16) for name, value in run.module.layers[1].state_dict().items()}
    run.module.layers[1].load_state_dict(loaded, assign=True)


def _convert_layer(run: Run) -> None:
    run.module.layers[1].to(torch.float64)


def _other_order(run: Run) -> None:
    run.wrappers.reverse()


def _own_collective(run: Run) -> None:
    dist.all_reduce(torch.zeros(1))


def _raise(run: Run) -> None:
    raise ValueError("broken on purpose")


def _lock_both_ways(run: Run) -> None:
    first, second, has_second = threading.Lock(), threading.Lock(), threading.Event()

    def other() -> None:
        with second:
            has_second.set()
            with first:
                pass

    with first:
        threading.Thread(target=other, daemon=True).start()
        has_second.wait()
        with second:
            pass


def _block_without_gil(run: Run) -> None:
    ctypes.CDLL(None).sleep(int(FOR_EVER))


def _hold_gil(run: Run) -> None:
    ctypes.PyDLL(None).sleep(int(FOR_EVER))


def _to_store(number: int) -> Act:
    """A signal to the process that serves the store."""

    def act(run: Run) -> None:
        os.kill(run.setting.store_pid, number)
        time.sleep(FOR_EVER)

    return act


def _stop_or_sleep(run: Run) -> None:
    if run.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(FOR_EVER)


def _cut_network(run: Run) -> None:
    """By another thread: the rank itself goes on, and only the network does not."""
    threading.Thread(target=run.machine.cut, daemon=True).start()


def _cut_network_for_a_while(run: Run) -> None:
    run.machine.cut_for(OUTAGE)


def _slow_network(run: Run) -> None:
    run.machine.limit(SLOW)


# What an error has to say of a process that is not there any more, without or with its rank.
ENDED = r"has ended|is gone|[Cc]onnection closed|[Cc]onnection reset"
# gloo ends the process that gets more bytes than it has room for.
OTHER_SIZE = r"preamble\.length"
# Of fastddp's errors, and of torch's.
NO_GRADIENT = "without a gradient|did not receive grad"
OF_PURPOSE = "broken on purpose"
SECOND_LAYER = r"layers\.1\."
EACH_WAY = r"from (left|right) \(ranks? [\d, ]+\) to 10\.77\.0\.[12]"


def _exits(name: str, about: str, at: Place) -> list[Fault]:
    return [
        Fault(f"exit-{status}-{name}", f"exit {status} {about}", _exit(status), at, ("gone",), ENDED)
        for status in (0, 1)
    ]


FAULTS = [
    Fault("none", "300 steps with pauses, checkpoints, and evaluation on rank 0 alone", _train_as_people_do, "step",
          culprits=(), repeats=True, steps=300),
    Fault("sigkill", "SIGKILL in forward", _kill, "forward", ("gone",), ENDED),
    Fault("sigstop", "SIGSTOP in forward", _stop, "forward", ("stopped",)),
    *_exits("forward", "in forward", "forward"),
    *_exits("backward", "in backward", "backward"),
    *_exits("between", "between two steps", "step"),
    Fault("slow", "every step takes ten times as long", _ten_times_as_long, "loss", repeats=True,
          may_be_soft=True),
    Fault("slow-backward", "gradients come, with long pauses", _gradients_drip, "backward", repeats=True,
          may_be_soft=True),
    Fault("data-loader", "the data loader's worker sleeps", _worker_sleeps, "batch", ("outside",),
          says="waits for its data loader", loader=True),
    Fault("asleep-forward", "sleeps in forward", _sleep, "forward", ("forward",)),
    Fault("asleep-loss", "sleeps between forward and backward", _sleep, "loss", ("loss",)),
    Fault("asleep-backward", "sleeps in backward", _sleep, "backward", ("backward",),
          parameter=r"lacks the gradient of layers\.1\.bias"),
    Fault("asleep-hook", "sleeps in its communication hook", _sleep, "hook", ("hook",), exchanges=("python-hook",)),
    Fault("asleep-after-backward", "sleeps after backward", _sleep, "after backward", ("after_backward",)),
    Fault("asleep-optimizer", "sleeps in the optimizer's step", _sleep, "optimizer", ("optimizer",)),
    Fault("asleep-sharded", "sleeps in the step of a sharded optimizer", _sleep, "optimizer", ("optimizer",),
          says="the parameters of bucket", exchanges=SHARDABLE, sharded=True),
    Fault("sigkill-sharded", "SIGKILL in the step of a sharded optimizer", _kill, "optimizer", ("gone",), ENDED,
          exchanges=SHARDABLE, sharded=True),
    Fault("batch-too-few", "has a batch fewer, without join", _sleep, "batch", ("outside",)),
    Fault("skipped-backward", "leaves out a backward, and then has no batch any more", _skip_backward, "loss",
          ("outside", "windows_apart"), "forward", steps=20, at_end=_sleep),
    Fault("extra-forward", "runs forward once more: no collective is in it", _extra_forward, "step"),
    Fault("extra-forward-buffers", "runs forward once more, which broadcasts buffers", _extra_forward, "step",
          ("forward", "other_collective", "other_order", "outside"), OTHER_SIZE, buffers=True),
    Fault("other-branch", "leaves out a layer, without find_unused_parameters", _other_branch, "forward",
          ("other_graph",), NO_GRADIENT, parameter=SECOND_LAYER, exchanges=ALL_BUT_FIND_UNUSED),
    Fault("frozen", "freezes a parameter after wrapping", _freeze, "step", ("other_graph",),
          "requires_grad|" + NO_GRADIENT, parameter=SECOND_LAYER, exchanges=ALL_BUT_FIND_UNUSED),
    Fault("dtype-loaded", "loads a layer in another dtype after wrapping", _load_other_dtype, "step",
          ("other_shapes", "other_graph"), "dtype|bfloat16|BFloat16|" + NO_GRADIENT, parameter=SECOND_LAYER),
    Fault("dtype-before", "wraps a layer of another dtype", _convert_layer, "construction", (), "dtype|float64",
          parameter=SECOND_LAYER),
    Fault("other-order", "uses two wrappers in another order", _other_order, "step",
          ("other_order", "other_collective", "outside"), OTHER_SIZE, several=True),
    Fault("own-collective", "calls a collective between forward and backward", _own_collective, "loss",
          ("loss", "other_collective"), OTHER_SIZE),
    Fault("hook-raises", "raises in its communication hook", _raise, "hook", (), OF_PURPOSE,
          exchanges=("python-hook",)),
    Fault("optimizer-raises", "raises in the optimizer's step", _raise, "optimizer", ("gone",), OF_PURPOSE),
    Fault("deadlock-python", "two threads lock two locks in different orders", _lock_both_ways, "loss", ("loss",),
          says="with second"),
    Fault("deadlock-c", "a call of C++ blocks, without the GIL", _block_without_gil, "forward", ("forward",),
          says="_block_without_gil"),
    Fault("gil-held", "a call of C++ blocks and holds the GIL", _hold_gil, "forward", ("forward",),
          says="GIL is held"),
    Fault("store-killed", "kills the store's host, and sleeps", _to_store(signal.SIGKILL), "forward", ("forward",),
          store="alone"),
    Fault("store-stopped", "stops the store's host, and sleeps", _to_store(signal.SIGSTOP), "forward", ("forward",),
          store="alone"),
    Fault("rank-0-asleep", "rank 0 sleeps, which serves the store", _sleep, "forward", ("forward",), culprits=(0,),
          store="rank 0"),
    Fault("rank-0-stopped", "SIGSTOP for rank 0, which serves the store", _stop, "forward", ("stopped",),
          culprits=(0,), store="rank 0"),
    Fault("rank-0-killed", "SIGKILL for rank 0, which serves the store", _kill, "forward", ("gone",), ENDED,
          culprits=(0,), store="rank 0"),
    Fault("two-culprits", "one is stopped, and one sleeps", _stop_or_sleep, "forward", ("stopped",),
          culprits=(1, 3), ranks=(4,)),
    Fault("network-outage", "the network loses everything for 5 s", _cut_network_for_a_while, "after backward",
          network="one cable", store="alone", steps=20),
    Fault("network-down", "the network loses everything, on the way to the store too", _cut_network, "after backward",
          ("network",), says=EACH_WAY, network="one cable", store="alone", reports=2),
    Fault("network-down-store-apart", "the network loses everything, but on the way to the store", _cut_network,
          "after backward", ("network",), says=EACH_WAY, network="store apart", store="alone"),
    Fault("network-slow", "the network carries a hundredth of what it did", _slow_network, "after backward",
          network="one cable", store="alone", may_be_soft=True, steps=8),
]  # fmt: skip


def fault_named(name: str) -> Fault:
    """The entry of that name."""
    return next(fault for fault in FAULTS if fault.name == name)
