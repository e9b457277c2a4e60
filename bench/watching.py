"""What it costs to watch a run, in steps without trouble: `python -m bench.watching`.

Two tables. What can be switched off in one step and on in the next is timed as `bench.on_and_off` says: gradients that
are measured before ranks add them up (`Watch.corruption`), the audit (`Watch.audit_every`), and both. A step lasts to
the look that an optimizer's step takes. Beside the median of ratios stands the ratio of all steps together, which has
the steps in which a sum is added up once more.

What costs too little for that is counted: the page of progress by running all that a step writes to it, alone and many
times; and threads that watch for stalls by the processor's time that they took while steps ran.
"""

from __future__ import annotations

import argparse
import functools
import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fastddp
from bench import harness, on_and_off
from bench.cases import case_named
from bench.contestants import NO_HOOK, hook_named
from fastddp import DistributedDataParallel

MODULE = "bench.watching"
MEASURED, AUDITED, BOTH = "measured", "audited", "both"
KINDS = (on_and_off.OFF, on_and_off.OFF_AGAIN, MEASURED, AUDITED, BOTH)
COUNTED = "counted"  # in the column of kinds
PAGE_STEPS = 2000


def main() -> None:
    """Measure, print, and write if asked."""
    parser = on_and_off.parser(MODULE, __doc__, 120, "500x32sq", "gpt2")
    parser.add_argument("--every", type=int, default=1000, help="audit_every (default: %(default)s)")
    parser.add_argument("--hook", default=NO_HOOK, help="as for bench.step (default: %(default)s)")
    parser.add_argument("--view", action="store_true", help="gradient_as_bucket_view")
    parser.add_argument("--seconds", type=float, default=20.0, help="of steps, for threads (default: %(default)s)")
    on_and_off.run(parser.parse_args(), measure, tables)


def measure(options: argparse.Namespace, name: str) -> list[harness.Row]:
    """One case on all ranks; every rank returns the same rows."""
    case = case_named(name)
    module, batch_of = case.build(torch.device("cpu"))
    before = _threads()
    model = DistributedDataParallel(
        module, gradient_as_bucket_view=options.view, watch=fastddp.Watch(audit_every=options.every, corruption="raise")
    )
    watchers = _threads() - before
    named = hook_named(options.hook)
    if named is not None:
        model.register_comm_hook(*named.state_and_hook(fastddp.comm_hooks))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    model(*batch_of(dist.get_rank(), 0)).backward()
    optimizer.step()
    model.audit(optimizer)
    audit = model.engine.audit

    def step(batch: tuple[Any, ...]) -> None:
        model(*batch).backward()
        model.engine.look_for_corruption()

    def prepare(kind: str) -> on_and_off.Step:
        model.engine.audit = audit if kind in (AUDITED, BOTH) else None
        model.reducer.watch_local_gradients(kind in (MEASURED, BOTH))
        return step

    rows = on_and_off.measured_rows(MODULE, case, KINDS, options.rounds, model, batch_of, prepare)
    prepare(on_and_off.OFF)
    batch = batch_of(dist.get_rank(), 0)
    steps = max(10, int(1e3 * options.seconds / rows[0]["median_ms"]))
    share = _share_of(watchers, functools.partial(step, batch), steps)
    page = _nanoseconds_of_page(model.engine.now.setting.plan) if dist.get_rank() == 0 else 0.0
    counted = {
        "steps": COUNTED,
        "parameters": len(list(module.parameters())),
        "page_us": round(page / 1e3, 3),
        "page_share": page / 1e6 / rows[0]["median_ms"],
        "threads": len(watchers),
        "threads_share": share,
    }
    facts = {"hook": options.hook, "view": options.view, "audit_every": options.every}
    where = {key: value for key, value in rows[0].items() if key != "median_ms" and "ratio" not in key}
    return [*(row | facts for row in rows), where | facts | counted]


def _threads() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/task").iterdir()}


def _share_of(threads: set[int], step: Callable[[], None], steps: int) -> float:
    """Of the time of so many steps, which run on all ranks: how long these threads had a processor."""
    gc.collect()
    dist.barrier()
    begin, used = time.perf_counter(), _processor_seconds(threads)
    for _ in range(steps):
        step()
    return (_processor_seconds(threads) - used) / (time.perf_counter() - begin)


def _processor_seconds(threads: set[int]) -> float:
    """The first number of schedstat is nanoseconds on a processor."""
    return sum(int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) for thread in threads) * 1e-9


def _nanoseconds_of_page(buckets: Sequence[Sequence[int]]) -> float:
    """Of a step, by the same code, compiled for this."""
    from torch.utils import cpp_extension

    csrc = harness.ROOT / "csrc"
    with tempfile.TemporaryDirectory() as folder:
        built: Any = cpp_extension.load(
            "progress_cost",
            [str(harness.ROOT / "bench" / "progress_cost.cpp")]
            + [str(csrc / "observe" / f"{name}.cpp") for name in ("progress", "shared_page")],
            extra_include_paths=[str(csrc)],
            extra_cflags=["-O3", "-std=c++20"],
            build_directory=folder,
        )
        built.nanoseconds(buckets, PAGE_STEPS)
        return float(built.nanoseconds(buckets, PAGE_STEPS))


def tables(rows: list[harness.Row]) -> list[Any]:
    """Steps, and what is counted."""
    timed = [row for row in rows if row["steps"] != COUNTED]
    columns = {"case": "{case}", "gradients": "{parameters}", "page, us a step": "{page_us:.2f}"}
    columns |= {"share of a step": "{page_share:.3%}", "threads": "{threads}"}
    columns |= {"share of a processor": "{threads_share:.4%}"}
    counted = [row for row in rows if row["steps"] == COUNTED]
    title = f"Steps in which gradients are measured, replicas audited (audit_every={timed[0]['audit_every']}), or both"
    return [on_and_off.table(title, timed), harness.row_table("What is counted", columns.items(), counted)]


if __name__ == "__main__":
    main()
