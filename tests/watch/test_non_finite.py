"""Who brought NaN: rank, parameter and how many elements, under every exchange; and silence where all is well."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import astuple
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fake_cuda
import fastddp
from fastddp import Corruption
from fastddp.watch.non_finite import NonFinite
from hooks_by_name import register
from logs import lines_of_the_logger
from on_ranks import on_ranks
from ranks import RankPool

DEVICE = fake_cuda.DEVICE
PLAIN, IN_THE_WIRE, LOW_RANK = "none", "bf16, sums in the wire", "PowerSGD of rank 1"
EXCHANGES = [PLAIN, "fp16", "bf16", IN_THE_WIRE, LOW_RANK, "batched PowerSGD", "python", "noop"]
NAN, INF = math.nan, math.inf
Puts = dict[int, dict[str, dict[int, float]]]
"""By rank and parameter: elements of a gradient, and what they become."""


@pytest.fixture
def pools(ranks: RankPool, simulated_ranks: RankPool) -> dict[str, RankPool]:
    return {"cpu": ranks, DEVICE: simulated_ranks}


def layers(dtype: torch.dtype = torch.float32) -> nn.Module:
    sizes = [(8, 40), (40, 40), (40, 4)]
    first, second, third = (nn.Linear(*size, dtype=dtype) for size in sizes)
    return nn.Sequential(first, nn.ReLU(), second, nn.GELU(), third)


def wrapped(device: str = "cpu", exchange: str = PLAIN, make: Any = layers, **options: Any) -> Any:
    torch.manual_seed(0)
    # On a busy machine a watch would ask the simulated device, which goes on when asked: memory would be free sooner.
    watch = fastddp.Watch(stall=None, corruption=options.pop("corruption", None))
    model = fastddp.DistributedDataParallel(make().to(device), bucket_cap_mb=0.003, watch=watch, **options)
    register(model, exchange)
    return model


def put(model: fastddp.DistributedDataParallel, values: dict[str, dict[int, float]]) -> list[Any]:
    """From now on, until what is returned is removed."""

    def change(gradient: Tensor, values: dict[int, float]) -> Tensor:
        if gradient.is_sparse:
            rows = torch.tensor([[NAN], [1.0]])  # the first of two
            return torch.sparse_coo_tensor(gradient._indices(), gradient._values() * rows, gradient.shape)
        flat = gradient.clone().flatten()
        for index, value in values.items():
            flat[index] = value
        return flat.view_as(gradient)

    parameters = dict(model.module.named_parameters())
    return [parameters[name].register_hook(partial(change, values=of)) for name, of in values.items()]


def backward(model: nn.Module, rank: int, step: int, device: str = "cpu") -> None:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(4, 8, generator=generator).to(device, next(model.parameters()).dtype)
    model(inputs).square().sum().backward()


def spoilt(
    rank: int,
    puts: Puts,
    steps: int = 1,
    device: str = "cpu",
    exchange: str = PLAIN,
    set_to_none: bool = True,
    accumulates: bool = False,
    leaves_out: bool = False,
    **options: Any,
) -> tuple[list[NonFinite | None], list[Corruption]]:
    """What is said of each step up to the last, in which ranks' gradients are as `puts` has it."""
    if device == DEVICE:
        fake_cuda.schedule("others_first", 3)
    told: list[Corruption] = []
    model = wrapped(device, exchange, corruption=told.append, **options)
    blamed = []
    for step in range(steps):
        model.zero_grad(set_to_none)
        handles = put(model, puts.get(rank, {})) if step == steps - 1 else []
        if accumulates:
            with model.no_sync():
                backward(model, rank, step, device)
            for handle in handles:
                handle.remove()
        backward(model, rank, step, device)
        blamed.append(model.blame_non_finite())
    if leaves_out:
        model.zero_grad()  # as after a GradScaler, which has left the step out
    model.engine.look_for_corruption()
    return blamed, told


