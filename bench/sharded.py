"""Times and weighs whole training steps with sharded optimizers, beside others: `python -m bench.sharded --help`.

A step is forward, backward, exchange, optimizer and `zero_grad` of a GPT, by default of 47 M parameters. All
contestants take `--in-a-row` steps a round, in an order that changes from round to round, and a step counts as long as
on its slowest rank. The time of the last one in a row ends when all its parameters are there. Ratios are to the first
contestant that is named. At the end all ranks must have the same parameters, and the loss may differ from the first
contestant's by as much as rounding explains: else a row says WRONG.

What a contestant frees changes how the allocator of its process treats others. With `--alone N` contestants have
processes of their own, which take all their steps, and each contestant has N turns. Rows then have the medians of
turns, and ratios are the medians of those within a round of turns.

`--memory` weighs instead, with processes for each contestant. `peak_mib` says how far their resident set grew from
before the model was built, in several steps. `held` and the peaks are bytes a parameter in tensors, as torch's
profiler counts what is allocated: after the last step, before `zero_grad`; and at most, with activations. `formula` is
what `held` should be.

`--rate 1gbit` has a cable of that rate between two ranks (`bench.network`). `--bytes` measures nothing: it computes
what a rank holds of so many parameters.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.profiler import ProfilerActivity, profile, record_function

import fastddp
from bench import harness, network
from bench.cases import Gpt
from bench.checks import digest
from fastddp import comm_hooks

MODULE = "bench.sharded"
_ADAMW: dict[str, Any] = {"lr": 1e-4, "fused": True}
_CONTEXT, _SAMPLES = 64, 2
_PARTS = ("forward", "backward", "optimizer", "zero_grad")

# Bytes a parameter after a step with AdamW and gradients of fp32: on each rank, and of all ranks together.
HELD = {
    "torch": (20, 0),  # parameters, gradients and buckets 4 each; state 8
    "fastddp": (16, 0),  # parameters and gradients 4 each; state 8
    "zero": (12, 8),
    "sharded": (8, 8),  # parameters and wires 4 each; state 8
    "sharded-lazy": (4, 12),  # parameters 4; gradients 4 and state 8
    "fsdp2": (0, 16),
    "fastddp-bf16": (18, 0),  # parameters 2, gradients and copies 4 each; state 8
    "sharded-bf16": (6, 12),  # parameters 2, wires 4; copies 4 and state 8
    "sharded-lazy-bf16": (2, 16),  # parameters 2; gradients 4, copies 4 and state 8
    "fsdp2-bf16": (0, 16),
}


def bytes_a_parameter(name: str, ranks: int) -> float | None:
    """What a rank holds after a step; None: there is no formula.

    >>> bytes_a_parameter("sharded-lazy", 8), bytes_a_parameter("sharded-bf16", 8), bytes_a_parameter("torch", 8)
    (5.5, 7.5, 20.0)
    """
    each, together = HELD.get(name, (None, 0))
    return None if each is None else each + together / ranks


# ---------------------------------------------------------------------------------------------------------- contestants


class OnCopies:
    """AdamW on fp32 copies of a model's parameters, as training in 16 bits has them without a sharded optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.copies = [nn.Parameter(parameter.detach().float()) for parameter in self.parameters]
        self.inner = torch.optim.AdamW(self.copies, **_ADAMW)

    def step(self) -> None:
        """With the gradients of the parameters, which are in fp32."""
        pairs = [*zip(self.copies, self.parameters, strict=True)]
        for copy, parameter in pairs:
            copy.grad = parameter.grad
        self.inner.step()
        with torch.no_grad():
            for copy, parameter in pairs:
                parameter.copy_(copy)

    def zero_grad(self) -> None:
        """Drops them, here and there."""
        for tensor in (*self.copies, *self.parameters):
            tensor.grad = None


def _adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), **_ADAMW)


def _zero(model: nn.Module) -> Any:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **_ADAMW)


def _sharded(model: Any, **options: Any) -> Any:
    return fastddp.ShardedOptimizer(model, torch.optim.AdamW, **options, **_ADAMW)


