"""Whether a long training grows: `python -m bench.soak` runs thousands of steps in each mode, two ranks over gloo.

Every 100 steps each rank notes its resident memory, its threads and file descriptors, and the keys in the store of the
process group. What counts is the second half of the steps. Flat means:

- memory: the slope, times the steps of that half, is at most 1 MiB (the slope: the median of those between any two
  samples). So 4,000 steps find what loses 525 bytes a step;
- threads, descriptors and keys: as many at the end as in the middle.

In the mode `watched` no alarm may be raised, whatever else is said, and ranks must end with the same parameters. The
program ends with 1 if anything grows on any rank, or an alarm is raised:

    python -m bench.soak --mode watched --ranks 4 --steps 10000
"""

from __future__ import annotations

import argparse
import gc
import itertools
import resource
import statistics
import sys
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench import harness

MODULE = "bench.soak"
ALLOWED_BYTES = 1 << 20  # over the second half
COUNTS = ("threads", "descriptors", "keys")


def main() -> None:
    options = parse_arguments()
    rows: list[harness.Row] = []
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name in options.mode:
        rows += harness.spawn_ranks(measure, (name, options, store.port), options.ranks, threads=1)
    harness.report(rows, [table(rows)], options.json)
    exit_if_growing(rows)


def parse_arguments() -> argparse.Namespace:
    from bench.soak_modes import MODES

    parser = harness.parser(MODULE, __doc__)
    harness.add_selection(parser, MODES, "--mode", "--modes")
    parser.add_argument("--steps", type=int, default=4000, help="in each mode (default: %(default)s)")
    parser.add_argument("--every", type=int, default=100, help="steps between two samples (default: %(default)s)")
    harness.add_common(parser, "mode and rank, with its samples", ranks=2)
    options = parser.parse_args()
    if options.every < 1 or options.steps < 4 * options.every:
        parser.error("--steps needs at least four times --every: the second half has to have several samples")
    return options


def measure(mode_name: str, options: argparse.Namespace, port: int) -> list[harness.Row]:
    """Runs one mode on this rank; every rank returns the same rows, one for each rank."""
    from bench.soak_modes import MODES, Watched

    rank, ranks = dist.get_rank(), dist.get_world_size()
    # The store that torchrun has too, in a process of its own: its server's threads are not the ranks'.
    dist.destroy_process_group()
    server = dist.TCPStore("127.0.0.1", port, is_master=False)
    store = dist.PrefixStore(mode_name, server)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(minutes=5))
    mode = next(mode for mode in MODES if mode.name == mode_name)
    warnings.simplefilter("ignore")  # a window that is repaired says so, in thousands of steps too often
    torch.manual_seed(0)
    step = mode.make()
    torch.manual_seed(rank)
    samples: dict[str, list[int]] = {name: [] for name in ("bytes", *COUNTS)}
    with harness.progress(mode_name, options.steps // options.every, show=rank == 0) as advance:
        for number in range(options.steps):
            step(number)
            if (number + 1) % options.every == 0:
                for name, value in sample(server).items():
                    samples[name].append(value)
                advance()
    facts = harness.environment(MODULE, torch.device("cpu"), 1)
    facts |= {"mode": mode.name, "mode_about": mode.about, "rank": rank, "world_size": ranks}
    facts |= {"steps": options.steps, "every": options.every, "samples": samples} | judge(samples, options.every)
    if isinstance(step, Watched):
        facts |= step.told()
        if facts["soft_reports"]:
            facts["grows"] = [what for what in facts["grows"] if what != "keys"]  # a report leaves some
        facts["grows"] += facts["alarms"] + ([] if facts["replicas_agree"] else ["replicas differ"])
    return harness.of_all_ranks(facts)


def sample(store: dist.Store) -> dict[str, int]:
    """What this process holds now; taken on all ranks at the same step."""
    gc.collect()
    dist.barrier()  # a key that a rank is about to delete is deleted
    keys = store.num_keys()
    dist.barrier()
    pages = int(Path("/proc/self/statm").read_text().split()[1])  # resident ones
    return {
        "bytes": pages * resource.getpagesize(),
        "threads": sum(1 for _ in Path("/proc/self/task").iterdir()),
        "descriptors": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "keys": keys,
    }


def judge(samples: dict[str, list[int]], every: int) -> harness.Row:
    """Of one rank's samples, `every` so many steps: how they changed in the second half, and what of it is growth."""
    half = len(samples["bytes"]) // 2
    later = {name: values[half - 1 :] for name, values in samples.items()}
    grown = slope(later["bytes"]) * (len(later["bytes"]) - 1)
    changes = {name: later[name][-1] - later[name][0] for name in COUNTS}
    grows = ["memory"] * (grown > ALLOWED_BYTES) + [name for name, change in changes.items() if change != 0]
    return {"bytes_a_step": round(slope(later["bytes"]) / every, 1), "changes": changes, "grows": grows}


def slope(values: Sequence[int]) -> float:
    """The median of the slopes between any two values, whose places are 0, 1, 2, ...: one jump does not change it.

    >>> slope([5, 5, 5, 9, 5]), slope([1, 3, 5, 7])
    (0.0, 2.0)
    """
    places = itertools.combinations(range(len(values)), 2)
    return statistics.median((values[late] - values[early]) / (late - early) for early, late in places)


def exit_if_growing(rows: Sequence[harness.Row]) -> None:
    """Ends the program with 1, and says what grows where, if anything does."""
    growing = [f"{row['mode']} (rank {row['rank']}): {', '.join(row['grows'])}" for row in rows if row["grows"]]
    if growing:
        sys.exit(f"something grows: {'; '.join(growing)}")


def table(rows: Sequence[harness.Row]) -> Any:
    """A line for each mode and rank: where it was at the middle and at the end."""
    first = rows[0]
    middle = len(first["samples"]["bytes"]) // 2 - 1
    title = f"{first['steps']} steps in each mode, {first['world_size']} ranks, gloo; middle -> end"
    columns = {"mode": "{mode}", "rank": "{rank}", "bytes": f"{{samples[bytes][{middle}]}} -> {{last[bytes]}}"}
    columns |= {"bytes a step": "{bytes_a_step:+.1f}"}
    columns |= {name: f"{{samples[{name}][{middle}]}} -> {{last[{name}]}}" for name in COUNTS}
    ends = [row | {"last": {name: values[-1] for name, values in row["samples"].items()}} for row in rows]
    return harness.row_table(title, [*columns.items(), ("grows", "{grows}")], ends)


if __name__ == "__main__":
    main()
