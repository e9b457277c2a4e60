"""A rank that ends while others go on is named, with how it has ended, in the error that ends their backward."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastddp.errors import see

SCRIPT = """
import atexit, json, multiprocessing, os, sys, time
import torch, torch._dynamo, torch.distributed as dist, fastddp  # dynamo: else each rank imports it
from fastddp._pages import read_page, shared_pages

# How rank 1 ends before its fifth step.
def exits_at_once(): os._exit(3)
def raises(): raise ValueError("bad batch 17")
def has_no_batch_left(): return True
def forks():
    if os.fork() == 0:
        atexit._run_exitfuncs()  # which is not the end of its parent
        os._exit(0)
    os.wait()
def goes_on(): return False
def ends_in_step(): return False  # see Steps

class Steps(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        if self.param_groups[0]["lr"] == 0.0:
            sys.exit(0)

def train(rank, ends, port, errors):
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    module = torch.nn.Linear(8, 8)
    if ends is exits_at_once:  # others fail in forward: they wait for buffers
        module = torch.nn.Sequential(module, torch.nn.BatchNorm1d(8))
    model = fastddp.DistributedDataParallel(module)
    optimizer = fastddp.ShardedOptimizer(model, Steps, lr=0.1) if ends is ends_in_step else None
    try:
        for step in range(6):
            if step == 1:
                time.sleep(0.8)  # ranks have seen each other by then
            if step == 4 and rank == 1 and ends():
                return
            model(torch.ones(2, 8)).sum().backward()
            if optimizer is not None:
                optimizer.param_groups[0]["lr"] = 0.0 if step == 4 and rank == 1 else 0.1
                if step == 4 and rank != 1:
                    time.sleep(1.0)  # between two steps when rank 1 ends
                optimizer.step()
                optimizer.zero_grad()
        errors.put([read_page(path).process_ends for path in shared_pages(os.getpid())])
    except RuntimeError as error:
        said = [str(error)]
        uses = lambda: model(torch.ones(2, 8)), lambda: optimizer.step(), model.state_dict
        for use in uses if optimizer is not None else ():
            try: use()
            except RuntimeError as error: said.append(str(error))
        errors.put(said)
        errors.close()
        errors.join_thread()
        os._exit(1)  # as many launchers' children do

context = multiprocessing.get_context("fork")
for ends in (exits_at_once, raises, has_no_batch_left, ends_in_step, forks, goes_on):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    errors = context.Queue()
    ranks = [context.Process(target=train, args=(rank, ends, store.port, errors)) for rank in range(3)]
    for process in ranks: process.start()
    said = [errors.get(timeout=60) for _ in range(3 if ends in (forks, goes_on) else 2)]
    for process in ranks: process.join()
    left = [path for process in ranks for path in shared_pages(process.pid)]
    print(json.dumps([ends.__name__, said, len(left)]), flush=True)
    for path in left: os.remove(path)
"""


@pytest.mark.tier("slow")
def test_whoever_waits_for_a_rank_that_has_ended_says_so_in_its_error(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT]  # in a folder without the sources, which may not be what is installed
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    runs = {ends: (said, left) for ends, said, left in map(json.loads, done.stdout.splitlines())}
    for ends, words in [
        ("exits_at_once", 'the kernel\'s log for "Out of memory"'),
        ("raises", "by ValueError: bad batch 17. It was past its backward"),
        ("has_no_batch_left", "in good order after 4 steps"),
    ]:
        errors, _ = runs[ends]
        assert len(errors) == 2
        for (error,) in errors:
            assert "step 5 has failed on rank" in error
            assert "because rank 1 is gone" in error
            assert words in error
            assert error.endswith(see("FD015"))
            assert ("Out of memory" in error) == (ends == "exits_at_once")
    # Behind its fifth step a rank ends before others have its parameters.
    errors, _ = runs["ends_in_step"]
    assert len(errors) == 2
    for error, *later in errors:
        assert re.search(r"rank 1 has ended \(process \d+ on .*\)\. It was in the optimizer's step", error)
        assert error.endswith(see("FD015"))
        assert [re.match(r"fastddp: parameter (weight|bias) is incomplete", of) is not None for of in later] == [
            True
        ] * 3
        assert all(of.endswith(see("FD044")) for of in later)
    # Forked ranks that train to the end leave nothing; while they train, no page says that its rank ends.
    assert runs["forks"] == runs["goes_on"] == ([[False]] * 3, 0)