def _fastddp(model: nn.Module, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    return fastddp.DistributedDataParallel(model.to(dtype), **options)


def _int8(model: nn.Module) -> nn.Module:
    ddp = fastddp.DistributedDataParallel(model)
    ddp.register_comm_hook(None, comm_hooks.int8_compress_hook)
    return ddp


def _fsdp2(model: Any) -> nn.Module:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    return model  # type: ignore[no-any-return]


_BF16: dict[str, Any] = {"dtype": torch.bfloat16, "main_grads": "grad"}
_LAZY: dict[str, Any] = {"lazy_bucket_allocation": True, "bucket_cap_mb": 4}

# By name, what wraps a model and what makes its optimizer. The noise floor has a name of its own.
CONTESTANTS: dict[str, tuple[Callable[[nn.Module], nn.Module], Callable[[nn.Module], Any]]] = {
    "torch": (TorchDDP, _adamw),
    "torch-again": (TorchDDP, _adamw),
    "fastddp": (_fastddp, _adamw),
    "fastddp-again": (_fastddp, _adamw),
    "zero": (TorchDDP, _zero),
    "sharded": (_fastddp, _sharded),
    "sharded-lazy": (partial(_fastddp, **_LAZY), _sharded),
    "fsdp2": (_fsdp2, _adamw),
    "fastddp-int8": (_int8, _adamw),
    "sharded-int8": (_int8, partial(_sharded, parameter_wire=torch.bfloat16)),
    "sharded-int8-forward": (_int8, partial(_sharded, parameter_wire=torch.bfloat16, gather="forward")),
    "fastddp-bf16": (partial(_fastddp, **_BF16), OnCopies),
    "sharded-bf16": (partial(_fastddp, **_BF16), _sharded),
    "sharded-lazy-bf16": (partial(_fastddp, **_BF16, **_LAZY), _sharded),
}
_TIMED = ("torch", "torch-again", "fastddp", "zero", "sharded", "fsdp2")


@dataclass(frozen=True)
class Training:
    """One contestant's model and optimizer; first parameters are the same for all."""

    model: nn.Module
    optimizer: Any

    @classmethod
    def of(cls, name: str, options: argparse.Namespace) -> Training:
        """A new one."""
        torch.manual_seed(0)
        wrap, make_optimizer = CONTESTANTS[name]
        model = wrap(Gpt(options.layers, options.width, 8, _CONTEXT))
        return cls(model, make_optimizer(model))

    def steps(self, numbers: range) -> list[float]:
        """The last loss, and the milliseconds of each part of one of these steps in a row."""
        dist.barrier()
        steps = torch.tensor([self.step(number) for number in numbers], dtype=torch.float64)
        begin = time.perf_counter()
        getattr(self.optimizer, "parameters_ready", lambda: None)()
        steps[-1, 1 + _PARTS.index("optimizer")] += 1e3 * (time.perf_counter() - begin)
        return [float(steps[-1, 0]), *steps[:, 1:].mean(0).tolist()]

    def step(self, number: int, clears: bool = True) -> list[float]:
        """The loss, and the milliseconds of each part."""
        generator = torch.Generator().manual_seed(1_000_003 * dist.get_rank() + number)
        tokens = torch.randint(Gpt.VOCABULARY, (_SAMPLES, _CONTEXT + 1), generator=generator)
        moments = [time.perf_counter()]
        loss = self.model(tokens)
        for part in (loss.backward, self.optimizer.step, self.optimizer.zero_grad if clears else lambda: None):
            moments.append(time.perf_counter())
            part()
        moments.append(time.perf_counter())
        return [loss.item(), *(1e3 * (end - begin) for begin, end in itertools.pairwise(moments))]

    def ranks_agree(self) -> bool:
        """Whether all have the same parameters."""
        whole = (one.full_tensor() if isinstance(one, DTensor) else one for one in self.model.parameters())
        mine = digest(one.detach().float() for one in whole)
        return len({row["digest"] for row in harness.of_all_ranks({"digest": mine})}) == 1


# ------------------------------------------------------------------------------------------------------------ measuring


def _facts(options: argparse.Namespace, name: str) -> harness.Row:
    elements = sum(parameter.numel() for parameter in Gpt(options.layers, options.width, 8, _CONTEXT).parameters())
    facts = harness.environment(MODULE, torch.device("cpu"), options.threads)
    return facts | {"world_size": dist.get_world_size(), "elements": elements, "contestant": name}


def measure(names: list[str], options: argparse.Namespace) -> list[harness.Row]:
    """Steps of all these contestants, in turns; on all ranks."""
    trainings = [Training.of(name, options) for name in names]
    rounds = range(options.warmup + options.rounds)
    results = torch.zeros(len(trainings), len(rounds), 1 + len(_PARTS), dtype=torch.float64)
    with harness.progress(MODULE, len(rounds), show=dist.get_rank() == 0) as advance:
        for place, number, index in harness.turns(len(trainings), rounds, advance):
            numbers = range(options.in_a_row * number, options.in_a_row * (number + 1))
            results[index, place] = torch.tensor(trainings[index].steps(numbers))
    agree = [training.ranks_agree() for training in trainings]
    losses, parts = results[:, -1, 0].contiguous(), results[:, options.warmup :, 1:].contiguous()
    times = parts.sum(-1)
    dist.all_reduce(losses)
    for tensor in (parts, times):
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    rows = []
    for index, name in enumerate(names):
        samples, first = times[index].tolist(), times[0].tolist()
        off, is_close = _compared(name, float(losses[index]), float(losses[0]))
        row = {
            "rounds": options.rounds,
            "in_a_row": options.in_a_row,
            **harness.Percentiles.of(samples).columns("ms"),
            "reference": names[0],
            "ratio": harness.Percentiles.of(samples).median / harness.Percentiles.of(first).median,
            "paired_ratio": harness.paired_ratio(samples, first),
            **{f"{part}_ms": float(parts[index, :, place].median()) for place, part in enumerate(_PARTS)},
            "loss": float(losses[index]),
            "loss_difference": off,
            "result": "ranks agree" if agree[index] and is_close else "WRONG",
        }
        rows.append(_facts(options, name) | harness.rounded(row, 6))
    return rows


def _compared(name: str, loss: float, first: float) -> tuple[float, bool]:
    """How far a loss is from the first contestant's, and whether rounding explains it."""
    off = abs(loss / first - 1)
    return off, off <= (0.05 if re.search("int8|bf16", name) else 1e-3)


def measure_alone(names: list[str], options: argparse.Namespace) -> list[harness.Row]:
    """What `measure` finds of each contestant in processes of its own, in turns."""
    run = partial(harness.spawn_ranks, measure, ranks=options.ranks, threads=options.threads)
    turns = [[run(arguments=([name], options))[0] for name in names] for _ in range(options.alone)]
    rows = []
    for place, name in enumerate(names):
        own = [turn[place] for turn in turns]
        ratio = statistics.median(turn[place]["median_ms"] / turn[0]["median_ms"] for turn in turns)
        off, is_close = _compared(name, own[0]["loss"], turns[0][0]["loss"])
        agree = all(one["result"] == "ranks agree" for one in own)
        row = {key: statistics.median(one[key] for one in own) for key in own[0] if key.endswith("_ms")}
        row |= {"reference": names[0], "ratio": ratio, "paired_ratio": ratio, "loss_difference": off}
        result = "ranks agree" if agree and is_close else "WRONG"
        rows.append(own[0] | harness.rounded(row, 6) | {"alone": options.alone, "result": result})
    return rows


def weigh(name: str, options: argparse.Namespace, *, counts: bool) -> list[harness.Row]:
    """One contestant's memory after several steps, resident or counted in tensors.

    Of the rank with least: the profiler does not see what gloo's threads free, and then counts a tensor for too long.
    """
    facts = _facts(options, name)
    before, last = harness.resident("VmRSS"), options.steps - 1
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) if counts else nullcontext() as profiler:
        training = Training.of(name, options)
        for number in range(options.steps):
            with record_function(f"step {number}"):
                training.step(number, clears=number < last)  # with the last one's gradients
    row = (
        {"peak_mib": harness.resident("VmHWM") - before}
        if profiler is None
        else _counted(profiler, last, facts["elements"])
    )
    least = {key: min(other[key] for other in harness.of_all_ranks(row)) for key in row}
    return [facts | {"formula": bytes_a_parameter(name, dist.get_world_size())} | harness.rounded(least, 3)]


