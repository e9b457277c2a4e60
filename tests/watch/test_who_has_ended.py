"""A rank that ends, early or while others go on, is named in the error that ends their wait, with how it has ended."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fastddp.errors import see

SCRIPT = """
import atexit, json, multiprocessing, os, signal, sys, time
import torch, torch._dynamo, torch.distributed as dist, fastddp  # dynamo: else each rank imports it
from fastddp import comm_hooks
from fastddp._pages import read_page, shared_pages

def killed(): os.kill(os.getpid(), signal.SIGKILL)
def step(model, count=1):
    for _ in range(count): model(torch.ones(2, 8)).sum().backward()
def wrapped(*layers):
    return fastddp.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), *layers))
def made(hook):
    model = wrapped(torch.nn.BatchNorm1d(8))
    model.register_comm_hook(None, hook)
    return model

# What rank 1 does while models are made, or before the first step.
def before_its_wrapper(rank):
    if rank == 1: killed()
    made(comm_hooks.fp16_compress_hook)
def by_its_wrapper(rank):
    module = torch.nn.Linear(8, 8).requires_grad_(rank != 1)
    fastddp.DistributedDataParallel(module)
def before_int8(rank):
    model = made(comm_hooks.int8_compress_hook)
    if rank == 1: killed()
    step(model)
def replaces_parameters(rank):
    model = made(comm_hooks.int8_compress_hook)
    step(model)
    state = {key: value.clone() for key, value in model.module.state_dict().items()}
    model.module.load_state_dict(state, assign=rank == 1)
    step(model, 2)

# How it ends before its fifth step.
def train(rank, ends, *layers):
    model = wrapped(*layers)
    step(model)
    time.sleep(0.8)  # ranks have seen each other by then
    step(model, 3)
    if rank == 1 and ends(): return
    step(model, 2)
    return [read_page(path).process_ends for path in shared_pages(os.getpid())]
def exits_at_once(rank): train(rank, lambda: os._exit(3), torch.nn.BatchNorm1d(8))  # others wait for buffers
def raises(rank):
    def ends(): raise ValueError("bad batch 17")
    train(rank, ends)
def has_no_batch_left(rank): train(rank, lambda: True)
def goes_on(rank): return train(rank, lambda: False)
def forks(rank):
    def ends():
        if os.fork() == 0:
            atexit._run_exitfuncs()  # which is not the end of its parent
            os._exit(0)
        os.wait()
    return train(rank, ends)

class Steps(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        if self.param_groups[0]["lr"] == 0.0: sys.exit(0)

def ends_in_step(rank):
    model = wrapped()
    optimizer = fastddp.ShardedOptimizer(model, Steps, lr=0.1)
    for number in range(5):
        if number: optimizer.step()
        optimizer.zero_grad()
        step(model)
        if number in (0, 4) and rank != 1: time.sleep(1.0)  # between two steps when rank 1 ends
    if rank == 1: optimizer.param_groups[0]["lr"] = 0.0
    said = []
    for use in optimizer.step, lambda: step(model), optimizer.step, model.state_dict:
        try: use()
        except RuntimeError as error: said.append(str(error))
    raise RuntimeError("|".join(said))

def run(rank, ends, port, said):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=3)
    dist.barrier()  # all have connected
    try:
        if (pages := ends(rank)) is not None: said.put(pages)
    except RuntimeError as error:
        if rank == 1: raise
        said.put(str(error))
        said.close()
        said.join_thread()
        os._exit(1)  # as many launchers' children do

context = multiprocessing.get_context("fork")
for name in sys.argv[1:]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    said = context.Queue()
    ranks = [context.Process(target=run, args=(rank, globals()[name], store.port, said)) for rank in range(3)]
    for process in ranks: process.start()
    found = [said.get(timeout=60) for _ in range(3 if name in ("forks", "goes_on") else 2)]
    for process in ranks: process.join()
    left = [path for process in ranks for path in shared_pages(process.pid)]
    print(json.dumps([found, len(left)]), flush=True)
    for path in left: os.remove(path)
"""
GONE = ["step 5 has failed on rank", "because rank 1 is gone"]
SAID = {
    "before_its_wrapper": ["rank 1 had not come to its first wrapper"],
    "by_its_wrapper": ["rank 1 has ended (process ", "by RuntimeError: "],
    "before_int8": ["rank 1 is gone", "before its first step"],
    "replaces_parameters": ["because rank 1 is gone", "by RuntimeError: "],
    "exits_at_once": [*GONE, 'the kernel\'s log for "Out of memory"'],
    "raises": [*GONE, "by ValueError: bad batch 17. It was past its backward"],
    "has_no_batch_left": [*GONE, "in good order after 4 steps"],
    "ends_in_step": ["rank 1 has ended (process ", "It was in the optimizer's step"],
}


@pytest.mark.tier("slow")
def test_whoever_waits_for_a_rank_that_has_ended_says_so_in_its_error(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, *SAID, "forks", "goes_on"]
    # In a folder without the sources, which may not be what is installed.
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *runs, forks, goes_on = map(json.loads, done.stdout.splitlines())
    for (ends, words), (errors, _) in zip(SAID.items(), runs, strict=True):
        for error, *later in (said.split("|") for said in errors):
            assert all(word in error for word in words), (ends, error)
            assert error.endswith(see("FD015"))
            assert ("Out of memory" in error) == (ends in ("before_int8", "exits_at_once"))
            # Without rank 1's parameters the model is of no use.
            assert all(of.startswith("fastddp: parameter ") and of.endswith(see("FD044")) for of in later)
            assert len(later) == 3 * (ends == "ends_in_step")
    # Forked ranks that train to the end leave nothing; while they train, no page says that its rank ends.
    assert forks == goes_on == [[[False]] * 3, 0]
