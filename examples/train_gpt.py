"""Train a small GPT twice, under fastddp and under torch's DDP, and compare them in speed and bit by bit.

    torchrun --nproc-per-node=2 examples/train_gpt.py

Both start from the same parameters and see the same batches, in alternating blocks of steps, so that whatever else the
machine does meets both alike. The line that a user changes is in `contestants`; the rest is an ordinary training loop.
"""

import argparse
import copy
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler would write its own log between the lines
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # a GPU's matrix products come out the same each time

import torch
import torch.distributed as dist
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text
from torch import Tensor, nn
from torch.profiler import profile, record_function

import fastddp
from corpus import Batches, Corpus, read_corpus
from gpt import GPT, Shape
from picture import Curve, draw
from report import Equality, Record, Run, print_report, write_json
from timeline import read_timelines, typical

PROMPT = "def read_"
VALIDATION_BATCHES = 24
VALIDATE_EVERY = 100  # steps, and at the end of the block in which they are over
PROFILED_BLOCKS, PROFILED_STEPS = 3, 3  # for the timelines; the picture shows the step of median length
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
    """A model under one of the two DDPs, with its optimizer and what is recorded about it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    record: Record
    task: TaskID


def parse_arguments() -> argparse.Namespace:
    """The options; their help says what they do."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=500, help="training steps under each DDP (default: %(default)s)")
    add("--block", type=int, default=10, help="steps before the other DDP takes its turn (default: %(default)s)")
    add("--batch-size", type=int, default=4, help="pieces of text for each rank and step (default: %(default)s)")
    add("--layers", type=int, default=Shape.layers, help="default: %(default)s")
    add("--width", type=int, default=Shape.width, help="a multiple of eight (default: %(default)s)")
    add("--context", type=int, default=Shape.context, help="bytes that the model sees at once (default: %(default)s)")
    add(
        "--bucket-cap-mb",
        type=float,
        default=1.0,
        help="bucket size of both DDPs. Their own default, 25, would put this small model into two buckets, and "
        "little would overlap (default: %(default)s)",
    )
    add("--seed", type=int, default=0, help="of parameters and batches (default: %(default)s)")
    add("--out", type=Path, default=Path("out"), help="folder for the picture and the figures (default: %(default)s)")
    arguments = parser.parse_args()
    if min(arguments.steps, arguments.block, arguments.batch_size, arguments.layers, arguments.context) < 1:
        parser.error("--steps, --block, --batch-size, --layers and --context must be at least 1")
    if arguments.width < 8 or arguments.width % 8:
        parser.error(f"--width must be a multiple of eight (four heads of an even width), not {arguments.width}")
    return arguments


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


def contestants(arguments: argparse.Namespace, job: Job, progress: Progress) -> tuple[Contestant, Contestant]:
    """The same model under both DDPs."""
    torch.manual_seed(arguments.seed)
    shape = Shape(layers=arguments.layers, width=arguments.width, context=arguments.context)
    model = GPT(shape).to(job.device)
    twin = copy.deepcopy(model)
    device_ids = [job.device.index] if job.device.type == "cuda" else None
    options = {"device_ids": device_ids, "bucket_cap_mb": arguments.bucket_cap_mb}

    theirs = torch.nn.parallel.DistributedDataParallel(twin, **options)
    ours = fastddp.DistributedDataParallel(model, **options)  # <- the line that changes
    return enter("fastddp", ours, arguments, progress), enter("torch's DDP", theirs, arguments, progress)


def enter(name: str, model: nn.Module, arguments: argparse.Namespace, progress: Progress) -> Contestant:
    """Give a model what it needs to be trained and watched."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    task = progress.add_task(name, total=arguments.steps, loss="", validation="", rate="")
    return Contestant(model, optimizer, Record(name), task)


def train_step(contestant: Contestant, batch: tuple[Tensor, Tensor]) -> Tensor:
    """One step of training; gives the loss of this rank's rows."""
    with record_function("forward"):
        loss: Tensor = contestant.model(*batch)
    with record_function("backward"):
        loss.backward()
    with record_function("optimizer"):
        contestant.optimizer.step()
        contestant.optimizer.zero_grad()
    return loss.detach()


