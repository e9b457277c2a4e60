"""Shows what compressed gradients do to training: final losses over several seeds: `python -m bench.training --help`.

Each setting trains the same models, from the same first parameters and on the same batches, as training without
compression does. `nudged` is without compression too, but its first parameters are moved by one rounding: training
amplifies any difference, so the losses of a seed move although nothing got worse, and `nudged` shows by how much.

In the table `Δ seed` is the largest difference of a seed's loss from the same seed's without compression. `in spread`
says whether the mean over the seeds differs from that without compression by no more than the largest loss without
compression does from the smallest. The exit status is 1 when ranks end with different parameters, when a loss is not a
number, when fastddp without compression is not bitwise torch's DDP (on two ranks), or when 16 or 8 bits are not in the
spread.
"""

from __future__ import annotations

import argparse
import re
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power_sgd
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fastddp
from bench import harness
from bench.checks import digest
from bench.losses import NUDGED, SHARDED, UNCOMPRESSED, UNNOTICED, draw, exit_if_wrong, task_table
from bench.tasks import TASKS, Data, Task
from fastddp import comm_hooks

MODULE = "bench.training"
_SEVERAL_VECTORS = ("powersgd1", "powersgd2", "powersgd4", "powersgd8", "torch-powersgd4")
SETTINGS = (UNCOMPRESSED, "torch", NUDGED, *UNNOTICED, *_SEVERAL_VECTORS)
_POWERSGD = re.compile(r"(torch-)?powersgd([1-9]|[12]\d|3[012])")


def main() -> None:
    options = parse_arguments()
    rows = []
    for name in options.task:
        rows += harness.spawn_ranks(measure, (name, options), options.ranks, options.threads)
    harness.report(rows, map(task_table, harness.grouped(rows, "task").values()), options.json)
    if options.plot:
        draw(options.plot, rows)
    exit_if_wrong(rows)


def parse_arguments() -> argparse.Namespace:
    parser = harness.parser(MODULE, __doc__)
    add = parser.add_argument
    add("--task", nargs="+", choices=list(TASKS), default=list(TASKS), help="default: %(default)s")
    add(
        "--setting",
        nargs="+",
        default=list(SETTINGS),
        help="powersgdN has N vectors; torch-: torch's hook under torch's DDP (default: %(default)s)",
    )
    add("--seeds", type=int, default=3, help="runs of each setting (default: %(default)s)")
    add("--steps", type=int, help="of each run (default: the task's own)")
    harness.add_common(parser, "task, setting and seed", ranks=2, threads=1)
    add("--plot", type=Path, metavar="FILE", help="draw the losses (takes matplotlib)")
    options = parser.parse_args()
    for name in options.setting:
        if name not in SETTINGS and not _POWERSGD.fullmatch(name):
            parser.error(
                f"--setting: there is no {name!r}; there are {', '.join(SETTINGS[:5])} and (torch-)powersgd1 to 32"
            )
    options.setting = list(dict.fromkeys([UNCOMPRESSED, *options.setting]))  # what all others are compared with
    if options.seeds < 1 or options.ranks < 1 or (options.steps is not None and options.steps < 1):
        parser.error("--seeds, --ranks and --steps must be at least 1")
    return options


# ------------------------------------------------------------------------------------------------------------ training


@dataclass(frozen=True)
class Outcome:
    """Of one run, the same on all ranks."""

    losses: list[float]  # of each step, the mean over the ranks
    evaluation_loss: float
    evaluation_accuracy: float
    digests: list[str]  # of the parameters' bits on each rank