TWO: Puts = {1: {"0.weight": {3: NAN, 7: INF}, "2.weight": {11: NAN, 500: -INF, 1599: NAN}}}
OF_TWO = [(1, "2.weight", 3, 1600), (1, "0.weight", 2, 320)]


class Unlike(nn.Module):
    """Uses an embedding, and on rank 1 `maybe` in some steps only."""

    def __init__(self, sparse: bool, uses: list[bool]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4, sparse=sparse)
        self.maybe = nn.Linear(4, 4)
        self.always = nn.Linear(4, 4)
        self.uses = list(uses)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embedding(torch.tensor([1, 2]))
        return self.always(self.maybe(hidden) if self.uses.pop(0) or dist.get_rank() == 0 else hidden)


def unlike(sparse: bool, *uses: bool) -> dict[str, Any]:
    return {"make": partial(Unlike, sparse, list(uses)), "find_unused_parameters": True, "steps": len(uses)}


HUGE = {"2.weight": dict.fromkeys(range(1600), 1e25)}
SEVERAL: Puts = {0: {"2.bias": {0: NAN}}, 1: {"4.bias": {0: NAN}}, 2: {"4.bias": {0: NAN}, "0.bias": {0: NAN}}}
OF_BIAS: Puts = {1: {"maybe.bias": {2: NAN}}}
UNDER_EVERY_EXCHANGE = [
    {"steps": 4, "exchange": exchange, "device": device, "gradient_as_bucket_view": view, "set_to_none": to_none}
    for exchange, device, view, to_none in itertools.product(EXCHANGES, ["cpu", DEVICE], [False, True], [False, True])
]


@pytest.mark.parametrize(
    ("puts", "options", "expected"),
    [
        *[
            pytest.param(TWO, options, OF_TWO, marks=pytest.mark.tier("slow", but_one_in=5))
            for options in UNDER_EVERY_EXCHANGE
        ],
        (TWO, {}, OF_TWO),
        (SEVERAL, {"steps": 2}, [(1, "4.bias", 1, 4), (2, "4.bias", 1, 4), (0, "2.bias", 1, 40), (2, "0.bias", 1, 40)]),
        ({1: {"2.bias": {5: INF}}}, {"accumulates": True}, [(1, "2.bias", 1, 40)]),
        ({0: HUGE, 1: {**HUGE, "4.bias": {0: NAN}}}, {}, [(1, "4.bias", 1, 4)]),  # what is finite is not counted
        ({0: HUGE, 1: {**HUGE, "4.bias": {0: NAN}}}, {"device": DEVICE}, [(1, "4.bias", 1, 4)]),
        ({1: {"embedding.weight": {}}}, unlike(True, False, False), [(1, "embedding.weight", 4, 40)]),
        *[(OF_BIAS, unlike(sparse, False, True), [(1, "maybe.bias", 1, 4)]) for sparse in (False, True)],
    ],
)
def test_of_all_kinds_of_gradients_those_that_are_not_finite_are_told_the_first_in_backward_first(
    pools: dict[str, RankPool], puts: Puts, options: dict[str, Any], expected: list[tuple[int, str, int, int]]
) -> None:
    device = options.get("device", "cpu")
    culprits = tuple(sorted({rank for rank, *_ in expected}))
    for rank, ((*before, found), told) in enumerate(pools[device].run(spoilt, 1 + max(puts), puts, **options)):
        assert before == [None] * len(before)
        assert (found.rank, found.parameter, found.count, found.elements) == expected[0]
        assert list(map(astuple, found.gradients)) == expected
        assert found.total == len(expected)
        if device == "cpu":
            assert [(of.kind, of.step, of.ranks, of.parameter) for of in told] == (
                []
                if options.get("exchange") == "noop" and rank == 0  # keeps its gradients, and speaks for itself
                else [("non_finite", options.get("steps", 1), culprits, expected[0][1])]
            )


