"""A few steps of a small GPT on two ranks, to be recorded: nsys profile ... python -m bench.gpu.profiled.

On a GPU both ranks share it over NCCL, which takes them for two hosts: they send slowly, and in the usual order. With
`--kineto` torch's profiler records too; on the CPU the same steps, on a GPU in a run of its own, since both want CUPTI.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

import fastddp
from bench import harness
from bench.cases import CASES, case_named
from bench.gpu import simulated

MODULE = "bench.gpu.profiled"
RANKS = 2
BEFORE = 3  # steps; buckets are rebuilt in the first of them


def main() -> None:
    options = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, (f"file://{folder}/store", options), RANKS)


def parse_arguments() -> argparse.Namespace:
    parser = harness.parser(MODULE, __doc__)
    add = parser.add_argument
    add("--device", choices=["cuda", "cpu"], default="cuda", help="default: %(default)s")
    add("--case", choices=[case.name for case in CASES], default="gpt", help="default: %(default)s")
    add("--bucket-cap-mb", type=float, default=4, help="default: %(default)s")
    add("--steps", type=int, default=5, help=f"after {BEFORE} (default: %(default)s)")
    add("--kineto", type=Path, metavar="FOLDER", help="write rank0.json.gz and rank1.json.gz, without the first steps")
    return parser.parse_args()


def train(rank: int, store: str, options: argparse.Namespace) -> None:
    """All steps of one rank."""
    if options.device == "cuda":
        simulated.of_tests("nodes").share_the_gpu()
    torch.set_num_threads(1)
    device = torch.device(options.device)
    dist.init_process_group(dist.get_default_backend_for_device(device), store, rank=rank, world_size=RANKS)
    module, batch = case_named(options.case).build(device)
    model = fastddp.DistributedDataParallel(module, bucket_cap_mb=options.bucket_cap_mb)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def steps(numbers: range) -> None:
        for number in numbers:
            model(*batch(rank, number)).backward()
            optimizer.step()
            optimizer.zero_grad()

    steps(range(BEFORE))
    with torch.profiler.profile() if options.kineto else contextlib.nullcontext() as profile:
        steps(range(BEFORE, BEFORE + options.steps + 1))  # the last has no end in the trace
    if profile is not None:
        profile.export_chrome_trace(str(options.kineto / f"rank{rank}.json.gz"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