def measure(name: str, options: argparse.Namespace) -> list[harness.Row]:
    """Trains with all settings and seeds on all ranks; every rank returns the same rows. TASKS has the name."""
    task = TASKS[name]()
    task = replace(task, steps=options.steps or task.steps)
    start = max(2, task.steps // 10)  # of PowerSGD; it takes two steps until the buckets are final
    facts = harness.environment(MODULE, torch.device("cpu"), options.threads) | {
        "task": task.name,
        "task_about": task.about,
        "world_size": dist.get_world_size(),
        "backend": dist.get_backend(),
        "steps": task.steps,
        "learning_rate": task.learning_rate,
    }
    rows = []
    with harness.progress(task.name, options.seeds * len(options.setting), show=dist.get_rank() == 0) as advance:
        for seed in range(options.seeds):
            for setting in options.setting:
                rows.append(facts | _columns(setting, seed, train(task, setting, seed, start), start))
                advance()
    order = {setting: place for place, setting in enumerate(options.setting)}
    return sorted(rows, key=lambda row: order[row["setting"]])


def train(task: Task, setting: str, seed: int, start: int) -> Outcome:
    """One run, on all ranks; PowerSGD compresses from step `start` on."""
    torch.manual_seed(seed)  # the first parameters
    data = task.data(seed, dist.get_rank(), dist.get_world_size())
    network = task.model()
    if setting == NUDGED:
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.mul_(1 + torch.finfo(parameter.dtype).eps)
    model = wrap(network, setting, start)
    optimizer = _optimizer_of(task, model, setting)
    losses = torch.zeros(task.steps, dtype=torch.float64)
    for step in range(task.steps):
        for group in optimizer.param_groups:
            group["lr"] = task.learning_rate_at(step)
        inputs, targets = data.batch(step)
        loss = _loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.detach()
    dist.all_reduce(losses)
    evaluation_loss, accuracy = _evaluate(network, data)
    losses = losses / dist.get_world_size()
    digests = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest(network.parameters()))
    return Outcome(losses.tolist(), evaluation_loss, accuracy, digests)


def wrap(model: nn.Module, setting: str, start: int) -> nn.Module:
    """The model under the DDP and with the hook of a setting."""
    if setting in SHARDED:
        setting = setting.removeprefix("sharded").removesuffix("-rounded").removeprefix("-") or UNCOMPRESSED
    if setting == "torch":
        return TorchDDP(model)
    match = _POWERSGD.fullmatch(setting)
    if match and match[1]:
        # On gloo torch's PowerSGD waits for ever with several buckets.
        ddp: nn.Module = TorchDDP(model, bucket_cap_mb=1 << 20)
        _register_power_sgd(ddp, torch_power_sgd, int(match[2]), start)
        return ddp
    ddp = fastddp.DistributedDataParallel(model)
    if match:
        _register_power_sgd(ddp, comm_hooks, int(match[2]), start)
    elif setting not in (UNCOMPRESSED, NUDGED):
        ddp.register_comm_hook(None, getattr(comm_hooks, f"{setting}_compress_hook"))
    return ddp


def _optimizer_of(task: Task, model: Any, setting: str) -> torch.optim.Optimizer:
    if setting not in SHARDED:
        return task.optimizer(model.parameters(), task.learning_rate)
    wire = torch.bfloat16 if setting.endswith("-rounded") else None
    return fastddp.ShardedOptimizer(model, task.optimizer, rate=task.learning_rate, parameter_wire=wire)


def _register_power_sgd(ddp: Any, hooks: Any, rank: int, start: int) -> None:
    state = hooks.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=rank,
        start_powerSGD_iter=start,
        use_error_feedback=True,
        warm_start=True,
    )
    ddp.register_comm_hook(state, hooks.powerSGD_hook)


def _loss(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=reduction)


def _evaluate(model: nn.Module, data: Data) -> tuple[float, float]:
    """The loss and the share of right predictions, over what all ranks evaluate."""
    totals = torch.zeros(3, dtype=torch.float64)
    model.eval()
    with torch.no_grad():
        for inputs, targets in data.evaluation:
            logits = model(inputs)
            right = (logits.argmax(-1) == targets).sum()
            totals += torch.stack([_loss(logits, targets, "sum"), right, torch.tensor(targets.numel())])
    dist.all_reduce(totals)
    loss, right, predictions = totals.tolist()
    return loss / predictions, right / predictions


def _columns(setting: str, seed: int, outcome: Outcome, start: int) -> harness.Row:
    window = max(1, len(outcome.losses) // 50)  # steps that make each number of the curve
    last = max(1, len(outcome.losses) // 10)  # steps that make the final loss
    starts = range(0, len(outcome.losses) - window + 1, window)
    return {
        "setting": setting,
        "seed": seed,
        "powersgd_start": start if "powersgd" in setting else None,
        "curve_window": window,
        "final_window": last,
        "training_loss": statistics.fmean(outcome.losses[-last:]),
        "evaluation_loss": outcome.evaluation_loss,
        "evaluation_accuracy": outcome.evaluation_accuracy,
        "ranks_agree": len(set(outcome.digests)) == 1,
        "parameters_digest": outcome.digests[0],
        "curve": [round(statistics.fmean(outcome.losses[start : start + window]), 6) for start in starts],
    }


if __name__ == "__main__":
    main()
