"""Whether a training without trouble raises an alarm: `python -m bench.healthy` watches 10,000 steps.

Four ranks over gloo, on the CPU, each of which pauses now and then as ranks do: in its data, in its forward and in its
optimizer, for up to nine tenths of the patience. Garbage is collected; rank 0 writes checkpoints, and evaluates
while the others wait at a barrier. Stalls, corruptions, replicas and sums are all looked for. The program ends with 1
if something was said; a soft report, which raises nothing, is counted apart. At the end ranks compare their parameters.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastddp
from bench import harness

MODULE = "bench.healthy"
PLACES = ("data", "forward", "optimizer")
SHORT = 0.02  # seconds at most, of pauses that nobody counts
SHORT_CHANCE = 0.02  # of each rank in each step
COLLECT_EVERY, CHECKPOINT_EVERY, EVALUATE_EVERY = 50, 500, 1000  # steps
ACCUMULATE_EVERY = 10  # steps, one of which has two backwards


def main() -> None:
    options = parse_arguments()
    rows = harness.spawn_ranks(measure, (options,), options.ranks, threads=1)
    title = (
        f"{options.steps} steps, {options.pauses} long pauses, {options.ranks} ranks, patience {options.patience:g} s, "
        f"audit_every {options.every}: {rows[0]['seconds']:.0f} s"
    )
    columns = {"rank": "{rank}"} | {f"s paused in {place}": f"{{paused[{place}]:.1f}}" for place in PLACES}
    columns |= {"alarms": "{alarms}", "soft reports": "{soft_reports}", "replicas agree": "{replicas_agree}"}
    harness.report(rows, [harness.row_table(title, columns.items(), rows)], options.json)
    exit_if_alarmed(rows)


def parse_arguments() -> argparse.Namespace:
    parser = harness.parser(MODULE, __doc__)
    parser.add_argument("--steps", type=int, default=10_000, help="default: %(default)s")
    parser.add_argument("--pauses", type=int, default=60, help="long ones, in all (default: %(default)s)")
    parser.add_argument("--patience", type=float, default=5.0, help="Watch.patience, seconds (default: %(default)s)")
    parser.add_argument("--every", type=int, default=100, help="audit_every (default: %(default)s)")
    harness.add_common(parser, "rank", ranks=4, seed=0)
    options = parser.parse_args()
    if options.pauses > options.steps:
        parser.error("--pauses may be as many as --steps at most: each is in a step of its own")
    return options


@dataclass(frozen=True)
class Pause:
    """Of one rank, in one step."""

    step: int
    rank: int
    place: str
    seconds: float


def pauses(count: int, steps: int, ranks: int, longest: float, seed: int) -> dict[int, Pause]:
    """By step, the long ones; the same on all ranks."""
    chance = random.Random(seed)
    return {
        step: Pause(step, chance.randrange(ranks), chance.choice(PLACES), chance.uniform(0, longest))
        for step in chance.sample(range(steps), count)
    }


class Training:
    """Of one rank."""

    def __init__(self, options: argparse.Namespace, folder: str) -> None:
        self._rank = dist.get_rank()
        self._steps = options.steps
        self._pauses = pauses(options.pauses, options.steps, options.ranks, 0.9 * options.patience, options.seed)
        self._chance = random.Random(self._rank)
        self._checkpoint = Path(folder, "checkpoint")
        self._pause: Pause | None = None
        self.said: list[str] = []
        self.soft = 0
        self.paused = dict.fromkeys(PLACES, 0.0)  # seconds
        torch.manual_seed(0)
        self._module = nn.Sequential(
            nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 4)
        )
        self._module[2].register_forward_hook(lambda *_: self._come_to("forward"))
        self.model = fastddp.DistributedDataParallel(
            self._module,
            bucket_cap_mb=0.01,
            watch=fastddp.Watch(
                stall=self._on_stall,
                patience=options.patience,
                corruption=lambda corruption: self.said.append(str(corruption)),
                audit_every=options.every,
            ),
        )
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self._optimizer.register_step_pre_hook(lambda *_: self._come_to("optimizer"))
        self.model.audit(self._optimizer)

    def run(self, show: bool) -> None:
        """All steps."""
        with harness.progress("healthy", self._steps // 100, show=show) as advance:
            for step in range(self._steps):
                self._run_step(step)
                if (step + 1) % 100 == 0:
                    advance()

    def _run_step(self, step: int) -> None:
        pause = self._pauses.get(step)
        self._pause = pause if pause is not None and pause.rank == self._rank else None
        self._come_to("data")
        self._optimizer.zero_grad()
        if step % ACCUMULATE_EVERY == 0:
            with self.model.no_sync():
                self._loss(self.model).backward()
        self._loss(self.model).backward()
        self._optimizer.step()
        if (step + self._rank) % COLLECT_EVERY == 0:
            gc.collect()
        if step % CHECKPOINT_EVERY == 0 and self._rank == 0:
            state = {"model": self._module.state_dict(), "optimizer": self._optimizer.state_dict()}
            torch.save(state, self._checkpoint)
        if step % EVALUATE_EVERY == 0:
            self._evaluate()

    def _loss(self, model: nn.Module) -> Tensor:
        inputs = torch.randn(8, 16)
        return (model(inputs) - inputs[:, :4].sin()).square().mean()

    def _evaluate(self) -> None:
        """On rank 0 alone, as is common."""
        if self._rank == 0:
            self._module.eval()
            with torch.no_grad():
                for _ in range(50):
                    self._loss(self._module)
                    time.sleep(SHORT)
            self._module.train()
        dist.barrier()

    def _come_to(self, place: str) -> None:
        pause = self._pause
        if pause is not None and pause.place == place:
            self._pause = None
            time.sleep(pause.seconds)
            self.paused[place] += pause.seconds
        elif self._chance.random() < SHORT_CHANCE:
            time.sleep(self._chance.uniform(0, SHORT))

    def _on_stall(self, report: fastddp.StallReport) -> None:
        if report.is_soft:
            self.soft += 1
        else:
            self.said.append(str(report))


def measure(options: argparse.Namespace) -> list[harness.Row]:
    """Trains on this rank; every rank returns the same rows, one for each rank."""
    rank = dist.get_rank()
    facts = harness.environment(MODULE, torch.device("cpu"), 1)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        training = Training(options, folder)
        torch.manual_seed(1 + rank)
        training.run(show=rank == 0)
    facts |= {"rank": rank, "world_size": dist.get_world_size(), "steps": options.steps, "pauses": options.pauses}
    facts |= {"patience": options.patience, "audit_every": options.every, "seed": options.seed}
    facts |= {
        "seconds": round(time.monotonic() - begin, 1),
        "paused": harness.rounded(training.paused, 1),
        "alarms": training.said,
        "soft_reports": training.soft,
        "replicas_agree": _agree(training.model),
    }
    return harness.of_all_ranks(facts)


def _agree(model: nn.Module) -> bool:
    """Whether all ranks have the same bits; by all of them, and not by the audit."""
    flat = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])
    of_all = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all, flat)
    return all(torch.equal(flat, other) for other in of_all)


def exit_if_alarmed(rows: Sequence[harness.Row]) -> None:
    """Ends the program with 1, and says what was said, if anything was."""
    alarms = [f"rank {row['rank']}: {alarm}" for row in rows for alarm in row["alarms"]]
    if alarms or not all(row["replicas_agree"] for row in rows):
        sys.exit("\n".join(["a training without trouble raised an alarm, or its replicas differ:", *alarms]))


if __name__ == "__main__":
    main()
