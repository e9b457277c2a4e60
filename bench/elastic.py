"""What it costs to be ready for a lost rank, and what a lost one costs: quorums, other groups, kills.

    python -m bench.elastic step --rate 2gbit     # a step under torchft's quorum, beside a static one and torchft's DDP
    python -m bench.elastic regroup               # another group for three ranks
    python -m bench.elastic kills --picture FILE  # three replicas, one of which is killed again and again

`kills` runs examples/elastic.py's replicas, in processes of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import fastddp
from bench import harness, netns, network
from fastddp import comm_hooks

MODULE = "bench.elastic"
WIDTH, LAYERS = 2048, 8  # 33.6 M parameters
STATIC, AGAIN, ELASTIC, THEIRS = "fastddp, static", "the same again", "fastddp.elastic", "torchft"
CONTESTANTS = (STATIC, AGAIN, ELASTIC, f"{ELASTIC}, int8", THEIRS)


def module_of(width: int, layers: int) -> nn.Module:
    """Linear layers."""
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


# ----------------------------------------------------------------------------------------------------------------- step


def manager_of(name: str, lighthouse: str) -> Any:
    """This rank as a replica, with a store of its own."""
    from torchft import Manager, ProcessGroupGloo

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    held.append(store)
    return Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=dist.get_world_size(),
        use_async_quorum=False,
        replica_id=f"{name}{dist.get_rank()}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        init_sync=False,
        hostname=socket.gethostname(),
    )


held: list[object] = []


class Contestant:
    """A model, trained with SGD."""

    def __init__(self, name: str, lighthouses: dict[str, str], options: argparse.Namespace) -> None:
        from torchft import DistributedDataParallel as Theirs
        from torchft.optim import OptimizerWrapper

        from fastddp import elastic

        module = module_of(options.width, options.layers)
        self.optimizer: Any = torch.optim.SGD(module.parameters(), lr=1e-6)
        self.manager = None
        if name in (STATIC, AGAIN):
            self.model: nn.Module = fastddp.DistributedDataParallel(module)
        else:
            self.manager = manager_of(name, lighthouses[name])
            self.optimizer = OptimizerWrapper(self.manager, self.optimizer)
            self.model = (Theirs if name == THEIRS else elastic.DistributedDataParallel)(self.manager, module)
        if name.endswith("int8"):
            self.model.register_comm_hook(None, comm_hooks.int8_compress_hook)

    def step(self, inputs: torch.Tensor) -> None:
        """All of it, with the quorum and the commit."""
        self.optimizer.zero_grad()
        self.model(inputs).square().mean().backward()
        self.optimizer.step()


def measure_step(options: argparse.Namespace, facts: harness.Row) -> list[harness.Row]:
    """On each rank: steps of all contestants, by turns."""
    from torchft._torchft import LighthouseServer

    address = os.environ.get("FASTDDP_BENCH_ADDRESS", "localhost")
    with mock.patch.object(socket, "gethostname", return_value=address):
        told: list[Any] = [None]
        names = [name for name in CONTESTANTS if name not in (STATIC, AGAIN)]
        if dist.get_rank() == 0:
            servers = {name: LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=60_000) for name in names}
            held.extend(servers.values())
            told = [
                {name: f"http://{address}:{server.address().rsplit(':', 1)[1]}" for name, server in servers.items()}
            ]
        dist.broadcast_object_list(told, 0)
        contestants = [Contestant(name, told[0], options) for name in CONTESTANTS]
        inputs = torch.randn(4, options.width)
        times: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
        for place, _, index in harness.turns(len(CONTESTANTS), range(options.warmup + options.rounds)):
            dist.barrier()
            begin = time.perf_counter()
            contestants[index].step(inputs)
            if place >= options.warmup:
                times[CONTESTANTS[index]].append(time.perf_counter() - begin)
        commits = {
            name: one.manager.current_step() for name, one in zip(CONTESTANTS, contestants, strict=True) if one.manager
        }
        for one in contestants:
            if one.manager:
                one.manager.shutdown(wait=False)
    ran = options.warmup + options.rounds
    assert set(commits.values()) == {ran}, commits
    facts = harness.environment(MODULE, torch.device("cpu"), torch.get_num_threads()) | facts
    facts |= {"case": "step", "parameters": sum(p.numel() for p in contestants[0].model.parameters())}
    return [
        facts
        | {"contestant": name, "rounds": options.rounds}
        | harness.rounded(
            harness.Percentiles.of(of).columns("ms", 1e3)
            | {f"of {other}": harness.paired_ratio(of, times[other]) for other in (STATIC, THEIRS)},
            3,
        )
        for name, of in times.items()
    ]


class _Seated:
    """A rank at an end of the cable, which knows its address."""

    def __init__(self, enter: Callable[[int], None] | None, addresses: tuple[str, str]) -> None:
        self._enter, self._addresses = enter, addresses

    def __call__(self, rank: int) -> None:
        if self._enter is not None:
            self._enter(rank)
            os.environ["FASTDDP_BENCH_ADDRESS"] = self._addresses[rank]


def run_step(options: argparse.Namespace) -> list[harness.Row]:
    """Two replicas, a cable between them."""
    with network.cable(options.rate, 1) as (enter, facts):
        seated = _Seated(enter, netns._ADDRESSES)
        return harness.spawn_ranks(measure_step, (options, facts), 2, options.threads, enter=seated)


# -------------------------------------------------------------------------------------------------------------- regroup


def measure_regroup(options: argparse.Namespace) -> list[harness.Row]:
    """On each rank: from group to group, a step in each."""
    model = fastddp.DistributedDataParallel(module_of(options.width, options.layers))
    if options.hook:
        model.register_comm_hook(*comm_hooks.hook_named(options.hook))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    times = []
    everyone = list(range(dist.get_world_size()))
    for number in range(options.rounds + 2):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(2, options.width)).square().mean().backward()
            optimizer.step()
        before = model.process_group
        group = dist.new_group(everyone)
        dist.barrier()
        begin = time.perf_counter()
        model.regroup(group)
        if number >= 2:
            times.append(time.perf_counter() - begin)
        if before is not dist.group.WORLD:
            dist.destroy_process_group(before)
    facts = harness.environment(MODULE, torch.device("cpu"), torch.get_num_threads())
    facts |= {"case": "regroup", "parameters": sum(p.numel() for p in model.parameters()), "rounds": options.rounds}
    facts |= {"contestant": f"regroup, {options.hook or 'plain'}, {len(everyone)} ranks"}
    return [facts | harness.rounded(harness.Percentiles.of(times).columns("ms", 1e3), 3)]


def run_regroup(options: argparse.Namespace) -> list[harness.Row]:
    """Three ranks of one machine."""
    return harness.spawn_ranks(measure_regroup, (options,), options.ranks, options.threads)


# ---------------------------------------------------------------------------------------------------------------- kills


def run_kills(options: argparse.Namespace) -> list[harness.Row]:
    """As long a run without kills and with them: committed steps, and gaps of those that are left."""
    sys.path.insert(0, str(harness.ROOT / "examples"))
    from elastic import Show

    rows = []
    facts = harness.environment(MODULE, torch.device("cpu"), 1) | {"case": "kills", "replicas": 3}
    seconds = options.every * options.kills
    shown = {}
    for kills in (0, options.kills):
        show = Show(3, options.every, kills, seconds, options.heartbeat, stops=options.stops)
        show.run()
        shown[kills] = show
        lost = show.lost_steps()
        gaps = show.gaps()
        rows.append(
            facts
            | {"contestant": f"{kills} {'stops' if options.stops else 'kills'}", "seconds": seconds}
            | {"every_s": options.every, "heartbeat_s": options.heartbeat, "kills": len(show.killed)}
            | {"committed": show.committed(), "lost_steps_per_kill": max(lost, default=None)}
            | {"gap_median_s": round(statistics.median(gaps), 3) if gaps else None}
            | {"gap_most_s": round(max(gaps), 3) if gaps else None, "replicas_equal": show.replicas_are_equal()}
        )
    rows[1]["of_undisturbed"] = round(rows[1]["committed"] / rows[0]["committed"], 3)
    if options.picture:
        draw(options.picture, shown)
    return rows


def draw(path: Path, shown: dict[int, Any]) -> None:
    """Committed steps a second over time, and when a replica was killed."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 3))
    for kills, show in sorted(shown.items()):
        axes.plot(*show.throughput(), label=f"{kills} kills" if kills else "undisturbed", linewidth=1)
    for moment in shown[max(shown)].killed:
        axes.axvline(moment, color="red", linewidth=0.5)
    axes.set_xlabel("seconds (a red line: a replica is killed)")
    axes.set_ylabel("committed steps/s")
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """One case."""
    parser = harness.parser(MODULE, __doc__)
    parser.add_argument("case", choices=["step", "regroup", "kills"])
    harness.add_common(parser, "contestant", rounds=20, warmup=4, ranks=3, threads=1)
    parser.add_argument("--rate", default="2gbit", help="of the cable between two replicas; 'loopback': none")
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--hook", default="")
    parser.add_argument("--every", type=float, default=3.0, help="seconds from kill to kill")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--heartbeat", type=float, default=0.5)
    parser.add_argument("--stops", action="store_true", help="replicas stand still before they are killed")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    rows = {"step": run_step, "regroup": run_regroup, "kills": run_kills}[options.case](options)
    columns = [key for key in rows[0] if key not in harness.environment(MODULE, torch.device("cpu"), 1)]
    for row in rows:
        print(json.dumps({key: row.get(key) for key in columns}))
    if options.json:
        harness.write_json(options.json, rows)


if __name__ == "__main__":
    main()