def said_of_a_loss(rank: int, calls_back: bool, takes: bool = False, device: str = "cpu") -> list[list[str]]:
    """In each step what a rank logs, or is called with: rank 2's loss is NaN in steps 3 and 4 of 6."""
    if device == DEVICE:
        fake_cuda.schedule("random", 2)
    by_step = []
    with lines_of_the_logger() as said:
        tell = (lambda corruption: said.append(corruption.message)) if calls_back else "report"
        model = wrapped(device, corruption=tell)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(6):
            model.zero_grad()
            is_bad = step in (2, 3)
            (model(torch.ones(4, 8, device=device)).sum() * (NAN if is_bad and rank == 2 else 1.0)).backward()
            if device == DEVICE:
                torch.accelerator.synchronize()
            for _ in range(0 if is_bad and not takes else 2):  # it is told once
                optimizer.step()
            by_step.append(list(said))
            said.clear()
    return by_step


LOSS = "all 6 gradients: the loss was not finite on rank 2"


def test_a_change_of_state_is_said_once_by_one_rank(ranks: RankPool) -> None:
    first, *others = ranks.run(said_of_a_loss, 3, calls_back=False)
    assert [len(lines) for lines in first] == [0, 0, 0, 1, 1, 0]  # before the next forward, and the optimizer's step
    assert f"step 3 are not finite: {LOSS}" in first[3][0]
    assert "finite again" in first[4][0]
    assert "steps 3 to 4" in first[4][0]
    assert others == [[[]] * 6] * 2


def test_what_an_optimizer_has_spread_is_no_ranks_fault(ranks: RankPool) -> None:
    for said in ranks.run(said_of_a_loss, 3, calls_back=True, takes=True):
        assert [len(lines) for lines in said] == [0, 0, 1, 1, 1, 1]
        assert f"step 3 are not finite: {LOSS}" in said[2][0]
        for (message,) in said[3:]:
            assert "because parameters are not, 0.weight first: since step 3" in message
            assert "No rank is to blame" in message


@pytest.mark.tier("slow", but_one_in=2)
@pytest.mark.parametrize("calls_back", [True, False])
def test_on_a_device_a_rank_says_a_step_later_what_it_knows(simulated_ranks: RankPool, calls_back: bool) -> None:
    """Where the logger is told, whoever had it and the first rank say so, once."""
    for rank, said in enumerate(simulated_ranks.run(said_of_a_loss, 3, calls_back, device=DEVICE)):
        logged = [[0, 0, 0, 1, 1, 0], [0] * 6, [0, 0, 0, 1, 0, 0]][rank]
        assert [len(lines) for lines in said] == ([0, 0, 0, 1, 1, 0] if calls_back else logged)
        for step, lines in enumerate(said):
            for line in lines:
                if calls_back or step == 3:
                    assert f"step {step} are not finite" in line
                    assert (LOSS if rank == 2 else "on another rank than this") in line
                else:
                    assert "finite again" in line


@on_ranks(2)
def test_a_loss_that_is_not_finite_is_told_where_parameters_are_not_used(rank: int) -> None:
    puts: Puts = {1: {"embedding.weight": {4: NAN}, "always.weight": {0: NAN}, "always.bias": {0: NAN}}}
    [found], [told] = spoilt(rank, puts, **unlike(False, False))
    assert (found.losses, found.of_a_loss, told.parameter) == ((1,), 3, None)


class Scaled(nn.Module):
    def forward(self, inputs: Tensor, *, by: Tensor) -> Tensor:
        return inputs / by


class Within(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 4), Scaled()

    def forward(self, inputs: Tensor, by: Tensor) -> Tensor:
        return self.second(self.first(inputs), by=by)


