"""What a name for profilers costs: `python -m bench.ranges`.

Times ranges as the reducer makes them, one a gradient and one a window, with nobody listening and under torch.profiler:
nanoseconds each, medians over runs. fastddp has to be compiled in place (`make build`): its objects are linked.
"""

from __future__ import annotations

import statistics
import sysconfig
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.cpp_extension import load

from bench import harness

MODULE = "bench.ranges"
RUNS = 21
NOBODY, PROFILER = 100_000, 5_000  # ranges of a run; torch.profiler keeps each


def build(folder: str) -> Any:
    """The module in ranges.cpp."""
    objects = (
        harness.ROOT / "build" / f"objects-torch-{torch.__version__}-{sysconfig.get_config_var('SOABI')}/build/units"
    )
    units = [path.stem for path in (harness.ROOT / "build" / "units").glob("*.cpp") if path.stem != "bindings"]
    parts = [objects / f"{unit}.o" for unit in units]
    if not parts or not all(path.is_file() for path in parts):
        raise SystemExit(f"{objects} has no objects to link: run make build first.")
    return load(
        "fastddp_bench_ranges",
        [str(harness.ROOT / "bench" / "ranges.cpp")],
        extra_include_paths=[str(harness.ROOT / "csrc")],
        extra_cflags=["-std=c++20", "-O3", "-g0"],
        extra_ldflags=[str(path) for path in parts],
        build_directory=folder,
    )


def measure(ranges: Callable[[int], float]) -> dict[str, float]:
    """Medians in ns, by who listens."""
    alone = [ranges(NOBODY) for _ in range(RUNS)]
    heard = []
    for _ in range(RUNS):
        with profile(activities=[ProfilerActivity.CPU]):
            heard.append(ranges(PROFILER))
    return {"nobody": statistics.median(alone), "torch.profiler": statistics.median(heard)}


def main() -> None:
    """Print, and write if asked."""
    parser = harness.parser(MODULE, __doc__)
    harness.add_common(parser, "kind of range and listener")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        module = build(folder)
        facts = harness.environment(MODULE, torch.device("cpu"), torch.get_num_threads())
        rows: list[harness.Row] = [
            {**facts, "range": name, "listener": listener, "median_ns": round(ns, 1)}
            for name, ranges in (("gradient", module.of_gradients), ("window", module.of_windows))
            for listener, ns in measure(ranges).items()
        ]
    columns = {"range": "{range}", "listener": "{listener}", "ns, median": "{median_ns:,.1f}"}
    harness.report(rows, [harness.row_table("What a range costs", columns.items(), rows, left=2)], options.json)


if __name__ == "__main__":
    main()