def _counted(profiler: Any, last: int, elements: int) -> harness.Row:
    """Bytes a parameter in tensors at the end, at most in the last step, and at most."""
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    begin = next(place for place, event in enumerate(events) if event.name() == f"step {last}")
    sizes = (event.nbytes() if event.name() == "[memory]" else 0 for event in events)
    held = [size / elements for size in itertools.accumulate(sizes)]
    return {"held": held[-1], "peak_of_last_step": max(held[begin:]), "peak": max(held)}


# ------------------------------------------------------------------------------------------------------------- commands


def main() -> None:
    options = parse_arguments()
    if options.bytes:
        harness.console().print(held_table(options))
    elif options.memory:
        rows = []
        for name in options.contestant or [name for name in CONTESTANTS if not name.endswith("-again")]:
            run = partial(harness.spawn_ranks, arguments=(name, options), ranks=options.ranks, threads=options.threads)
            rows.append(run(partial(weigh, counts=False))[0] | run(partial(weigh, counts=True))[0])
        harness.report(rows, [memory_table(rows)], options.json)
    elif options.alone:
        rows = measure_alone(options.contestant or list(_TIMED), options)
        rows = [row | {"rate": network.LOOPBACK} for row in rows]
        harness.report(rows, [step_table(rows)], options.json)
        harness.exit_if_wrong(rows, "{contestant}", "parameters or losses are not what they should be")
    elif not network.is_skipped(MODULE, options.rate):
        rows = []
        for rate in options.rate:
            with network.cable(rate, 1) as (enter, facts):
                arguments = (options.contestant or list(_TIMED), options)
                found = harness.spawn_ranks(measure, arguments, options.ranks, options.threads, enter=enter)
                rows += [row | facts for row in found]
        harness.report(rows, map(step_table, harness.grouped(rows, "rate").values()), options.json)
        harness.exit_if_wrong(rows, "{contestant} at {rate}", "parameters or losses are not what they should be")