@pytest.mark.parametrize(
    ("of_input", "by", "words"),
    [
        (1.0, 0.0, r"second \(Scaled\) .*; its input was finite, from -.* to "),
        (INF, 1.0, r"first \(Linear\) .*; 2 of 32 elements of its input were not finite, the others from 1 to 1"),
    ],
)
@on_ranks(2)
def test_the_first_module_whose_output_is_not_finite_is_found(
    rank: int, of_input: float, by: float, words: str
) -> None:
    told: list[Corruption] = []
    model = wrapped(make=Within, corruption=told.append)
    model.find_non_finite_module()
    inputs = torch.ones(4, 8)
    inputs[0, :2] = of_input if rank == 1 else 1.0
    for _ in range(2):  # it looks at the next forward only
        model(inputs, torch.full((2, 1, 1), by if rank == 1 else 1.0))
    assert [found.ranks for found in told] == [(1,)] * rank
    assert all(re.search("on rank 1 the output of " + words, found.message) for found in told)


CAST, SUM = {"leaves_out": True}, {"gradient_average": "sum"}


@pytest.mark.parametrize(
    ("values", "options", "kind"),
    [
        ({1: 1e6}, {"exchange": "fp16", **CAST}, "non_finite"),
        ({1: 1e6}, {"exchange": "fp16", **CAST, "device": DEVICE}, "non_finite"),
        ({1: 3.4e38}, {"exchange": "bf16", **CAST}, "too_large"),  # a half fits, and so does the sum
        ({1: 3.4e38}, {"exchange": "bf16", **CAST, "device": DEVICE}, "too_large"),
        ({0: 3e38, 1: 3e38}, SUM, "non_finite"),
        ({0: 1e30, 1: 1e30}, SUM, "too_large"),
        # What fits, and what is too large to be squared.
        ({1: 1.7e19}, {}, None),
        ({1: 2e19}, {}, "too_large"),
        ({1: 2e19}, {"make": partial(layers, torch.bfloat16)}, "too_large"),
        ({1: 2e154}, {"make": partial(layers, torch.float64)}, "too_large"),
    ],
)
def test_what_is_finite_on_each_rank_is_told_as_too_large_or_as_not_finite_after_the_cast_or_the_sum(
    pools: dict[str, RankPool], values: dict[int, float], options: dict[str, Any], kind: str | None
) -> None:
    puts = {rank: {"2.weight": {11: value}} for rank, value in values.items()}
    device = options.get("device", "cpu")
    for (_, found), told in pools[device].run(spoilt, 2, puts, 2, **options):
        if device == "cpu":
            assert [(of.kind, of.step) for of in told] == ([(kind, 2)] if kind else [])
        if kind == "too_large":
            culprits = tuple(values)
            assert all((of.ranks, of.parameter) == (culprits, "2.weight") for of in told)
        if kind != "non_finite":
            assert found is None
            continue
        assert (found.rank, found.parameter, found.count, found.gradients) == (None, "2.weight", 1, ())
        if "exchange" in options:
            assert found.largest == (1, "2.weight", pytest.approx(1e6, rel=1e-3))
            assert all("finite before the cast" in text for text in (str(found), *(of.message for of in told)))


@pytest.mark.parametrize(
    ("where", "value", "words"),
    [
        ("optimizer", INF, "rank 1 brought 1 of 40"),
        ("forward", INF, "rank 1 brought 1 of 40"),
        ("optimizer", 2e19, r"2.bias on rank 1 has the norm 2e\+"),
    ],
)
@on_ranks(2)
def test_it_is_raised_before_parameters_change_and_training_goes_on(
    rank: int, where: str, value: float, words: str
) -> None:
    model = wrapped(corruption="raise")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    [handle] = put(model, {"2.bias": {5: value} if rank == 1 else {}})
    backward(model, rank, 0)
    handle.remove()
    with pytest.raises(fastddp.CorruptionError, match=words) as error:
        optimizer.step() if where == "optimizer" else backward(model, rank, 1)
    assert error.value.corruption.parameter == "2.bias"
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    for step in range(2):
        optimizer.zero_grad()
        backward(model, rank, step)
        optimizer.step()
        assert model.blame_non_finite() is None


