"""Survives `kill -9` of a rank without a restart: the ranks that are left go on, and another process takes its place.

python examples/recipes/in_process.py

The first process stands for the launcher: it keeps the store, sees who is gone, and says who trains in each generation.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fastddp

STEPS, KILL_AT, PORT = 40, 15, int(sys.argv[2]) if len(sys.argv) > 2 else 29511


def form_group(store: dist.Store, name: str, generation: int) -> None:
    """Wait for the launcher's word, and leave the old group for the new one."""
    members = json.loads(store.get(f"generation {generation}"))
    if dist.is_initialized():
        dist.destroy_process_group()
    rank, of_generation = members.index(name), dist.PrefixStore(f"ranks of {generation}", store)
    dist.init_process_group("gloo", store=of_generation, rank=rank, world_size=len(members))


def train(name: str, first: int) -> None:
    """One rank, from generation ``first`` on."""
    store = dist.TCPStore("localhost", PORT, is_master=False, timeout=timedelta(seconds=60))
    generation, step = first, 0
    form_group(store, name, generation)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    # Over this rank alone at first: regroup() is how all of them meet, those that were here and those that join.
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    model = fastddp.DistributedDataParallel(module, process_group=alone)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def watch() -> None:
        """Let all ranks leave when the launcher says so: some may wait for others that have left already."""
        while not ends.wait(0.1):
            if watched.add("generation", 0) > generation:
                model.abort("the launcher says that other ranks train from now on.")

    watched, ends = dist.TCPStore("localhost", PORT, is_master=False), threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    while step < STEPS:
        try:
            model.regroup()  # to the default group
            steps = [0] * dist.get_world_size()
            dist.all_gather_object(steps, step)
            # Some may have stepped just before a rank was lost, and who joins has nothing yet.
            state: list[Any] = [step, module.state_dict(), optimizer.state_dict()]
            dist.broadcast_object_list(state, group_src=steps.index(max(steps)))
            step = state[0]
            module.load_state_dict(state[1])
            optimizer.load_state_dict(state[2])
            while step < STEPS:
                optimizer.zero_grad()
                inputs = torch.randn(8, 32, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
                model(inputs).square().mean().backward()
                optimizer.step()
                step += 1
                store.set("step", str(step))
                print(f"{name}: step {step}, {dist.get_world_size()} ranks, generation {generation}", flush=True)
                time.sleep(0.05)
        except RuntimeError as error:
            print(f"{name}: {str(error).splitlines()[0]}", flush=True)
            generation += 1
            form_group(store, name, generation)
    print(f"{name}: {sum(parameter.double().sum().item() for parameter in module.parameters()):.17g}", flush=True)
    ends.set()
    watcher.join()
    dist.destroy_process_group()


def launch() -> None:
    """Three ranks; one is killed, and another comes for it."""
    store = dist.TCPStore("localhost", PORT, is_master=True, wait_for_workers=False)
    ranks: dict[str, subprocess.Popen[bytes]] = {}
    generation = store.add("generation", 0)

    def say(members: list[str]) -> None:
        store.set(f"generation {generation}", json.dumps(members))
        store.set("generation", str(generation))

    def start(name: str) -> None:
        ranks[name] = subprocess.Popen([sys.executable, __file__, name, str(PORT), str(generation)])

    store.set("step", "0")
    for name in "abc":
        start(name)
    say(list(ranks))
    while int(store.get("step")) < KILL_AT:
        time.sleep(0.01)
    os.kill(ranks["b"].pid, signal.SIGKILL)
    ranks.pop("b").wait()
    generation += 1
    say(list(ranks))
    while int(store.get("step")) < KILL_AT + 10:
        time.sleep(0.01)
    generation += 1
    start("d")
    say(list(ranks))
    sys.exit(max(rank.wait() for rank in ranks.values()))


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[3])) if len(sys.argv) > 3 else launch()
