"""A rank that ends while models are made, or before the first step, is named in the errors of the others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fastddp.errors import see

SCRIPT = """
import contextlib, json, multiprocessing, os, signal, sys
import torch, torch._dynamo, torch.distributed as dist, fastddp
from fastddp import comm_hooks

def killed(): os.kill(os.getpid(), signal.SIGKILL)
def step(model, count=1):
    for _ in range(count): model(torch.ones(2, 8)).sum().backward()
def made(hook, state=None):
    model = fastddp.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)))
    model.register_comm_hook(state, hook)
    return model

# What rank 1 does, and what the others say of it.
def before_its_wrapper(rank):
    if rank == 1: killed()
    made(comm_hooks.fp16_compress_hook)
def by_its_wrapper(rank):
    module = torch.nn.Linear(8, 8).requires_grad_(rank != 1)
    fastddp.DistributedDataParallel(module)
def in_its_wrapper(rank):
    if rank == 1: fastddp.ddp.broadcast_replicas = lambda *_, **__: killed()
    made(comm_hooks.fp16_compress_hook)
def before_int8(rank, hook=comm_hooks.int8_compress_hook, state=None):
    model = made(hook, state)
    if rank == 1: killed()
    step(model)
def before_power_sgd(rank):
    before_int8(rank, comm_hooks.powerSGD_hook, comm_hooks.PowerSGDState(None, 1))
def replaces_parameters(rank):
    model = made(comm_hooks.int8_compress_hook)
    step(model)
    state = {key: value.clone() for key, value in model.module.state_dict().items()}
    model.module.load_state_dict(state, assign=rank == 1)
    step(model, 2)

def train(rank, ends, port, errors):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=3)
    try:
        ends(rank)
    except RuntimeError as error:
        if rank == 1: raise
        errors.put(str(error))
        errors.close()
        errors.join_thread()
        os._exit(1)

context = multiprocessing.get_context("fork")
for name in sys.argv[1:]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    errors = context.Queue()
    ranks = [context.Process(target=train, args=(rank, globals()[name], store.port, errors)) for rank in range(3)]
    for process in ranks: process.start()
    print(json.dumps([errors.get(timeout=60) for _ in range(2)]), flush=True)
    for process in ranks: process.join()
"""
SAID = {
    "before_its_wrapper": ["rank 1 had not come to its first wrapper"],
    "by_its_wrapper": ["rank 1 has ended (process ", "by RuntimeError: "],
    "in_its_wrapper": ["rank 1 is gone (process "],
    "before_int8": ["rank 1 is gone", "before its first step"],
    "before_power_sgd": ["rank 1 is gone", "before its first step"],
    "replaces_parameters": ["because rank 1 is gone", "by RuntimeError: "],
}


@pytest.mark.tier("slow")
def test_who_waits_for_a_rank_that_has_ended_early_says_so_in_its_error(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, *SAID]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for (ends, words), line in zip(SAID.items(), done.stdout.splitlines(), strict=True):
        for error in json.loads(line):
            assert all(word in error for word in words), (ends, error)
            assert error.endswith(see("FD015"))
