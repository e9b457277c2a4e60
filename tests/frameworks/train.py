"""Trains with a framework, as in its tests, under torchrun, and saves what rank 0 has: train.py FRAMEWORK FILE."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent / "support")]
TRAININGS = {
    "accelerate": lambda tests, rank: tests.plain(rank, tests.SMALL_BUCKETS, {"gradient_accumulation_steps": 2}),
    "lightning": lambda tests, rank: tests.with_trainer(
        rank, tests.Classifier, {}, {"accumulate_grad_batches": 2}, False
    ),
    "transformers": lambda tests, rank: tests.trained(rank, {}),
}

if __name__ == "__main__":
    framework, file = sys.argv[1:]
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    trained = TRAININGS[framework](importlib.import_module(f"test_{framework}"), dist.get_rank())
    if dist.get_rank() == 0:
        wrapper, ranks = trained.wrapper.__module__, dist.get_world_size()
        torch.save({"wrapper": wrapper, "ranks": ranks, "parameters": trained.parameters}, file)
    dist.destroy_process_group()