class Training:
    """Takes both contestants through the same steps in turn."""

    def __init__(self, arguments: argparse.Namespace, job: Job, corpus: Corpus, console: Console) -> None:
        self.arguments, self.job, self.console = arguments, job, console
        shape = (arguments.batch_size, arguments.context, job.rank, job.world_size, arguments.seed)
        self.batches = Batches(corpus.training, *shape)
        self.validation = Batches(corpus.validation, *shape)
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
        self.drawn = 0.0
        self.tokens_a_step = job.world_size * arguments.batch_size * arguments.context
        self.both = contestants(arguments, job, self.progress)

    def run(self) -> None:
        """All steps, then a few more under the profiler."""
        steps, block = self.arguments.steps, self.arguments.block
        with self.progress:
            for contestant in self.both:
                self.validate(contestant, 0)
            for first in range(0, steps, block):
                last = min(first + block, steps)
                for contestant in self.both:
                    self.train_block(contestant, range(first, last))
                if last // VALIDATE_EVERY > first // VALIDATE_EVERY or last == steps:
                    for contestant in self.both:
                        self.validate(contestant, last)
            for first in range(steps, steps + PROFILED_BLOCKS * PROFILED_STEPS, PROFILED_STEPS):
                for contestant in self.both:
                    self.record_timelines(contestant, range(first, first + PROFILED_STEPS))

    def train_block(self, contestant: Contestant, steps: range) -> None:
        """Train for a few steps and time each of them."""
        losses: list[float] = []
        times: list[float] = []
        for step in steps:
            self.set_learning_rate(contestant, step)
            batch = self.batch(self.batches, step)
            dist.barrier()  # all ranks start the step together, whatever they did before it
            self.job.synchronize()
            begin = time.perf_counter()
            loss = train_step(contestant, batch)
            self.job.synchronize()
            times.append((time.perf_counter() - begin) * 1e3)
            losses.append(loss.item())
            self.show(contestant, step, losses[-1], times)
        contestant.record.losses += self.job.mean(losses)
        contestant.record.blocks_ms.append(times)

    def set_learning_rate(self, contestant: Contestant, step: int) -> None:
        """Linear warm-up, then linearly down to a tenth."""
        warmup = min(1.0, (step + 1) / WARMUP_STEPS)
        decay = 1.0 - 0.9 * min(1.0, step / self.arguments.steps)
        for group in contestant.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * warmup * decay

    def batch(self, batches: Batches, step: int) -> tuple[Tensor, Tensor]:
        """A batch on this rank's device."""
        inputs, targets = batches(step)
        return inputs.to(self.job.device), targets.to(self.job.device)

    def validate(self, contestant: Contestant, step: int) -> None:
        """The loss on text that is not trained on, the same text each time."""
        contestant.model.eval()
        with torch.no_grad():
            batches = (self.batch(self.validation, index) for index in range(VALIDATION_BATCHES))
            total = sum(contestant.model(*batch).item() for batch in batches)
        contestant.model.train()
        loss = self.job.mean([total / VALIDATION_BATCHES])[0]
        contestant.record.validation.append((step, loss))
        self.progress.update(contestant.task, validation=f"validation {loss:.3f}")
        if not self.console.is_terminal:  # a log shows no progress bar
            self.console.print(f"{contestant.record.name:>12}: step {step:4d}, validation loss {loss:.4f}")

    def show(self, contestant: Contestant, step: int, loss: float, times: list[float]) -> None:
        """Move the progress bar, but draw it only a few times a second."""
        rate = self.tokens_a_step * len(times) / sum(times) * 1e3
        self.progress.update(contestant.task, completed=step + 1, loss=f"loss {loss:.3f}", rate=f"{rate:,.0f} tokens/s")
        if time.monotonic() - self.drawn > REFRESH_SECONDS:
            self.drawn = time.monotonic()
            self.progress.refresh()

    def record_timelines(self, contestant: Contestant, steps: range) -> None:
        """Run a few steps under the profiler, which only rank 0 keeps."""
        batches = [self.batch(self.batches, step) for step in steps]
        with profile() as profiler:
            for batch in batches:
                dist.barrier()
                self.job.synchronize()
                train_step(contestant, batch)
                self.job.synchronize()
        if self.job.rank == 0:
            contestant.record.timelines += read_timelines(profiler.events() or [])


