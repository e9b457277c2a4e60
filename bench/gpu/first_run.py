"""Everything that one GPU can show in a few minutes, in order of worth: `python -m bench.gpu.first_run --help`.

Each step is a process group of its own with a limit of its own: one that fails, hangs or leaves the GPU's context in
ruins costs the others nothing. `--out` is a folder, which gets `steps.jsonl`, a line as soon as a step has ended;
`gpu.json`, the sections' rows as soon as they are known; `log.txt`, all that the steps print; and other files of steps.
Of each step the end of what it prints is shown, and a table of all steps so far.

Exit status: 0; 1 where a step found something wrong, did not get to its end, or had no time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import harness
from bench.gpu import digest, nsight, results, simulated

MODULE = "bench.gpu.first_run"
CUDA = "cuda"

# A step ends itself before its limit does: it looks at the clock only between two measurements.
_SHARE = 0.75
_LINES_SHOWN = 12
_LEAST_SECONDS = 5.0


@dataclass(frozen=True)
class Step:
    """One command: with how many seconds it is ended, and the arguments of Python, or of another program."""

    name: str
    limit: float
    arguments: tuple[str, ...]
    program: str = sys.executable

    def command(self) -> list[str]:
        """What is run, from the root of the repository."""
        return [self.program, *self.arguments]


# Run side by side: none of them measures time, and at most one of them is a section; or it is alone.
Group = tuple[Step, ...]


@dataclass(frozen=True)
class Outcome:
    """A line of `steps.jsonl`. Status: the exit status; None where the step was ended, was not there or had no time."""

    step: str
    limit_s: float
    seconds: float
    status: int | None
    says: str
    rows: int = 0
    wrong: int = 0

    @property
    def passed(self) -> bool:
        """Whether it got to its end, and found nothing wrong."""
        return self.status == 0 and self.wrong == 0


@dataclass(frozen=True)
class Plan:
    """Makes the steps. On the simulated device they are the smallest cases, whose numbers mean nothing."""

    device: str
    out: Path

    @property
    def is_real(self) -> bool:
        """Whether there is a GPU."""
        return self.device == CUDA

    def section(self, name: str, limit: float) -> Step:
        """A section of `bench.gpu`."""
        arguments = ["-m", "bench.gpu", name, "--json", str(self.rows), "--seconds", f"{_SHARE * limit:.0f}"]
        return Step(name, limit, (*arguments, "--device", self.device, *([] if self.is_real else ["--quick"])))

    @property
    def rows(self) -> Path:
        """The file of the sections' rows."""
        return self.out / "gpu.json"

    def tests(self, name: str, limit: float, *arguments: str) -> Step:
        """Tests that need a GPU. On the simulated device, for which CI runs them elsewhere, they are only found."""
        shown = ["-q", "--tier", "all", "--device", self.device, "-p", "no:cacheprovider"]
        report = f"--junitxml={self.out / name.replace(' ', '-')}.xml" if self.is_real else "--collect-only"
        return Step(name, limit, ("-m", "pytest", *shown, report, *arguments))

    def two_ranks(self, limit: float) -> Step:
        """`bench.step` with two ranks on the device; the simulated one has no gloo, so there it is the CPU."""
        device = self.device if self.is_real else "cpu"
        cases, rounds = (["gpt2", "resnet50"], "8") if self.is_real else (["500x32sq"], "1")
        size = ["--case", *cases, "--rounds", rounds, "--json", str(self.out / "two_ranks.json")]
        contestants = ["torch", "torch-again", "torch-view", "fastddp", "fastddp-view"]
        arguments = ["--backend", "gloo", "--device", device, "--warmup", "3", "--contestants", *contestants]
        return Step("two ranks over gloo", limit, ("-m", "bench.step", *arguments, *size))

    def nodes(self) -> Step:
        """Four ranks on the device, as two nodes."""
        return self.tests("four ranks", 180, "tests/gpu/test_four_ranks.py")

    def first(self) -> list[Group]:
        """What has never run on a device, in order of worth."""
        some = ("-n", "4", "-k", "not sanitizer and not two_nccl and not four_ranks and not faults")
        small_step = ("tests/gpu/small_step.py", "--device", self.device)
        return [
            (self.section("facts", 20),),
            (
                Step("small steps", 60, small_step),
                self.tests("tests", 90, *some, "tests/gpu"),
            ),
            (self.section("graph", 45),),
            (self.nodes(), self.sanitizer("memcheck")),
            (self.section("overlap", 90),),
        ]

    def sanitizer(self, tool: str) -> Step:
        """compute-sanitizer over a few steps of every mode."""
        return self.tests(tool, 90, "tests/gpu/test_sanitizer.py", "-k", tool)

    def profiled(self, limit: float) -> list[Group]:
        """The same steps under the Nsight Systems of `make nsight-carry`, which leaves nsys.qdstrm; under kineto."""
        steps = ("-m", "bench.gpu.profiled", "--device", self.device if self.is_real else "cpu")
        # Samples of the CPU made a stream of 340 MB of one that has 1.5.
        options = ("--trace=cuda,nvtx", "--cuda-graph-trace=node", "--sample=none", "--cpuctxsw=none")
        arguments = ("profile", *options, "--force-overwrite=true", f"--output={self.out / 'nsys'}", sys.executable)
        nsys = Step("nsys", limit, (*arguments, *steps), program=str(nsight.NSYS))
        kineto = Step("kineto", limit, (*steps, "--kineto", str(self.out)))
        return [(nsys,), (kineto,)] if self.is_real else [(kineto,)]

    def second(self) -> list[Group]:
        """Kernels, memory, compiled models, faults, and steps under profilers."""
        return [
            (self.section("low_rank", 25),),
            (self.section("block8", 20),),
            (self.section("kernels", 25),),
            (self.section("memory", 70),),
            (self.section("compiled", 45), self.tests("faults", 45, "tests/gpu/test_device_faults.py")),
            *self.profiled(30),
        ]

    def later(self) -> list[Group]:
        """What has run before, and what takes longest for what it shows."""
        counters = ("--metrics", ",".join(_METRICS), "--kernel-name", "regex:fastddp_(un)?pack", "--launch-count", "12")
        measured = (sys.executable, "-m", "bench.gpu", "kernels", "--quick")
        log = ("--csv", "--log-file", str(self.out / "counters.csv"))
        ncu = Step("counters", 60, ("--clock-control", "none", *counters, *log, *measured), program="ncu")
        return [
            (self.section("step_rows", 75),),
            (self.section("addresses", 30),),
            (self.section("proofs", 60),),
            (self.section("hooks", 70),),
            (self.section("host", 40),),
            (self.two_ranks(50),),
            (self.section("sum_shards", 25),),
            *([(self.section("step", 100),), *self.with_tools(ncu)] if self.is_real else []),
        ]

    def with_tools(self, ncu: Step) -> list[Group]:
        """Of CUDA's tools, and NCCL."""
        two_ranks = self.tests("two ranks over NCCL", 80, "tests/gpu/test_parity.py", "-k", "two_nccl")
        return [(two_ranks, self.sanitizer("racecheck")), (ncu,)]


