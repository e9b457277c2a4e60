"""A training step that is captured as a CUDA graph and replayed: no host is in the way, whoever's step it is."""

from __future__ import annotations

import gc

import torch

from bench import harness
from bench.cases import Case, case_named
from bench.gpu import timing
from bench.gpu.contestants import REFERENCE, GpuStep, Mode, modes
from bench.gpu.gradients import largest_difference
from bench.gpu.models import gpt2
from bench.gpu.results import Run
from bench.gpu.step import lonely_group

_STEPS_BEFORE = 11  # torch's DDP asks for as many before a capture


class Captured:
    """The graph of one contestant's forward and backward, over a batch that stays."""

    def __init__(self, mode: Mode, case: Case, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            model, batch_of = case.build(device)
            self.step: GpuStep = mode.prepare(model)
            self.batch = batch_of(0, 0)  # replays read it
            for _ in range(_STEPS_BEFORE):
                self.step.run(self.batch)
            self.eager = [gradient.clone() for gradient in self.step.gradients()]
            self.step.clear()
            self.stream.synchronize()
            # Only this thread's calls may spoil the capture: NCCL's watchdog makes some of its own.
            with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
                super(GpuStep, self.step).run(self.batch)

    def difference(self) -> float:
        """Of a replay's gradients from those of the last eager step."""
        with torch.cuda.stream(self.stream):
            for gradient in self.step.gradients():
                gradient.fill_(torch.nan)
            self.graph.replay()
            return largest_difference(self.step.gradients(), self.eager)


def measure(run: Run) -> None:
    """Adds a row for each model and mode. Nothing is measured where there is no CUDA."""
    if run.device.type != "cuda":
        run.skip("captured steps: the device is not CUDA's")
        return
    with lonely_group(run.device):
        for case in (case_named("500x32sq"), gpt2(samples=2, length=1024)):
            _measure_case(run, case)
            gc.collect()
    columns = {"model": "{case}", "contestant": "{contestant}", "median": "{median_ms:.3f}"}
    columns |= {"p90": "{p90_ms:.3f}", "/ torch": "{ratio_to_torch}", "gradients": "{result}"}
    title = "A captured step, replayed: ms on the device"
    run.out.print(harness.row_table(title, columns.items(), run.results.of_kind("graph"), left=2))


def _measure_case(run: Run, case: Case) -> None:
    captured: dict[str, Captured] = {}
    for mode in modes(seldom=False):
        try:
            captured[mode.name] = Captured(mode, case, run.device)
        except RuntimeError as error:
            torch.accelerator.synchronize(run.device)
            text = str(error).strip().splitlines()[0]
            run.results.add("graph failed", case=case.name, contestant=mode.name, error=text)
    differences = {name: one.difference() for name, one in captured.items()}
    seconds: dict[str, list[float]] = {name: [] for name in captured}
    timer = timing.DeviceTimer(run.device)
    names = list(captured)
    for _, number, index in harness.turns(len(names), range(-2, 6 if run.quick else 24)):
        one = captured[names[index]]
        with torch.cuda.stream(one.stream):
            timer.start()
            one.graph.replay()
            timer.stop()
        if number >= 0:
            seconds[names[index]].append(timer.seconds())
        torch.accelerator.synchronize(run.device)
    for name, own in seconds.items():
        ratio = harness.paired_ratio(own, seconds[REFERENCE]) if REFERENCE in seconds else None
        run.results.add(
            "graph",
            case=case.name,
            contestant=name,
            rounds=len(own),
            **harness.Percentiles.of(own).columns("ms", 1e3),
            ratio_to_torch=ratio,
            largest_difference=differences[name],
            result="equal" if differences[name] == 0 else "close" if differences[name] < 1e-2 else "WRONG",
        )
