"""What it costs to watch a run, in steps without trouble: `python -m bench.watching`.

What can be switched on in one step and off in the next is timed so, in one model: gradients that are measured before
ranks add them up (`Watch.corruption`), the audit (`Watch.audit_every`), both, and steps that are sampled and asked for
a report. (Two models, one of which has it on, differ more: by where their memory lies.) The first kind of step is off,
and so is the second, whose ratio to the first is what a run cannot tell apart. A step lasts from a barrier to the
look that an optimizer's step takes, or to the report, and counts as long as on its slowest rank. Beside the median of
ratios stands the ratio of all steps together, which has the steps in which a sum is added up once more, and the
processor's time of the rank that took most, without what others on the machine did meanwhile.

What costs too little for that is counted: the page of progress and names for profilers by running what a step has of
them, alone and many times; and threads that watch for stalls by the processor's time that they took while steps ran.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import fastddp
from bench import harness
from bench.cases import CASES, Batch, case_named
from bench.contestants import NO_HOOK, hook_named

MODULE = "bench.watching"
OFF, MEASURED, AUDITED, BOTH, SAMPLED = "off", "measured", "audited", "both", "sampled"
KINDS = (OFF, "off again", MEASURED, AUDITED, BOTH, SAMPLED)
COUNTED = "counted"  # in the column of kinds
WARMUP = 12  # steps
PAGE_STEPS = 2000
RUNS = 21
NOBODY, PROFILER = 100_000, 5_000  # names of a run; torch.profiler keeps each


def main() -> None:
    """Measure, print, and write if asked."""
    parser = harness.parser(MODULE, __doc__)
    cases = [case.name for case in CASES]
    parser.add_argument("--case", nargs="+", choices=cases, default=["500x32sq", "gpt2"], help="default: %(default)s")
    parser.add_argument("--every", type=int, default=1000, help="audit_every (default: %(default)s)")
    parser.add_argument("--hook", default=NO_HOOK, help="as for bench.step (default: %(default)s)")
    parser.add_argument("--view", action="store_true", help="gradient_as_bucket_view")
    parser.add_argument("--seconds", type=float, default=20.0, help="of steps, for threads (default: %(default)s)")
    harness.add_common(parser, "case and kind of step", rounds=120, ranks=2)
    options = parser.parse_args()
    rows: list[harness.Row] = []
    with tempfile.TemporaryDirectory() as folder:
        built = build(folder)
        for case in options.case:
            *timed, counted = harness.spawn_ranks(measure, (options, case), options.ranks, threads=1)
            plan = counted.pop("plan")
            page = statistics.median(built.of_page(plan, PAGE_STEPS) for _ in range(RUNS)) / 1e6
            names = {"gradient": of_names(built.of_gradients), "window": of_names(built.of_windows)}
            counted |= {"page_us": round(1e3 * page, 3), "page_share": page / timed[0]["median_ms"], "name_ns": names}
            rows += [*timed, counted]
    columns = {"case": "{case}", "steps": "{steps}", "median, ms": "{median_ms:.2f}"}
    columns |= {"to off, paired": "{paired_ratio_to_off:.4f}", "to off, all steps": "{ratio_of_sums_to_off:.4f}"}
    columns |= {"processor": "{processor_ratio_to_off:.4f}"}
    counts = {"case": "{case}", "gradients": "{parameters}", "page, us a step": "{page_us:.2f}"}
    counts |= {"share of a step": "{page_share:.3%}", "threads": "{threads}"}
    counts |= {"share of a processor": "{threads_share:.4%}"}
    counts |= {f"ns a {what}'s name": f"{{name_ns[{what}][nobody]:.0f}}" for what in ("gradient", "window")}
    title = (
        f"Steps in which gradients are measured, replicas audited (audit_every={options.every}), or both; or sampled"
    )
    steps, others = ([row for row in rows if (row["steps"] == COUNTED) == is_one] for is_one in (False, True))
    tables = [harness.row_table(title, columns.items(), steps, left=2)]
    harness.report(rows, [*tables, harness.row_table("What is counted", counts.items(), others)], options.json)


def measure(options: argparse.Namespace, name: str) -> list[harness.Row]:
    """One case on all ranks; every rank returns the same rows, the last of what is counted."""
    module, batch_of = case_named(name).build(torch.device("cpu"))
    before = _threads()
    watch = fastddp.Watch(audit_every=options.every, corruption="raise")
    model = fastddp.DistributedDataParallel(module, gradient_as_bucket_view=options.view, watch=watch)
    watchers = _threads() - before
    named = hook_named(options.hook)
    if named is not None:
        model.register_comm_hook(*named.state_and_hook(fastddp.comm_hooks))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    model(*batch_of(dist.get_rank(), 0)).backward()
    optimizer.step()
    model.audit(optimizer)
    audit = model.engine.audit

    def prepare(kind: str) -> None:
        model.engine.audit = audit if kind in (AUDITED, BOTH) else None
        model.reducer.watch_local_gradients(kind in (MEASURED, BOTH))
        model.sample_steps(every=int(kind == SAMPLED))

    def step(kind: str, batch: Batch) -> None:
        model(*batch).backward()
        model.engine.look_for_corruption()
        if kind == SAMPLED:
            model.step_report()

    def timed(kind: str, number: int) -> tuple[float, float]:
        prepare(kind)
        batch = batch_of(dist.get_rank(), number)
        model.zero_grad()
        gc.collect()
        dist.barrier()
        start, processor = time.perf_counter(), time.process_time()
        step(kind, batch)
        return 1e3 * (time.perf_counter() - start), 1e3 * (time.process_time() - processor)

    times = torch.zeros(2, len(KINDS), options.rounds, dtype=torch.float64)
    for number in range(WARMUP):
        timed(KINDS[-1 - number % len(KINDS)], number)
    with harness.progress(name, options.rounds, show=dist.get_rank() == 0) as advance:
        for place, number, kind in harness.turns(len(KINDS), range(options.rounds), advance):
            times[:, kind, place] = torch.tensor(timed(KINDS[kind], number), dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    facts = harness.environment(MODULE, torch.device("cpu"), torch.get_num_threads())
    facts |= {"case": name, "world_size": dist.get_world_size(), "rounds": options.rounds}
    facts |= {"hook": options.hook, "view": options.view, "audit_every": options.every}
    rows = [facts | {"steps": kind} | columns for kind, columns in zip(KINDS, compare(times), strict=True)]
    prepare(OFF)
    batch = batch_of(dist.get_rank(), 0)
    share = _share_of(watchers, lambda: step(OFF, batch), max(10, int(1e3 * options.seconds / rows[0]["median_ms"])))
    counted = {"steps": COUNTED, "parameters": len(list(module.parameters())), "plan": model.engine.now.setting.plan}
    return [*rows, facts | counted | {"threads": len(watchers), "threads_share": share}]


def compare(times: torch.Tensor) -> list[harness.Row]:
    """Columns of each kind, of (clock and processor, kinds, rounds)."""
    samples, processor = times.tolist()
    return [
        {
            "median_ms": round(statistics.median(own), 4),
            "paired_ratio_to_off": round(harness.paired_ratio(own, samples[0]), 4),
            "ratio_of_sums_to_off": round(sum(own) / sum(samples[0]), 4),
            "processor_ratio_to_off": round(sum(used) / sum(processor[0]), 4),
        }
        for own, used in zip(samples, processor, strict=True)
    ]


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


def build(folder: str) -> Any:
    """The module in watching.cpp, with the code that the reducer runs."""
    from torch.utils import cpp_extension

    csrc = harness.ROOT / "csrc"
    sources = [
        csrc / f"{name}.cpp" for name in ("observe/progress", "observe/ranges", "pages/shared_page", "pages/snapshot")
    ]
    return cpp_extension.load(
        "fastddp_bench_watching",
        [str(path) for path in (harness.ROOT / "bench" / "watching.cpp", *sources)],
        extra_include_paths=[str(csrc)],
        extra_cflags=["-O3", "-g0", "-std=c++20"],
        build_directory=folder,
    )


def of_names(make: Callable[[int], float]) -> dict[str, float]:
    """Medians in ns of a name, by who listens."""
    alone = [make(NOBODY) for _ in range(RUNS)]
    heard = []
    for _ in range(RUNS):
        with profile(activities=[ProfilerActivity.CPU]):
            heard.append(make(PROFILER))
    return {"nobody": round(statistics.median(alone), 1), "torch.profiler": round(statistics.median(heard), 1)}


if __name__ == "__main__":
    main()
