"""A replica under torchft: trains, and says what it does, a line of JSON each. Faults are its arguments.

Inputs depend on the step and on the replica's number, so that a step can be computed again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import socket
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchft import Manager, ProcessGroupGloo
from torchft.optim import OptimizerWrapper

import fastddp
from fastddp import comm_hooks, elastic

SIDE = 64
TIMEOUT = timedelta(seconds=20)


def module_of() -> nn.Module:
    """The model, the same everywhere."""
    torch.manual_seed(7)
    return nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(4)))


def inputs_of(step: int, replica: int) -> Tensor:
    """What the replica trains with in this step."""
    return torch.randn(8, SIDE, generator=torch.Generator().manual_seed(1000 * step + replica))


def digest(module: nn.Module) -> str:
    """Of all parameters' bits."""
    found = hashlib.sha256()
    for parameter in module.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()[:16]


def say(**what: Any) -> None:
    """To whoever started the replica."""
    print(json.dumps({"time": time.time(), **what}), flush=True)


def die(how: str, step: int) -> None:
    """Now: by this signal."""
    say(event="dies", step=step)
    os.kill(os.getpid(), getattr(signal, how))


def native_group(port: int, replica: int) -> Any:
    """One that stays the same object from quorum to quorum."""
    store = dist.TCPStore("localhost", port, is_master=False, wait_for_workers=False)
    group = dist.ProcessGroup(store, replica, 3)
    backend = dist.ProcessGroupGloo(store, replica, 3, TIMEOUT, enable_reconfigure=True)  # type: ignore[call-arg]
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def main() -> None:
    """Train until something ends it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--replica", type=int, required=True)
    parser.add_argument("--hook", default="")
    parser.add_argument("--frozen", action="store_true", help="one parameter less to train")
    parser.add_argument("--least", type=int, default=2)
    parser.add_argument("--die-at", type=int, default=-1)
    parser.add_argument("--where", default="")
    parser.add_argument("--how", default="SIGKILL")
    parser.add_argument("--heartbeat", type=float, default=0.5)
    parser.add_argument("--native", type=int, help="a group of torch's own, by the store of this port")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two steps")
    parser.add_argument("--address", default="", help="of this machine, where its name is not known")
    given = parser.parse_args()
    if given.address:
        socket.gethostname = lambda: given.address
    torch.set_num_threads(1)
    model: elastic.DistributedDataParallel
    optimizer: Any
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    module = module_of()
    module[0].bias.requires_grad_(not given.frozen)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT) if given.native is None else native_group(given.native, given.replica),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=given.least,
        use_async_quorum=False,
        replica_id=str(given.replica),
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        **({"hostname": given.address} if given.address else {}),
        timeout=TIMEOUT,
        quorum_timeout=timedelta(seconds=40),
    )
    model = elastic.DistributedDataParallel(
        manager, module, heartbeat=given.heartbeat, bucket_cap_mb=0.02, watch=fastddp.Watch(stall=None)
    )
    if given.hook == "powersgd":
        state = comm_hooks.PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=1)
        model.register_comm_hook(state, comm_hooks.powerSGD_hook)
    elif given.hook:
        model.register_comm_hook(*comm_hooks.hook_named(given.hook))
    optimizer = OptimizerWrapper(manager, torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9))

    def fault(where: str) -> None:
        if given.where == where and manager.current_step() >= given.die_at >= 0:  # it may come later than the step
            die(given.how, manager.current_step())

    module[1].register_forward_hook(lambda *_: fault("forward"))
    module[1].weight.register_post_accumulate_grad_hook(lambda _: fault("bucket"))
    say(event="ready")
    while True:
        time.sleep(given.pause)
        optimizer.zero_grad()
        step = manager.current_step()
        loss = model(inputs_of(step, given.replica)).square().mean()
        loss.backward()
        say(event="averaged", step=step, ranks=manager.num_participants(), quorum=manager._quorum_id)
        fault("commit")
        optimizer.step()
        committed = manager.current_step() > step
        say(
            event="step",
            step=step,
            committed=committed,
            ranks=manager.num_participants(),
            quorum=manager._quorum_id,
            generation=getattr(getattr(model, "_number", None), "generation", 0),
            digest=digest(module),
            sums=[parameter.double().sum().item() for parameter in module.parameters()],
        )


if __name__ == "__main__":
    main()