@on_ranks(2)
def test_errors_say_what_to_do(rank: int) -> None:
    model = wrapped()
    backward(model, rank, 0)
    with pytest.raises(RuntimeError, match=r"Watch\(corruption="):
        model.blame_non_finite()
    with pytest.raises(RuntimeError, match="between the backward"):
        wrapped(corruption="raise").blame_non_finite()


def costs_of_a_step(rank: int, exchange: str, set_to_none: bool, view: bool = False) -> tuple[Counter[str], int, int]:
    """In three steady steps, with the device behind the host: launches, tables that went up, waits of the host."""
    extension = fake_cuda.build()
    fake_cuda.schedule("random", 1)
    model = wrapped(DEVICE, exchange, corruption="raise", gradient_as_bucket_view=view)
    inputs = torch.randn(4, 8).to(DEVICE)
    for step in range(16):
        if step == 6:
            extension.synchronize()  # which frees memory: addresses change once more
        if step == 13:
            launches, waits, copies = len(extension.launches()), extension.waits(), extension.copies()
        with fake_cuda.without_waits() if step >= 6 else nullcontext():
            model(inputs).square().sum().backward()
            model.engine.look_for_corruption()
            model.zero_grad(set_to_none)
    names = [name for name in extension.launches()[launches:] if "pack" in name or "measure" in name]
    forms = Counter(re.sub(r"fastddp_|_[a-z]*\d+.*", "", name) for name in names)
    return forms, extension.copies() - copies, extension.waits() - waits


@pytest.mark.tier("slow", but_one_in=5)
@pytest.mark.parametrize("view", [False, True], ids=["default", "view"])
@pytest.mark.parametrize(
    ("exchange", "set_to_none", "launches"),
    [
        (PLAIN, True, {"pack_measuring": 1}),
        (PLAIN, False, {"measure_gradients": 1}),  # the collective divides: nothing else reads them
        (IN_THE_WIRE, True, {"pack_measuring": 1, "unpack": 1}),
        ("python", True, {"pack_measuring": 1}),
        (LOW_RANK, True, {"measure_gradients": 1, "pack_measuring": 1, "unpack": 1}),
        ("noop", True, {"measure_gradients": 1}),
    ],
)
def test_a_healthy_step_on_a_device_has_at_most_one_launch_more_a_bucket_and_no_wait(
    simulated_ranks: RankPool, exchange: str, set_to_none: bool, view: bool, launches: dict[str, int]
) -> None:
    for found, uploads, waits in simulated_ranks.run(costs_of_a_step, 2, exchange, set_to_none, view):
        assert found == {name: 3 * 2 * count for name, count in launches.items()}  # of steps, of buckets
        assert (uploads, waits) == (0, 0)


@pytest.mark.parametrize("exchange", [PLAIN, "bf16", LOW_RANK])
@on_ranks(2, pool="simulated_ranks")
def test_a_captured_step_can_be_asked_after_each_replay(rank: int, exchange: str) -> None:
    fake_cuda.schedule("others_first", 3)
    with torch.Stream(device=DEVICE):
        model = wrapped(DEVICE, exchange, corruption="report")
        static = torch.zeros(4, 8, device=DEVICE)
        for _ in range(4):
            model.zero_grad()
            model(static).square().sum().backward()
        torch.accelerator.synchronize()
        model.zero_grad()
        extension = fake_cuda.build()
        extension.begin_capture()
        model(static).square().sum().backward()
        graph = extension.end_capture()
        blamed = []
        for value in (1.0, NAN if rank == 1 else 1.0, 2.0):
            static.fill_(value)
            graph.replay()
            blamed.append(model.blame_non_finite())
        torch.accelerator.synchronize()
    before, bad, after = blamed
    assert before is after is None
    assert {of.rank for of in bad.gradients} == {1}
    assert astuple(bad.gradients[0]) == (1, "4.bias", 4, 4)