def compare(ours: nn.Module, theirs: nn.Module) -> Equality:
    """Compare all parameters bit by bit: between both models, and between this rank and rank 0."""
    mine = torch.cat([parameter.detach().flatten() for parameter in ours.parameters()])
    twin = torch.cat([parameter.detach().flatten() for parameter in theirs.parameters()])
    first = mine.clone()
    dist.broadcast(first, src=0)
    # As integers: a NaN equals itself then, and 0.0 is not -0.0.
    equal = all(torch.equal(mine.view(torch.int32), other.view(torch.int32)) for other in (twin, first))
    worst = torch.stack([(mine - twin).abs().max(), torch.tensor(0.0 if equal else 1.0, device=mine.device)])
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return Equality(
        bitwise=worst[1].item() == 0,
        required=dist.get_world_size() <= 2,
        largest_difference=worst[0].item(),
        parameters=mine.numel(),
    )


def main() -> int:
    """Train, compare, report. The exit status is 1 if the models differ although they must not."""
    arguments = parse_arguments()
    job = start_job()
    console = Console(quiet=job.rank != 0, highlight=False)
    load_before = os.getloadavg()[0]
    corpus = read_corpus()
    where = f"{job.world_size} ranks on {job.device.type} over {dist.get_backend()}"
    console.print(
        f"[bold]fastddp[/] demo: {where}, torch {torch.__version__}\n"
        f"Text: {corpus.files} files of Python's standard library, {len(corpus.training) / 1e6:.1f} MB, and "
        f"{len(corpus.validation) / 1e6:.1f} MB for validation\n"
    )
    training = Training(arguments, job, corpus, console)
    training.run()
    ours, theirs = training.both
    equality = compare(ours.model, theirs.model)
    if job.rank == 0:
        setting = {"ranks": job.world_size, "device": job.device.type, "backend": dist.get_backend(), **vars(arguments)}
        run = Run(
            setting | {"out": str(arguments.out)},
            training.tokens_a_step,
            (ours.record, theirs.record),
            equality,
            load_before,
        )
        finish(console, run, where, ours)
    dist.barrier()
    dist.destroy_process_group()
    return 0 if equality.holds else 1


def finish(console: Console, run: Run, where: str, ours: Contestant) -> None:
    """Show what the model writes now, the table, the picture and the figures."""
    network = ours.model.module
    assert isinstance(network, GPT)
    text = Text(network.generate(PROMPT, 240), style="dim")
    console.print()
    console.print(Panel(text, title=f"What the model now writes after [bold]{PROMPT}[/]", title_align="left"))
    print_report(console, run)

    folder = Path(run.setting["out"])
    folder.mkdir(parents=True, exist_ok=True)
    curves = [Curve(r.name, r.losses, r.validation, typical(r.timelines)) for r in run.records]
    draw(folder / "train_gpt.png", f"The same GPT under fastddp and torch's DDP: {where}", curves)
    write_json(folder / "train_gpt.json", run)
    console.print(f"Picture: {folder / 'train_gpt.png'}\nFigures: {folder / 'train_gpt.json'}")


if __name__ == "__main__":
    sys.exit(main())
