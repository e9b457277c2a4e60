"""Ordinary training, of one or several models that take turns: steps, losses, times, and the bytes that arrive."""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from arrived import bytes_arrived
from corpus import Batches, Corpus
from gpt import GPT, Shape
from report import Record

VALIDATION_BATCHES = 24
VALIDATE_EVERY = 100  # steps, and at the end of the block in which they are over
REFRESH_SECONDS = 0.2
LEARNING_RATE = 2e-3
WARMUP_STEPS = 20


@dataclass(frozen=True)
class Job:
    """This process: its rank among how many, on which device."""

    rank: int
    world_size: int
    device: torch.device

    def synchronize(self) -> None:
        """Wait for the GPU, if there is one, so that a clock read next is true."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def mean(self, values: list[float]) -> list[float]:
        """Each value's mean over all ranks."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return [value / self.world_size for value in total.tolist()]


@dataclass
class Contestant:
    """A model under one of the DDPs, with its optimizer and what is recorded about it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    record: Record


def start_job() -> Job:
    """Join the other ranks: NCCL with one rank a GPU where there are enough GPUs, else gloo on the CPU."""
    if not dist.is_torchelastic_launched():
        sys.exit(
            "This script runs as several processes that train together. Start it with\n\n"
            "    torchrun --nproc-per-node=2 examples/train_gpt.py\n\n"
            "or with `make demo`, which also installs what it needs."
        )
    local_rank, local_world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_world_size:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        # Same input, same bits: else attention on a GPU adds up gradients in any order. Deterministic mode also fills
        # fresh memory, which finds bugs and would only take time here.
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    else:
        device = torch.device("cpu")
        # A model this small gains nothing from more than a few threads, and more than there are cores would hurt.
        torch.set_num_threads(max(1, min(4, (os.cpu_count() or 1) // local_world_size)))
        dist.init_process_group("gloo")
    return Job(dist.get_rank(), dist.get_world_size(), device)


def build_gpt(arguments: Namespace, job: Job) -> GPT:
    """The same parameters each time."""
    torch.manual_seed(arguments.seed)
    return GPT(Shape(layers=arguments.layers, width=arguments.width, context=arguments.context)).to(job.device)


def ddp_options(arguments: Namespace, job: Job) -> dict[str, Any]:
    """What both DDPs are told."""
    device_ids = [job.device.index] if job.device.type == "cuda" else None
    return {"device_ids": device_ids, "bucket_cap_mb": arguments.bucket_cap_mb}


def enter(name: str, model: nn.Module) -> Contestant:
    """Give a model what it needs to be trained and watched."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    return Contestant(model, optimizer, Record(name))


def train_step(contestant: Contestant, batch: tuple[Tensor, Tensor]) -> Tensor:
    """One step of training; gives the loss of this rank's rows."""
    loss: Tensor = contestant.model(*batch)
    loss.backward()
    contestant.optimizer.step()
    contestant.optimizer.zero_grad()
    return loss.detach()