def parse_arguments() -> argparse.Namespace:
    parser = harness.parser(MODULE, __doc__)
    add = parser.add_argument
    add("--contestant", "--contestants", nargs="+", choices=[*CONTESTANTS], help="the first is the reference of ratios")
    add("--rate", nargs="+", default=[network.LOOPBACK], help="of a cable between two ranks (default: no cable)")
    add("--in-a-row", type=int, default=1, help="steps of a contestant before the next one's (default: %(default)s)")
    add("--alone", type=int, default=0, help="turns of contestants that have processes of their own")
    add("--memory", action="store_true", help="weigh instead of timing")
    add("--layers", type=int, default=15, help="default: %(default)s")
    add("--width", type=int, default=512, help="a multiple of 8 (default: %(default)s)")
    add("--steps", type=int, default=6, help="of --memory (default: %(default)s)")
    add("--bytes", action="store_true", help="compute what a rank holds, and end")
    add("--parameters", type=float, default=7e9, help="of --bytes, such as 7e9 (default: %(default)g)")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="of --bytes, of parameters (default: %(default)s)")
    harness.add_common(parser, "contestant", rounds=30, warmup=4, ranks=2, threads=1)
    options = parser.parse_args()
    network.check_rates(parser, options.rate)
    if options.ranks != 2 and options.rate != [network.LOOPBACK]:
        parser.error("--rate has a cable between two ranks: leave --ranks out")
    return options


def held_table(options: argparse.Namespace) -> Any:
    """What --bytes prints."""
    title = f"{options.parameters:g} {options.dtype} parameters, {options.ranks} ranks; what one holds after a step"
    rows = []
    for name in HELD:
        held = bytes_a_parameter(name, options.ranks)
        if held is not None and name.endswith("-bf16") == (options.dtype == "bf16"):
            rows.append({"name": name, "held": held, "gib": held * options.parameters / 2**30})
    columns = [("", "{name}"), ("bytes a parameter", "{held:.2f}"), ("GiB", "{gib:.1f}")]
    return harness.row_table(title, columns, rows)


def _title(rows: list[harness.Row]) -> str:
    return f"GPT of {rows[0]['elements'] / 1e6:.1f} M parameters, {rows[0]['world_size']} ranks"


def step_table(rows: list[harness.Row]) -> Any:
    """The ranks on one network."""
    title = f"{_title(rows)}, {rows[0]['rate']}, {rows[0]['rounds']} rounds; ms"
    columns = [
        ("contestant", "{contestant}"),
        ("median", "{median_ms:.1f}"),
        ("p10", "{p10_ms:.1f}"),
        ("p90", "{p90_ms:.1f}"),
    ]
    columns += [(f"/ {rows[0]['reference']}", "{ratio:.3f}"), ("paired", "{paired_ratio:.3f}")]
    columns += [*((part, f"{{{part}_ms:.1f}}") for part in _PARTS), ("", "{result}")]
    return harness.row_table(title, columns, rows)


def memory_table(rows: list[harness.Row]) -> Any:
    """All contestants."""
    columns = [("contestant", "{contestant}"), ("formula", "{formula:.2f}"), ("held", "{held:.2f}")]
    columns += [("peak of the last step", "{peak_of_last_step:.2f}"), ("peak", "{peak:.2f}")]
    title = f"{_title(rows)}; bytes a parameter"
    return harness.row_table(title, [*columns, ("peak, resident MiB", "{peak_mib:.0f}")], rows)


if __name__ == "__main__":
    main()
