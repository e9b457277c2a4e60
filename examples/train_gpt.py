"""Train a small GPT under fastddp and under torch's DDP, stop a rank, and send 8 bits: what differs, and what does not.

    torchrun --nproc-per-node=2 examples/train_gpt.py

1. Both DDPs start from the same parameters and see the same batches, in alternating blocks of steps, so that whatever
   else the machine does meets both alike. The parameters are compared bit by bit.
2. Another process stops rank 1 for some seconds. fastddp says so, and torch's DDP has nothing to say.
3. The same training again, with gradients of 8 bits. The bytes that arrive are counted.

The lines that a user changes are in `both_ddps`, `stop_under_both` (stall.py) and `with_eight_bits`; the rest is an
ordinary training loop (training.py).
"""

import argparse
import os
import sys
from pathlib import Path
from unittest import mock

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # a GPU's matrix products come out the same each time

import torch
import torch.distributed as dist
from rich.console import Console
from rich.panel import Panel
from rich.rule import Rule
from rich.text import Text
from torch import nn

import fastddp
from corpus import read_corpus
from gpt import GPT, Shape
from picture import draw
from report import STOPPED_RANK, Equality, Run, Stall, print_eight_bits, print_report, print_stalls, write_json
from stall import stop_under_both
from training import Contestant, Job, Training, build_gpt, ddp_options, enter, start_job

PROMPT = "def read_"


def parse_arguments() -> argparse.Namespace:
    """The options; their help says what they do."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=300, help="training steps, of each training (default: %(default)s)")
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


def both_ddps(arguments: argparse.Namespace, job: Job) -> tuple[Contestant, Contestant]:
    """The same model under both DDPs."""
    options = ddp_options(arguments, job)
    theirs = torch.nn.parallel.DistributedDataParallel(build_gpt(arguments, job), **options)
    ours = fastddp.DistributedDataParallel(build_gpt(arguments, job), **options)  # <- the line that changes
    return enter("fastddp", ours), enter("torch's DDP", theirs)


def with_eight_bits(arguments: argparse.Namespace, job: Job) -> Contestant:
    """The same model again; its gradients travel in 8 bits."""
    model = fastddp.DistributedDataParallel(build_gpt(arguments, job), **ddp_options(arguments, job))
    model.register_comm_hook(None, fastddp.comm_hooks.int8_compress_hook)  # <- the line that is added
    return enter("with 8 bits", model)


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


class Demo:
    """The three parts, and what they bring."""

    def __init__(self, arguments: argparse.Namespace, job: Job) -> None:
        self.arguments, self.job = arguments, job
        self.console = Console(quiet=job.rank != 0, highlight=False)
        self.where = f"{job.world_size} ranks on {job.device.type} over {dist.get_backend()}"
        load_before = os.getloadavg()[0]
        corpus = read_corpus()
        self.console.print(
            f"[bold]fastddp[/] demo: {self.where}, torch {torch.__version__}\n"
            f"Text: {corpus.files} files of Python's standard library, {len(corpus.training) / 1e6:.1f} MB, and "
            f"{len(corpus.validation) / 1e6:.1f} MB for validation"
        )
        self.training = Training(arguments, job, corpus, self.console)
        self.run = self.train_under_both(load_before)
        self.stalls = self.stop_a_rank() if job.world_size > 1 else ()
        self.eight = self.train_with_eight_bits() if job.world_size > 1 else None
        if job.world_size == 1:
            self.console.print("A rank that waits, and bytes that travel, take two ranks. This was one.")

    def train_under_both(self, load_before: float) -> Run:
        """Part 1."""
        self.begin("1. The same training, twice")
        ours, theirs = both_ddps(self.arguments, self.job)
        self.training.run(ours, theirs)
        equality = compare(ours.model, theirs.model)
        setting = {"ranks": self.job.world_size, "device": self.job.device.type, "backend": dist.get_backend()}
        setting |= vars(self.arguments) | {"out": str(self.arguments.out)}
        run = Run(setting, self.training.tokens_a_step, (ours.record, theirs.record), equality, load_before)
        if self.job.rank == 0:
            show_text(self.console, ours)
            print_report(self.console, run)
        self.read_on("docs/differences.md: what is as under torch's DDP, and what is not")
        return run

    def stop_a_rank(self) -> tuple[Stall, ...]:
        """Part 2."""
        self.begin("2. A rank that stands still")
        self.console.print(f"Another process stops rank {STOPPED_RANK} (kill -STOP), under each DDP in turn ...")
        stalls = stop_under_both(self.arguments, self.job, self.training)
        print_stalls(self.console, *stalls)
        self.read_on("docs/watch.md: what else can stand still, and what to do then")
        return stalls

    def train_with_eight_bits(self) -> Contestant:
        """Part 3."""
        self.begin("3. Gradients of 8 bits")
        # Ranks of one machine would read each other's memory, and nothing would travel. These send what two would.
        with mock.patch("fastddp.ranks.placement._processes", return_value=()):
            eight = with_eight_bits(self.arguments, self.job)
            self.training.run(eight)
        if self.job.rank == 0:
            print_eight_bits(self.console, eight.record, self.run.records[0])
        self.read_on("docs/compression.md: on which networks this pays, and other hooks")
        return eight

    def begin(self, title: str) -> None:
        """Print a heading."""
        self.console.print()
        self.console.print(Rule(f"[bold]{title}[/]", align="left"))

    def read_on(self, where: str) -> None:
        """Print where there is more."""
        self.console.print(f"→ {where}", style="cyan")

    def write(self) -> None:
        """Draw the picture and write the figures."""
        folder = self.arguments.out
        folder.mkdir(parents=True, exist_ok=True)
        title = f"The same GPT under fastddp and torch's DDP: {self.where}"
        eight = self.eight.record if self.eight else None
        draw(folder / "train_gpt.png", title, self.run, self.stalls, eight)
        write_json(folder / "train_gpt.json", self.run, self.stalls, eight)
        self.console.print(f"\nPicture: {folder / 'train_gpt.png'}\nFigures: {folder / 'train_gpt.json'}")


def show_text(console: Console, ours: Contestant) -> None:
    """Show what the model writes now."""
    network = ours.model.module
    assert isinstance(network, GPT)
    text = Text(network.generate(PROMPT, 160), style="dim")
    console.print(Panel(text, title=f"What the model now writes after [bold]{PROMPT}[/]", title_align="left"))


def main() -> int:
    """Run all parts. The exit status is 1 if the models of part 1 differ although they must not."""
    arguments = parse_arguments()
    job = start_job()
    demo = Demo(arguments, job)
    if job.rank == 0:
        demo.write()
    dist.barrier()
    dist.destroy_process_group()
    return 0 if demo.run.equality.holds else 1


if __name__ == "__main__":
    sys.exit(main())