# By the name of the list: what makes it, and seconds for all of its steps.
LISTS = {"first": (Plan.first, 470), "second": (Plan.second, 260), "later": (Plan.later, 600)}

_METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "launch__registers_per_thread",
    "launch__occupancy_limit_registers",
)


def main() -> int:
    options = parse_arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    plan = Plan(options.device, options.out.absolute())
    if not plan.is_real:  # compiled before any step's time counts
        simulated.fake_cuda().build()
    groups = [group for name in (LISTS if options.steps else options.lists) for group in LISTS[name][0](plan)]
    if options.steps:
        groups = [tuple(step for step in group if step.name in options.steps) for group in groups]
    seconds = options.seconds or sum(LISTS[name][1] for name in options.lists)
    groups = [tuple(replace(step, limit=step.limit * options.patience) for step in group) for group in groups]
    outcomes = run_all(groups, plan, time.monotonic() + seconds)
    print("\n".join(digest.lines(results.read(plan.rows))))
    print("\n".join(f"{one.step}: {one.says}" for one in outcomes if not one.passed) or "every step passed")
    return 0 if all(one.passed for one in outcomes) else 1


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = harness.parser(MODULE, __doc__)
    add = parser.add_argument
    names = [step.name for made, _ in LISTS.values() for group in made(Plan(CUDA, Path())) for step in group]
    add("--out", type=Path, required=True, metavar="FOLDER", help="where files go")
    limits = ", ".join(f"{seconds} of {name}" for name, (_, seconds) in LISTS.items())
    add("--lists", nargs="+", choices=LISTS, default=["first"], help="of steps, one after the other (default: first)")
    add("--seconds", type=float, help=f"for all steps (default: {limits})")
    add("--patience", type=float, default=1, help="times each step's limit (default: %(default)s)")
    add("--steps", nargs="+", choices=names, metavar="STEP", help=f"only these: {', '.join(names)}")
    add("--device", choices=[CUDA, simulated.DEVICE], default=CUDA, help="the simulated one runs the smallest cases")
    return parser.parse_args(arguments)


