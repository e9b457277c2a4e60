"""Whether communication is hidden behind backward, of torch's DDP and of fastddp, in processes of their own.

With one rank, an allreduce is a sleep of 4 ms on a stream of its own, and so is each layer's backward of 6 ms, which
leaves all multiprocessors to the others. So there is a right answer: all but the last bucket's sleep is hidden. Two
ranks that share the device send over NCCL, and `fastddp trace` says how much of that is exposed. Both with one hardware
queue (`CUDA_DEVICE_MAX_CONNECTIONS=1`) too, and each DDP in its turn.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from bench import harness
from bench.contestants import Engine, wrapped
from bench.gpu import apart, timing
from bench.gpu.results import Run

ENGINES: tuple[Engine, ...] = ("torch", "fastddp")
_LAYERS, _BACKWARD_MS, _ALLREDUCE_MS = 8, 6.0, 4.0
_TWO_RANKS_MS = 20.0  # of a layer: NCCL over sockets takes that long
_WARMUP, _STEPS = 4, 10


def measure(run: Run) -> None:
    """Adds a row for each DDP and number of hardware queues: asleep, and with two ranks."""
    one_queue = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    for queues in ({},) if run.quick else ({}, one_queue):
        for what in (asleep, two_ranks):
            if run.out_of_time():
                run.skip(f"{what.__name__} with {queues or 'all queues'}")
                continue
            for row in apart.rows(run, what, run.quick, ranks=2 if what is two_ranks else 1, **queues):
                run.results.add(what.__name__, connections=queues.get("CUDA_DEVICE_MAX_CONNECTIONS", "unset"), **row)


def sleep(milliseconds: float, device: torch.device) -> None:
    """Keeps the current stream busy; the simulated device, not at all."""
    if device.type == "cuda":
        torch.cuda._sleep(int(milliseconds * _cycles_per_ms(device)))


_known: dict[torch.device, float] = {}


def _cycles_per_ms(device: torch.device) -> float:
    """Measured once in a process."""
    if device not in _known:
        timer, cycles = timing.DeviceTimer(device), 20_000_000
        for _ in range(2):  # the first while clocks rise
            timer.start()
            torch.cuda._sleep(cycles)
            timer.stop()
            _known[device] = cycles / (1e3 * timer.seconds())
    return _known[device]


class _Slow(torch.autograd.Function):
    """The identity, whose backward takes so many ms."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, milliseconds: float) -> Tensor:
        ctx.milliseconds = milliseconds
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        sleep(ctx.milliseconds, gradient.device)
        return gradient.clone(), None


class Layers(nn.Module):
    """Linear layers of a bucket each."""

    def __init__(self, milliseconds: float, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(_LAYERS))
        self.milliseconds = milliseconds

    def forward(self, hidden: Tensor) -> Tensor:
        """The loss of inputs, (batch, width)."""
        for layer in self.layers:
            hidden = _Slow.apply(layer(hidden), self.milliseconds)
        return hidden.square().mean()


def later(stream: torch.Stream, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The bucket, after a sleep on a stream of its own: what a hook returns."""
    buffer = bucket.buffer()
    stream.wait_stream(torch.accelerator.current_stream())
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device])
    with stream:
        sleep(_ALLREDUCE_MS, buffer.device)
        future.set_result(buffer)
    return future


def made(
    engine: Engine, milliseconds: float, device: torch.device, quick: bool
) -> tuple[nn.Module, Callable[[], None]]:
    """A model and its step."""
    torch.manual_seed(0)
    width = 32 if quick else 1024
    inputs = torch.ones(8, width, device=device)
    options = {} if engine == "plain" else {"bucket_cap_mb": width * width * 4 / 2**20}
    model = wrapped(Layers(milliseconds, width).to(device), engine, None, options)

    def step() -> None:
        model.zero_grad()
        model(inputs).backward()

    return model, step


def asleep(device: torch.device, quick: bool) -> list[harness.Row]:
    """Ms of a step without a DDP and with each, and what the allreduces add to it."""
    found: dict[str, list[float]] = {}
    gradients: dict[str, list[Tensor]] = {}
    for engine in ("plain", *ENGINES):
        model, step = made(engine, _BACKWARD_MS, device, quick)
        if engine != "plain":
            # Without annotations, which torch's DDP reads and does not resolve.
            hooked: Any = model
            hooked.register_comm_hook(torch.Stream(device=device), lambda state, bucket: later(state, bucket))
        found[engine] = _times(step, device, 1 if quick else _STEPS)
        gradients[engine] = [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
    plain = statistics.median(found["plain"])
    return [
        {
            "contestant": engine,
            "rounds": len(found[engine]),
            "plain_ms": plain,
            **harness.Percentiles.of(found[engine]).columns("ms"),
            "exposed_ms": statistics.median(found[engine]) - plain,
            "hidden_at_best_ms": (_LAYERS - 1) * _ALLREDUCE_MS,
            "exposed_at_best_ms": _ALLREDUCE_MS,
            "result": "equal" if all(map(torch.equal, gradients[engine], gradients["plain"])) else "WRONG",
        }
        for engine in ENGINES
    ]


def _times(step: Callable[[], None], device: torch.device, rounds: int) -> list[float]:
    """Ms on the device of each step after warm-up."""
    timer, found = timing.DeviceTimer(device), []
    for number in range(-_WARMUP, rounds):
        torch.accelerator.synchronize(device)
        timer.start()
        step()
        timer.stop()
        seconds = timer.seconds()
        found += [1e3 * seconds] if number >= 0 else []
    return found


def two_ranks(device: torch.device, quick: bool) -> list[harness.Row]:
    """What a trace of each DDP says: parts of a step on the mean rank, in ms."""
    from fastddp.tools.trace.reading import read_reports

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    found: list[harness.Row] = []
    for engine in ENGINES:
        _, step = made(engine, _TWO_RANKS_MS, device, quick)
        for _ in range(_WARMUP):
            step()
        torch.accelerator.synchronize(device)
        dist.barrier()
        with profile(activities=activities) as profiler:
            for _ in range(3 if quick else _STEPS):
                step()
            torch.accelerator.synchronize(device)
        with ExitStack() as stack:
            folder = [stack.enter_context(tempfile.TemporaryDirectory()) if dist.get_rank() == 0 else ""]
            dist.broadcast_object_list(folder, 0, device=device)
            profiler.export_chrome_trace(str(Path(folder[0], f"rank{dist.get_rank()}.json")))
            dist.barrier()
            if dist.get_rank() == 0:
                (report,) = read_reports([Path(folder[0])])
                parts = {f"{name}_ms": value for name, value in asdict(report.split).items()}
                found.append({"contestant": engine, "ranks": len(report.ranks), "wrapper": report.wrapper, **parts})
            dist.barrier()
    return found
