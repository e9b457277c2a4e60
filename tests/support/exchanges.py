"""What the contract is tried on: codecs, transports, levels, and models whose averages are known."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fake_cuda
import fastddp
from fastddp import comm_hooks
from fastddp.comm_hooks import BlockState, CompressState, PowerSGDState, fp16_compress_wrapper
from fastddp.sharding.state import gathered
from hooks_by_name import averages
from models import RaisesInBackward
from nodes import by_messages, by_reads, nodes_of_two
from ranks import RankPool

DEVICE = fake_cuda.DEVICE


@dataclass(frozen=True)
class Codec:
    """A hook, and how far its averages may be from the true ones, in shares of the largest of a parameter."""

    rounding: float
    hook: Callable[..., Any] | None = None
    state: Callable[[], Any] = lambda: None
    between_nodes: bool = True
    sharded: bool = True

    @property
    def remembers(self) -> bool:
        return hasattr(self.state(), "errors")


power_sgd = partial(PowerSGDState, None, 1, start_powerSGD_iter=2)
CODECS = {
    "plain": Codec(1e-6),
    "fp16": Codec(2e-3, comm_hooks.fp16_compress_hook),
    "bf16": Codec(2e-2, comm_hooks.bf16_compress_hook),
    "bf16, sums in the wire": Codec(3e-2, comm_hooks.bf16_compress_hook, partial(CompressState, accumulate="wire")),
    "int8": Codec(0.03, comm_hooks.int8_compress_hook, BlockState),
    "e4m3": Codec(0.15, comm_hooks.fp8_compress_hook, BlockState),
    "e5m2": Codec(0.3, comm_hooks.fp8_compress_hook, partial(BlockState, fp8="e5m2")),
    "PowerSGD": Codec(1e-3, comm_hooks.powerSGD_hook, power_sgd, sharded=False),
    "PowerSGD in fp16": Codec(1e-2, fp16_compress_wrapper(comm_hooks.powerSGD_hook), power_sgd, sharded=False),
    "Python": Codec(1e-6, averages, between_nodes=False, sharded=False),
}
TRANSPORTS = dict.fromkeys(["gloo", "messages", "reads"], "cpu") | dict.fromkeys(["streams", "blocking"], DEVICE)
ON_GPUS = {"nccl": "cuda"}
SUMMED_IN_PAIRS = ("fp16", "bf16", "int8", "e4m3", "e5m2")
LEVELS = ("one level", "two levels", "sharded", "sharded by parameters", "sharded over nodes")
SHAPES = [(20, 12), (20,), (12, 20), (3, 4, 5), (20, 12), (7,)]  # backward reaches the last one first
FAILING = 1


@dataclass(frozen=True)
class Exchange:
    """How gradients travel."""

    codec: str
    transport: str
    levels: str

    @property
    def ranks(self) -> int:
        return 4 if self.has_nodes else 2

    @property
    def device(self) -> str:
        return (TRANSPORTS | ON_GPUS)[self.transport]

    @property
    def rounding(self) -> float:
        return CODECS[self.codec].rounding

    @property
    def has_nodes(self) -> bool:
        """Whether there are two levels: inside a node and between nodes."""
        return self.levels in ("two levels", "sharded over nodes")

    @property
    def is_sharded(self) -> bool:
        """Whether each rank gets a part of the averages."""
        return "sharded" in self.levels

    @property
    def is_low_rank(self) -> bool:
        return "PowerSGD" in self.codec

    @property
    def has_pairs(self) -> bool:
        """Whether ranks read each other's memory, or send each other messages where they may not."""
        return self.device == "cpu" and (self.levels != "one level" or self.codec in SUMMED_IN_PAIRS)

    def exists(self) -> bool:
        if self.transport == "messages" and not self.has_pairs:
            return False
        if self.transport == "reads" and (self.codec, self.levels) != ("plain", "one level"):
            return False  # the others read over gloo, whatever is enough
        codec = CODECS[self.codec]
        return self.levels == "one level" or (codec.sharded if self.is_sharded else codec.between_nodes)

    def run(self, pools: dict[str, RankPool], function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(rank, self, *args)`` on each rank."""
        backend = fake_cuda.BLOCKING if self.transport == "blocking" else None
        return pools[self.device].run(on_rank, self.ranks, function, self, *args, backend=backend)


def on_rank(rank: int, function: Callable[..., Any], exchange: Exchange, *args: Any) -> Any:
    ways = {"messages": by_messages, "reads": by_reads}
    with ways.get(exchange.transport, contextlib.nullcontext)():
        return function(rank, exchange, *args)


# --------------------------------------------------------------------------------------------------------------- pairs


def exchanges_and(*axes: Sequence[Any], fits: Callable[..., bool] = lambda *_: True) -> list[Any]:
    """Combinations of an exchange and a value of each axis that fit.

    Quick are as many as are needed so that each pair of values occurs, those of exchanges among them: taken one after
    the other, each the first with the most pairs that have not occurred. The others are slow. Of those that are
    sharded, whose way up to the sum is that of others, one in eight is, and the rest is nightly.
    """
    rows = itertools.product(CODECS, TRANSPORTS, LEVELS, *axes)
    of_rows = {row: one for row in rows if (one := Exchange(*row[:3])).exists() and fits(one, *row[3:])}
    pairs = {row: set(itertools.combinations(enumerate(row), 2)) for row in of_rows}
    missing = set().union(*pairs.values())
    quick = set()
    while missing:
        best = max(pairs, key=lambda row: len(pairs[row] & missing))
        quick.add(best)
        missing -= pairs[best]
    found = []
    for number, (row, exchange) in enumerate(of_rows.items()):
        tier = pytest.mark.tier("nightly" if exchange.is_sharded and number % 8 else "slow")
        marks = () if row in quick else tier
        found.append(pytest.param(exchange, *row[3:], id=", ".join(map(str, row)), marks=marks))
    return found


# ------------------------------------------------------------------------------------------------------------ training


def wave(number: int) -> Tensor:
    """What a parameter's gradient is a multiple of, exact in 16 bits; a matrix has rank 1, which PowerSGD keeps."""
    shape = SHAPES[number]
    first = (torch.arange(shape[0]) + number) % 4 + 1.0
    return first if len(shape) == 1 else first.outer(torch.arange(SIZES[number] // shape[0]) % 5 - 2.0).view(shape)


SIZES = [int(torch.tensor(shape).prod()) for shape in SHAPES]


def scale(rank: int, window: int) -> float:
    return (rank + 1.0) * (1.0, 0.5, 2.0, 1.5)[window % 4]


AFTER_THE_LAST = -1  # gradient: where the input of the model comes from


class WritesItself(torch.autograd.Function):
    """A layer that writes the gradient of its weight, and gives autograd none, or one without meaning."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, wave: Tensor, parameter: Sequence[nn.Parameter]) -> Tensor:
        """``parameter``: it, in a list, so that the graph has it by ``weight`` alone."""
        (ctx.weight,) = parameter
        ctx.save_for_backward(x, wave)
        return x * (weight * wave).sum()

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        (x, wave), weight = ctx.saved_tensors, ctx.weight
        gradient = above * x * wave
        if not hasattr(weight, "grad_added_to_main_grad"):
            if weight.grad is None or wave.dim() == 1:  # matrices in place, vectors as another tensor
                weight.grad = gradient if weight.grad is None else weight.grad + gradient
            else:
                weight.grad.add_(gradient)
            return None, None, None, None
        main_grad = weight.main_grad.data  # kernels that write to it change no version
        main_grad.copy_(gradient) if hasattr(weight, "overwrite_main_grad") else main_grad.add_(gradient)
        weight.grad_added_to_main_grad = True
        zero_out = getattr(weight, "zero_out_wgrad", None)
        return None, None if zero_out is None else torch.full_like(weight, 0.0 if zero_out else 7.0), None, None


class Hidden:
    """An output in which no tensor is found, so that a backward is seen by its first gradient."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class Waves(nn.Module):
    """The gradient of each parameter that is used is the input times its wave."""

    def __init__(self, written: Sequence[int] = (), hides: bool = False) -> None:
        super().__init__()
        self.own = nn.ParameterList(torch.zeros(shape) for shape in SHAPES)
        self.written = written  # by layers that write gradients themselves
        self.hides = hides  # outputs, and one of those weights from the graph

    def forward(self, x: Tensor, left_out: Sequence[int] = (), raises_at: int | None = None) -> Tensor | Hidden:
        if raises_at == AFTER_THE_LAST:
            x = RaisesInBackward.apply(x.requires_grad_())
        total = x * 0
        for number, parameter in enumerate(self.own):
            used = RaisesInBackward.apply(parameter) if number == raises_at else parameter
            if number in left_out:
                continue
            if number in self.written:
                is_hidden = self.hides and number == 3
                weight, factor = (used.detach(), x + 0 * total) if is_hidden else (used, x)
                total = total + WritesItself.apply(factor, weight, wave(number).to(used), [parameter])
            else:
                total = total + x * (used * wave(number).to(used)).sum()
        total = RaisesInBackward.apply(total) if raises_at == len(SHAPES) else total
        return Hidden(total) if self.hides else total


class Training:
    """A model of a bucket a parameter, over one exchange."""

    def __init__(
        self,
        rank: int,
        exchange: Exchange,
        state: Any = None,
        dtype: Any = None,
        written: Sequence[int] = (),
        hides: bool = False,
        **options: Any,
    ) -> None:
        if exchange.device == DEVICE:
            fake_cuda.schedule("lazy")
        self.rank, self.exchange = rank, exchange
        codec = CODECS[exchange.codec]
        hierarchy = "node" if exchange.has_nodes else None
        by = "parameters" if "parameters" in exchange.levels else "elements"
        if exchange.is_sharded and by == "parameters":
            options |= {"lazy_bucket_allocation": True}
        with nodes_of_two(rank):
            self.model = fastddp.DistributedDataParallel(
                Waves(written, hides).to(exchange.device, dtype),
                hierarchy=hierarchy,
                **{"bucket_cap_mb": 0, "watch": fastddp.Watch(stall=None)} | options,
            )
        self.state = state or codec.state()
        if codec.hook is not None:
            self.model.register_comm_hook(self.state, codec.hook)
        self.optimizer = None
        if exchange.is_sharded:
            self.optimizer = fastddp.ShardedOptimizer(self.model, torch.optim.SGD, lr=0.0, shard=by)

    def loss(self, window: int, *how: Any, passes: int = 1) -> Tensor:
        x = torch.tensor(scale(self.rank, window) / passes, device=self.exchange.device)
        output = self.model(x, *how)
        return output.loss if isinstance(output, Hidden) else output

    def step(self, window: int, *how: Any, passes: int = 1, set_to_none: bool = True) -> list[Tensor | None]:
        """The averages of a window, of one backward or of several."""
        self.model.zero_grad(set_to_none)
        for number in range(passes):
            with self.model.no_sync() if number < passes - 1 else contextlib.nullcontext():
                self.loss(window, *how, passes=passes).backward()
        return self.gradients()

    def gradients(self) -> list[Tensor | None]:
        if self.optimizer is not None:
            parts = self.optimizer.parts
            whole = dict(gathered(parts.shards, parts.inner, lambda span: {"": span.holder.grad}))
            own = [*self.model.module.own]
            return [
                None if parameter.grad is None else whole[number].of_parameter(parameter)[""].cpu().clone()
                for number, parameter in enumerate(own)
            ]
        owns = (getattr(parameter, "main_grad", parameter.grad) for parameter in self.model.module.own)
        return [None if gradient is None else gradient.cpu().clone() for gradient in owns]

    def failing_step(self, window: int, place: int) -> str:
        """A window in which one rank raises; what this rank is told, in backward or by its next forward."""
        self.model.zero_grad()
        said = ""
        try:
            self.loss(window, (), place if self.rank == FAILING else None).backward()
        except (ArithmeticError, RuntimeError) as error:
            said = str(error)
        self.model.zero_grad()
        if self.exchange.device == DEVICE:
            fake_cuda.synchronize()
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            try:
                self.loss(window)
            except RuntimeError as error:
                said += str(error)
        return said

    def remembered(self) -> list[Tensor]:
        """By the codec, of earlier windows."""
        kept = {**getattr(self.state, "errors", {}), **getattr(self.state, "qs", {})}
        return [kept[name].cpu().clone() for name in sorted(kept)]

    def left_out_of(self, number: int) -> Tensor:
        """What of a parameter's earlier gradients waits on this rank; no elements, where the codec keeps none."""
        errors = getattr(self.state, "errors", {})
        return errors[name].cpu().flatten().clone() if (name := f"own.{number}") in errors else torch.zeros(0)


def means(exchange: Exchange, window: int, users: Callable[[int], Sequence[int]] | None = None) -> list[Tensor]:
    """The true averages; where ``users`` says which ranks use a parameter, the others count with zeros."""
    using = [range(exchange.ranks) if users is None else users(number) for number in range(len(SHAPES))]
    sums = [sum(scale(rank, window) for rank in ranks) for ranks in using]
    return [total / exchange.ranks * wave(number) for number, total in enumerate(sums)]


def assert_averages(of_ranks: list[list[Tensor | None]], expected: list[Tensor], rounding: float) -> None:
    """Near the true ones, and the same bits on all ranks."""
    for mine, *others, mean in zip(*of_ranks, expected, strict=True):
        torch.testing.assert_close(mine.float(), mean, rtol=0, atol=rounding * float(mean.abs().max()))
        assert all(torch.equal(mine, other) for other in others)