def run_all(groups: Sequence[Group], plan: Plan, end: float) -> list[Outcome]:
    """Each group in its turn, for as long as there is time."""
    outcomes: list[Outcome] = []
    for group in groups:
        with ThreadPoolExecutor(max(1, len(group))) as side_by_side:
            ended = side_by_side.map(lambda step: run(step, min(step.limit, end - time.monotonic()), plan), group)
            for outcome in ended:
                outcomes.append(outcome)
                with (plan.out / "steps.jsonl").open("a") as file:
                    file.write(json.dumps(vars(outcome)) + "\n")
        harness.console().print(table(outcomes))
    return outcomes


def run(step: Step, seconds: float, plan: Plan) -> Outcome:
    """One step, in at most so many seconds."""
    if seconds < _LEAST_SECONDS:
        return Outcome(step.name, step.limit, 0.0, None, "no time was left for it")
    if shutil.which(step.program) is None:
        return Outcome(step.name, step.limit, 0.0, None, f"{step.program} is not on the PATH")
    begin = time.monotonic()
    with tempfile.TemporaryFile() as log:
        status = _status(step, seconds, plan, log)
        took = time.monotonic() - begin
        log.seek(0)
        printed = log.read().decode(errors="replace").splitlines()
    head = f"===== {step.name}: {' '.join(step.command())}"
    with (plan.out / "log.txt").open("a") as file:
        file.write("\n".join(["", head, *printed, ""]))
    print("\n".join(["", f"===== {step.name}", *printed[-_LINES_SHOWN:]]), flush=True)
    says = f"was ended after {seconds:.0f} s" if status is None else f"ended with status {status}" if status else ""
    if says and printed:
        says = f"{says}; last: {printed[-1][:200]}"
    mine = [row for row in results.read(plan.rows) if row["section"] == step.name]
    return Outcome(step.name, step.limit, round(took, 1), status, says, len(mine), len(results.wrong(mine)))


def _status(step: Step, seconds: float, plan: Plan, log: Any) -> int | None:
    """The exit status; None if the step was ended."""
    # Matrix products compute the same bits each time only if the variable was there from the beginning.
    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if not plan.is_real:  # it computes a little at a time, where threads cost more than they bring
        environment["OMP_NUM_THREADS"] = "1"
    process = subprocess.Popen(
        step.command(), cwd=harness.ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process, and whatever it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def table(outcomes: Sequence[Outcome]) -> Any:
    """A line for each step so far."""
    columns = {"step": "{step}", "what became of it": "{says}", "s": "{seconds:.0f}", "limit": "{limit_s:.0f}"}
    columns |= {"rows": "{rows}", "wrong": "{wrong}"}
    return harness.row_table(
        "Steps", columns.items(), [vars(one) | {"says": one.says[:60] or "passed"} for one in outcomes], left=2
    )


if __name__ == "__main__":
    sys.exit(main())