class Training:
    """Takes contestants through the same steps in turn."""

    def __init__(self, arguments: Namespace, job: Job, corpus: Corpus, console: Console) -> None:
        self.arguments, self.job, self.console = arguments, job, console
        shape = (arguments.batch_size, arguments.context, job.rank, job.world_size, arguments.seed)
        self.batches = Batches(corpus.training, *shape)
        self.validation = Batches(corpus.validation, *shape)
        self.tokens_a_step = job.world_size * arguments.batch_size * arguments.context

    def run(self, *contestants: Contestant) -> None:
        """All steps."""
        steps, block = self.arguments.steps, self.arguments.block
        with Bars(self.console, self.job, contestants, steps) as bars:
            for contestant in contestants:
                self.validate(contestant, 0, bars)
            for first in range(0, steps, block):
                last = min(first + block, steps)
                for contestant in contestants:
                    self.train_block(contestant, range(first, last), bars)
                if last // VALIDATE_EVERY > first // VALIDATE_EVERY or last == steps:
                    for contestant in contestants:
                        self.validate(contestant, last, bars)

    def train_block(self, contestant: Contestant, steps: range, bars: Bars) -> None:
        """Train for a few steps and time each of them."""
        losses: list[float] = []
        times: list[float] = []
        arrived = bytes_arrived()
        for step in steps:
            self.set_learning_rate(contestant, step)
            batch = self.batch(step)
            dist.barrier()  # all ranks start the step together, whatever they did before it
            self.job.synchronize()
            begin = time.perf_counter()
            loss = train_step(contestant, batch)
            self.job.synchronize()
            times.append((time.perf_counter() - begin) * 1e3)
            losses.append(loss.item())
            bars.show(contestant, step, losses[-1])
        contestant.record.bytes_arrived += bytes_arrived() - arrived
        contestant.record.losses += self.job.mean(losses)
        contestant.record.blocks_ms.append(times)
        bars.show_rate(contestant, contestant.record.tokens_a_second(self.tokens_a_step))

    def set_learning_rate(self, contestant: Contestant, step: int) -> None:
        """Linear warm-up, then linearly down to a tenth."""
        warmup = min(1.0, (step + 1) / WARMUP_STEPS)
        decay = 1.0 - 0.9 * min(1.0, step / self.arguments.steps)
        for group in contestant.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * warmup * decay

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """What this rank trains on in a step, on its device."""
        return self.on_device(self.batches(step))

    def on_device(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Inputs and targets on this rank's device."""
        inputs, targets = batch
        return inputs.to(self.job.device), targets.to(self.job.device)

    def validate(self, contestant: Contestant, step: int, bars: Bars) -> None:
        """The loss on text that is not trained on, the same text each time."""
        contestant.model.eval()
        with torch.no_grad():
            batches = (self.on_device(self.validation(index)) for index in range(VALIDATION_BATCHES))
            total = sum(contestant.model(*batch).item() for batch in batches)
        contestant.model.train()
        loss = self.job.mean([total / VALIDATION_BATCHES])[0]
        contestant.record.validation.append((step, loss))
        bars.show_validation(contestant, loss)
        if not self.console.is_terminal:  # a log shows no progress bar
            self.console.print(f"{contestant.record.name:>12}: step {step:4d}, validation loss {loss:.4f}")


class Bars:
    """A progress bar for each contestant, on rank 0."""

    def __init__(self, console: Console, job: Job, contestants: tuple[Contestant, ...], steps: int) -> None:
        self.progress = Progress(
            TextColumn("{task.description:>12}"),
            BarColumn(bar_width=20),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[loss]}"),
            TextColumn("{task.fields[validation]}"),
            TextColumn("{task.fields[rate]}", justify="right"),
            TimeRemainingColumn(compact=True),
            console=console,
            auto_refresh=False,  # a thread that draws would take its time from this rank's steps
            disable=job.rank != 0,
        )
        self.tasks: dict[str, TaskID] = {
            one.record.name: self.progress.add_task(one.record.name, total=steps, loss="", validation="", rate="")
            for one in contestants
        }
        self.drawn = 0.0

    def __enter__(self) -> Bars:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def show(self, contestant: Contestant, step: int, loss: float) -> None:
        """Move the bar, but draw it only a few times a second."""
        task = self.tasks[contestant.record.name]
        self.progress.update(task, completed=step + 1, loss=f"loss {loss:.3f}")
        if time.monotonic() - self.drawn > REFRESH_SECONDS:
            self.drawn = time.monotonic()
            self.progress.refresh()

    def show_rate(self, contestant: Contestant, rate: float) -> None:
        """That of the table below: of the median step so far, and not of the moment."""
        self.progress.update(self.tasks[contestant.record.name], rate=f"{rate:,.0f} tokens/s")

    def show_validation(self, contestant: Contestant, loss: float) -> None:
        """Write the loss beside the bar."""
        self.progress.update(self.tasks[contestant.record.name], validation=f"validation {loss:.3f}")
