"""Who brought NaN: rank, parameter and how many elements, under every exchange; and silence where all is well."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fake_cuda
import fastddp
from fastddp import comm_hooks
from fastddp.watch import non_finite
from fastddp.watch.non_finite import NonFinite, NonFiniteGradient
from logs import lines_of_the_logger
from ranks import RankPool

DEVICE = fake_cuda.DEVICE
EXCHANGES = ["plain", "fp16", "bf16", "bf16 in its own dtype", "powersgd", "batched", "python", "noop"]


def users_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda future: future.value()[0])


def register(model: fastddp.DistributedDataParallel, exchange: str) -> None:
    hooks: dict[str, tuple[object, Callable[..., Any]]] = {
        "fp16": (None, comm_hooks.fp16_compress_hook),
        "bf16": (None, comm_hooks.bf16_compress_hook),
        "bf16 in its own dtype": (comm_hooks.CompressState(accumulate="wire"), comm_hooks.bf16_compress_hook),
        "powersgd": (comm_hooks.PowerSGDState(None, 1, start_powerSGD_iter=2), comm_hooks.powerSGD_hook),
        "batched": (comm_hooks.PowerSGDState(None, 1, start_powerSGD_iter=2), comm_hooks.batched_powerSGD_hook),
        "python": (None, users_hook),
        "noop": (None, comm_hooks.noop_hook),
    }
    if exchange in hooks:
        model.register_comm_hook(*hooks[exchange])


def wrapped(device: str, exchange: str = "plain", **options: Any) -> fastddp.DistributedDataParallel:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 40), nn.GELU(), nn.Linear(40, 4)).to(device)
    # On a busy machine a watch would ask the simulated device, which goes on when asked: memory would be free sooner.
    model = fastddp.DistributedDataParallel(module, bucket_cap_mb=0.003, on_stall=None, **options)
    register(model, exchange)
    return model


def put(parameter: nn.Parameter, values: dict[int, float]) -> Any:
    """From now on, until it is removed: these elements of the parameter's gradients."""

    def change(gradient: Tensor) -> Tensor:
        flat = gradient.clone().flatten()
        for index, value in values.items():
            flat[index] = value
        return flat.view_as(gradient)

    return parameter.register_hook(change)


def backward(model: nn.Module, rank: int, step: int, device: str = "cpu") -> None:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    model(torch.randn(4, 8, generator=generator).to(device)).square().sum().backward()


# ------------------------------------------------------------------------------------------- rank, parameter, how many


def spoilt(
    rank: int,
    puts: dict[int, dict[str, dict[int, float]]],
    steps: int = 1,
    device: str = "cpu",
    exchange: str = "plain",
    set_to_none: bool = True,
    leaves_out: bool = False,
    **options: Any,
) -> tuple[list[NonFinite | None], list[fastddp.Corruption]]:
    """What is said of each step up to the last, in which ranks' gradients are as `puts` has it."""
    if device == DEVICE:
        fake_cuda.schedule("others_first", 3)
    told: list[fastddp.Corruption] = []
    model = wrapped(device, exchange, on_corruption=told.append, **options)
    blamed = []
    for step in range(steps):
        model.zero_grad(set_to_none)
        if step == steps - 1:
            for name, values in puts.get(rank, {}).items():
                put(model.module.get_parameter(name), values)
        backward(model, rank, step, device)
        blamed.append(model.blame_non_finite())
    if leaves_out:
        model.zero_grad()  # as behind a GradScaler, which has left the step out
    model._look_for_corruption()
    return blamed, told


TWO = {1: {"0.weight": {3: math.nan, 7: math.inf}, "2.weight": {11: math.nan, 500: -math.inf, 1599: math.nan}}}


@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
@pytest.mark.parametrize("view", [False, True], ids=["default", "view"])
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_rank_parameter_and_elements_are_told(
    ranks: RankPool, simulated_ranks: RankPool, device: str, exchange: str, view: bool, set_to_none: bool
) -> None:
    pool = ranks if device == "cpu" else simulated_ranks
    results = pool.run(spoilt, 2, TWO, 4, device, exchange, set_to_none, gradient_as_bucket_view=view)
    for rank, (blamed, told) in enumerate(results):
        assert blamed[:3] == [None] * 3
        found = blamed[3]
        assert found is not None
        assert (found.rank, found.parameter, found.count, found.elements) == (1, "2.weight", 3, 1600)
        assert found.gradients == (
            NonFiniteGradient(1, "2.weight", 3, 1600),
            NonFiniteGradient(1, "0.weight", 2, 320),
        )
        assert found.total == 2
        if device == "cpu" and exchange == "noop" and rank == 0:
            assert told == []  # under it a rank keeps its gradients, and speaks for itself
        elif device == "cpu":
            (corruption,) = told
            assert (corruption.kind, corruption.step, corruption.ranks) == ("non_finite", 4, (1,))
            assert corruption.parameter == "2.weight"
            assert "rank 1 brought 3 of 1600 elements" in corruption.message


@pytest.mark.parametrize("there_is_one", [False, True])
def test_a_scaler_is_spoken_of_where_there_is_one(monkeypatch: pytest.MonkeyPatch, there_is_one: bool) -> None:
    monkeypatch.setattr(non_finite, "a_scaler_steps", lambda: there_is_one)
    message = non_finite._corruption(3, None, by_all=True, in_result=True).message
    assert ("GradScaler" in message) == there_is_one


@pytest.mark.parametrize("bad_step", [0, 1])
def test_the_first_steps_too(ranks: RankPool, bad_step: int) -> None:
    for blamed, told in ranks.run(spoilt, 2, TWO, bad_step + 1):
        assert blamed[bad_step] is not None
        assert [corruption.step for corruption in told] == [bad_step + 1]


def test_one_rank_alone(ranks: RankPool) -> None:
    (_, told) = ranks.run(spoilt, 1, {0: {"2.bias": {5: math.inf}}})[0]
    assert [corruption.parameter for corruption in told] == ["2.bias"]


def test_the_first_in_backward_is_the_culprit_and_of_several_ranks_the_lowest(ranks: RankPool) -> None:
    nan = {0: math.nan}
    puts = {0: {"2.bias": nan}, 1: {"4.bias": nan}, 2: {"4.bias": nan, "0.bias": nan}}
    for blamed, _ in ranks.run(spoilt, 3, puts, 2):
        assert [(one.rank, one.parameter, one.count) for one in blamed[1].gradients] == [
            (1, "4.bias", 1), (2, "4.bias", 1), (0, "2.bias", 1), (2, "0.bias", 1)
        ]  # fmt: skip


# ------------------------------------------------------------------------------------ a loss that is not finite, once


def said_of_a_loss(rank: int, skips: bool, calls_back: bool) -> list[str]:
    """What a rank logs, or is called with: rank 2's loss is NaN in steps 3 and 4 of 6, which are skipped or taken."""
    with lines_of_the_logger() as said:
        on_corruption = (lambda corruption: said.append(corruption.message)) if calls_back else "report"
        model = wrapped("cpu", on_corruption=on_corruption)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(6):
            model.zero_grad()
            is_bad = step in (2, 3)
            (model(torch.ones(4, 8)).sum() * (math.nan if is_bad and rank == 2 else 1.0)).backward()
            if not (is_bad and skips):
                optimizer.step()
    return said


LOSS = "fastddp: gradients of step 3 are not finite: all 6 gradients: the loss was not finite on rank 2."


def test_a_change_of_state_is_said_once_by_one_rank(ranks: RankPool) -> None:
    first, *others = ranks.run(said_of_a_loss, 3, skips=True, calls_back=False)
    assert [line[: len(LOSS)] for line in first] == [
        LOSS,
        "fastddp: gradients are finite again. They were not in steps 3 to 4.",
    ]
    assert others == [[], []]


def test_what_an_optimizer_has_spread_is_no_ranks_fault(ranks: RankPool) -> None:
    for said in ranks.run(said_of_a_loss, 3, skips=False, calls_back=True):
        assert said[0].startswith(LOSS)
        assert len(said) == 4  # steps 3 to 6
        for later in said[1:]:
            assert "because parameters are not, 0.weight first: since step 3" in later
            assert "No rank is to blame" in later


def of_a_checkpoint(rank: int) -> list[str]:
    """What is said of parameters that were not finite from the first step on."""
    told: list[fastddp.Corruption] = []
    model = wrapped("cpu", on_corruption=told.append)
    with torch.no_grad():
        model.module[2].bias.fill_(math.nan)
    backward(model, rank, 0)
    model._look_for_corruption()
    return [corruption.message for corruption in told]


def test_what_was_loaded_is_no_ranks_fault(ranks: RankPool) -> None:
    for (said,) in ranks.run(of_a_checkpoint, 2):
        assert "step 1 are not finite, because parameters are not, 2.bias first. No rank is to blame" in said


class Scaled(nn.Module):
    """By what it is given, under a name."""

    def forward(self, inputs: Tensor, *, by: Tensor) -> Tensor:
        return inputs / by


class Within(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 4), Scaled()

    def forward(self, inputs: Tensor, by: Tensor) -> Tensor:
        return self.second(self.first(inputs), by=by)


def where_it_begins(rank: int, of_input: float, by: float) -> list[fastddp.Corruption]:
    told: list[fastddp.Corruption] = []
    torch.manual_seed(0)
    model = fastddp.DistributedDataParallel(Within(), on_stall=None, on_corruption=told.append)
    model.find_non_finite_module()
    inputs = torch.ones(4, 8)
    inputs[0, :2] = of_input if rank == 1 else 1.0
    for _ in range(2):  # it looks at the next forward only
        model(inputs, torch.full((2, 1, 1), by if rank == 1 else 1.0))
    return told


@pytest.mark.parametrize(
    ("of_input", "by", "words"),
    [
        (
            1.0,
            0.0,
            r"second \(Scaled\) is not finite, the first in this forward; its input was finite, from -.* to .*\.",
        ),
        (
            1.0,
            math.nan,
            r"second \(Scaled\) .*; 2 of 18 elements of its input were not finite, the others from -.* to ",
        ),
        (math.inf, 1.0, r"first \(Linear\) .*; 2 of 32 elements of its input were not finite, the others from 1 to 1"),
    ],
)
def test_the_first_module_whose_output_is_not_finite_is_found(
    ranks: RankPool, of_input: float, by: float, words: str
) -> None:
    nothing, [found] = ranks.run(where_it_begins, 2, of_input, by)
    assert nothing == []
    assert found.ranks == (1,)
    assert re.search("on rank 1 the output of " + words, found.message)


# --------------------------------------------------------------------------------------------- finite on every rank


@pytest.mark.parametrize(("exchange", "value"), [("fp16", 1e6), ("bf16", 3.4e38)])
@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_what_was_finite_before_the_cast(
    ranks: RankPool, simulated_ranks: RankPool, device: str, exchange: str, value: float
) -> None:
    pool = ranks if device == "cpu" else simulated_ranks
    puts = {1: {"2.weight": {11: value}}}
    for (_, found), told in pool.run(spoilt, 2, puts, 2, device, exchange, leaves_out=True):
        if exchange == "bf16":  # 3.4e38 / 2 fits, and so does the sum: nothing is wrong
            assert found is None
            assert [(of.kind, of.step) for of in told] == ([("too_large", 2)] if device == "cpu" else [])
            continue
        assert found is not None
        assert (found.rank, found.parameter, found.count, found.gradients) == (None, "2.weight", 1, ())
        assert found.largest == (1, "2.weight", pytest.approx(value, rel=1e-3))
        assert "finite before the cast" in str(found)
        if device == "cpu":
            (corruption,) = told
            assert "finite before the cast" in corruption.message


def large(rank: int, value: float, dtype: torch.dtype, raises: bool) -> tuple[list[Any], bool]:
    """What is told of a gradient of rank 1 with a large element, and whether parameters have changed by then."""
    told: list[fastddp.Corruption] = []
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 6, dtype=dtype), nn.Linear(6, 4, dtype=dtype))
    model = fastddp.DistributedDataParallel(module, on_corruption="raise" if raises else told.append)
    optimizer = torch.optim.Adam(model.parameters())
    before = module[1].bias.detach().clone()
    if rank == 1:
        put(module[0].weight, {11: value})
    model(torch.ones(2, 8, dtype=dtype)).square().sum().backward()
    if raises:
        with pytest.raises(fastddp.CorruptionError, match=r"that of 0\.weight on rank 1 has the norm 2e\+"):
            optimizer.step()
    else:
        model._look_for_corruption()
    same = torch.equal(module[1].bias, before)
    return [(one.kind, one.step, one.ranks, one.parameter) for one in told], same


@pytest.mark.parametrize(
    ("value", "dtype", "is_told"),
    [
        (1.7e19, torch.float32, False),
        (2e19, torch.float32, True),
        (1.7e19, torch.bfloat16, False),
        (2e19, torch.bfloat16, True),
        (60000.0, torch.float16, False),
        (2e19, torch.float64, False),
        (2e154, torch.float64, True),
    ],
)
def test_what_is_too_large_to_be_squared(ranks: RankPool, value: float, dtype: torch.dtype, is_told: bool) -> None:
    expected = [("too_large", 1, (1,), "0.weight")] if is_told else []
    assert ranks.run(large, 2, value, dtype, False) == [(expected, True)] * 2


def test_what_is_too_large_is_told_before_the_optimizer_steps(ranks: RankPool) -> None:
    assert ranks.run(large, 2, 2e19, torch.float32, True) == [([], True)] * 2


def test_a_sum_that_overflows_is_told_though_no_rank_brought_it(ranks: RankPool) -> None:
    puts = {rank: {"2.weight": {11: 3e38}} for rank in range(2)}
    for (found,), told in ranks.run(spoilt, 2, puts, gradient_average="sum"):
        assert found is not None
        assert (found.rank, found.parameter, found.count) == (None, "2.weight", 1)
        assert [corruption.kind for corruption in told] == ["non_finite"]


def test_finite_values_whose_squares_overflow_are_too_large_and_finite(ranks: RankPool) -> None:
    puts = {rank: {"2.weight": {11: 1e30}} for rank in range(2)}
    for blamed, told in ranks.run(spoilt, 2, puts, gradient_average="sum"):
        assert (blamed, [corruption.kind for corruption in told]) == ([None], ["too_large"])


@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_huge_finite_gradients_beside_nan_are_not_counted(
    ranks: RankPool, simulated_ranks: RankPool, device: str
) -> None:
    huge = {"2.weight": dict.fromkeys(range(1600), 1e25)}
    puts = {0: huge, 1: {**huge, "4.bias": {0: math.nan}}}
    for (found,), _ in (ranks if device == "cpu" else simulated_ranks).run(spoilt, 2, puts, device=device):
        assert found.gradients == (NonFiniteGradient(1, "4.bias", 1, 4),)


# --------------------------------------------------------------------------------------------------- other gradients


class Unlike(nn.Module):
    """Uses `maybe` if it is told to, and always an embedding."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4, sparse=sparse)
        self.maybe = nn.Linear(4, 4)
        self.always = nn.Linear(4, 4)

    def forward(self, rows: Tensor, uses: bool) -> Tensor:
        hidden = self.embedding(rows)
        return self.always(self.maybe(hidden) if uses else hidden).sum()


def of_another_kind(
    rank: int, parameter: str, sparse: bool, uses: list[bool]
) -> tuple[list[NonFinite | None], list[fastddp.Corruption]]:
    """`uses`: by step, on rank 1; the last step's gradient of `parameter` is not finite there. Rank 0 uses all."""
    torch.manual_seed(0)
    told: list[fastddp.Corruption] = []
    model = fastddp.DistributedDataParallel(Unlike(sparse), find_unused_parameters=True, on_corruption=told.append)
    blamed = []
    for step, used in enumerate(uses):
        model.zero_grad()
        if step == len(uses) - 1 and rank == 1:
            if sparse and parameter == "embedding.weight":
                model.module.always.register_full_backward_hook(spoil_inputs)
            else:
                put(dict(model.module.named_parameters())[parameter], {2: math.nan})
        model(torch.tensor([1, 2]), used or rank == 0).backward()
        blamed.append(model.blame_non_finite())
    model._look_for_corruption()
    return blamed, told


def spoil_inputs(module: nn.Module, of_inputs: tuple[Tensor, ...], of_outputs: object) -> tuple[Tensor, ...]:
    return (of_inputs[0] * torch.tensor([[math.nan], [1.0]]),)


def test_sparse_gradients(ranks: RankPool) -> None:
    for (before, found), _ in ranks.run(of_another_kind, 2, "embedding.weight", True, [False, False]):
        assert before is None
        assert found.gradients == (NonFiniteGradient(1, "embedding.weight", 4, 40),)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    "uses", [[True, True], [False, True], [False, False, True]], ids=["used", "late", "late in the third"]
)
def test_parameters_that_are_not_always_used(ranks: RankPool, uses: list[bool], sparse: bool) -> None:
    for blamed, told in ranks.run(of_another_kind, 2, "maybe.bias", sparse, uses):
        assert blamed[:-1] == [None] * (len(uses) - 1)
        assert blamed[-1].gradients == (NonFiniteGradient(1, "maybe.bias", 1, 4),)
        (corruption,) = told
        assert "rank 1 brought 1 of 4" in corruption.message


def loss_of_a_part(rank: int) -> tuple[tuple[int, ...], int] | None:
    """`maybe` is not used, and the loss of rank 1 is not finite."""
    model = fastddp.DistributedDataParallel(Unlike(False), find_unused_parameters=True, on_corruption="report")
    (model(torch.tensor([1, 2]), False) * (math.nan if rank == 1 else 1.0)).backward()
    found = model.blame_non_finite()
    return None if found is None else (found.losses, found.of_a_loss)


def test_a_loss_that_is_not_finite_is_told_where_parameters_are_not_used(ranks: RankPool) -> None:
    assert ranks.run(loss_of_a_part, 2) == [((1,), 3)] * 2


def accumulated(rank: int) -> NonFinite | None:
    model = wrapped("cpu", on_corruption="report")
    with model.no_sync():
        handle = put(model.module[2].bias, {5: math.inf} if rank == 0 else {})
        backward(model, rank, 0)
        handle.remove()
    backward(model, rank, 1)
    return model.blame_non_finite()


def test_what_came_without_synchronisation_counts(ranks: RankPool) -> None:
    for found in ranks.run(accumulated, 2):
        assert found is not None
        assert found.gradients == (NonFiniteGradient(0, "2.bias", 1, 40),)


def complex_gradients(rank: int) -> NonFinite | None:
    torch.manual_seed(0)
    model = fastddp.DistributedDataParallel(nn.Linear(3, 2, dtype=torch.complex64), on_corruption="report")
    if rank == 1:
        put(model.module.bias, {1: complex(math.nan, 1.0)})
    model(torch.ones(1, 3, dtype=torch.complex64)).abs().sum().backward()
    return model.blame_non_finite()


def test_complex_numbers_are_pairs(ranks: RankPool) -> None:
    for found in ranks.run(complex_gradients, 2):
        assert found is not None
        assert found.gradients == (NonFiniteGradient(1, "bias", 1, 4),)


# ------------------------------------------------------------------------------------------------- where it is told


def raised(rank: int, where: str) -> tuple[str, bool, list[bool]]:
    """The error, whether the parameters are what they were, and whether two steps behind it went well."""
    model = wrapped("cpu", on_corruption="raise")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    handle = put(model.module[2].bias, {5: math.inf} if rank == 1 else {})
    backward(model, rank, 0)
    handle.remove()
    with pytest.raises(fastddp.CorruptionError) as error:
        optimizer.step() if where == "optimizer" else backward(model, rank, 1)
    assert error.value.corruption.parameter == "2.bias"
    same = all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    well = []
    for step in range(2):
        optimizer.zero_grad()
        backward(model, rank, step)
        optimizer.step()
        well.append(model.blame_non_finite() is None)
    return str(error.value), same, well


@pytest.mark.parametrize("where", ["optimizer", "forward"])
def test_it_is_raised_before_parameters_change_and_training_goes_on(ranks: RankPool, where: str) -> None:
    for message, same, well in ranks.run(raised, 2, where):
        assert "step 1 are not finite: rank 1 brought 1 of 40" in message
        assert same
        assert well == [True, True]


def told_of_two_steps_of_the_optimizer(rank: int) -> int:
    told: list[fastddp.Corruption] = []
    model = wrapped("cpu", on_corruption=told.append)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    put(model.module[2].bias, {5: math.inf} if rank == 1 else {})
    backward(model, rank, 0)
    optimizer.step()
    optimizer.step()
    return len(told)


def test_it_is_told_once(ranks: RankPool) -> None:
    assert ranks.run(told_of_two_steps_of_the_optimizer, 2) == [1, 1]


def without(rank: int) -> None:
    model = wrapped("cpu")
    backward(model, rank, 0)
    with pytest.raises(RuntimeError, match="on_corruption="):
        model.blame_non_finite()
    watched = wrapped("cpu", on_corruption="raise")
    with pytest.raises(RuntimeError, match="between the backward"):
        watched.blame_non_finite()


def test_errors_say_what_to_do(ranks: RankPool) -> None:
    ranks.run(without, 2)


def collectives(rank: int, watched: bool) -> int:
    """How many a healthy step makes, the look before the optimizer's step included."""
    model = wrapped("cpu", on_corruption="raise" if watched else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group: Any = dist.distributed_c10d._get_default_group()
    for step in range(3):
        optimizer.zero_grad()
        before = group._get_sequence_number_for_group()
        backward(model, rank, step)
        optimizer.step()
        after = group._get_sequence_number_for_group()
    return int(after - before)


def test_a_healthy_step_has_no_collective_more(ranks: RankPool) -> None:
    watched = ranks.run(collectives, 2, True)
    assert watched == ranks.run(collectives, 2, False)
    assert min(watched) > 0


def trained(rank: int, device: str, watched: bool, view: bool, exchange: str) -> list[Tensor]:
    model = wrapped(device, exchange, on_corruption="raise" if watched else None, gradient_as_bucket_view=view)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        backward(model, rank, step, device)
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.tier("slow", but_one_in=5)
@pytest.mark.parametrize("view", [False, True], ids=["default", "view"])
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_measuring_changes_no_bit(
    ranks: RankPool, simulated_ranks: RankPool, device: str, exchange: str, view: bool
) -> None:
    pool = ranks if device == "cpu" else simulated_ranks
    measured = pool.run(trained, 2, device, True, view, exchange)
    plain = pool.run(trained, 2, device, False, view, exchange)
    for ours, theirs in zip(measured, plain, strict=True):
        assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


# ---------------------------------------------------------------------------------------------------- on a device


def costs_of_a_step(rank: int, exchange: str, view: bool, set_to_none: bool) -> tuple[Counter[str], int, int]:
    """In three steady steps, with the device behind the host: launches, tables that went up, waits of the host."""
    extension = fake_cuda.build()
    fake_cuda.schedule("random", 1)
    model = wrapped(DEVICE, exchange, on_corruption="raise", gradient_as_bucket_view=view)
    inputs = torch.randn(4, 8).to(DEVICE)
    for step in range(16):
        if step == 6:
            extension.synchronize()  # which frees memory: addresses change once more
        if step == 13:
            launches, waits, copies = len(extension.launches()), extension.waits(), extension.copies()
        with fake_cuda.without_waits() if step >= 6 else nullcontext():
            model(inputs).square().sum().backward()
            model._look_for_corruption()
            model.zero_grad(set_to_none)
    names = [name for name in extension.launches()[launches:] if "pack" in name or "measure" in name]
    forms = Counter(re.sub(r"fastddp_|_[a-z]*\d+.*", "", name) for name in names)
    return forms, extension.copies() - copies, extension.waits() - waits


@pytest.mark.tier("slow", but_one_in=5)
@pytest.mark.parametrize("view", [False, True], ids=["default", "view"])
@pytest.mark.parametrize(
    ("exchange", "set_to_none", "launches"),
    [
        ("plain", True, {"pack_measuring": 1}),
        ("plain", False, {"measure_gradients": 1}),  # the collective divides: nothing else reads them
        ("bf16 in its own dtype", True, {"pack_measuring": 1, "unpack": 1}),
        ("python", True, {"pack_measuring": 1}),
        ("powersgd", True, {"measure_gradients": 1, "pack_measuring": 1, "pack": 2, "unpack": 3}),
        ("noop", True, {"measure_gradients": 1}),
    ],
)
def test_a_healthy_step_on_a_device_has_at_most_one_launch_more_a_bucket_and_no_wait(
    simulated_ranks: RankPool, exchange: str, set_to_none: bool, view: bool, launches: dict[str, int]
) -> None:
    for found, uploads, waits in simulated_ranks.run(costs_of_a_step, 2, exchange, view, set_to_none):
        assert found == {name: 3 * 2 * count for name, count in launches.items()}  # of steps, of buckets
        assert (uploads, waits) == (0, 0)


def operators_of_a_step(rank: int, watched: bool) -> Counter[str]:
    fake_cuda.schedule("in_order")
    model = wrapped(DEVICE, on_corruption="raise" if watched else None)
    assert len(model.bucket_plan().buckets) == 2
    inputs = torch.randn(4, 8).to(DEVICE)
    for step in range(4):
        if step == 3:
            fake_cuda.synchronize()
            fake_cuda.reset_records()
        model.zero_grad()
        model(inputs).square().sum().backward()
    fake_cuda.synchronize()
    return Counter(name for name in fake_cuda.history() if name.startswith("aten::"))


def test_a_healthy_step_on_a_device_has_one_reduction_more_however_many_buckets(simulated_ranks: RankPool) -> None:
    watched, plain = (simulated_ranks.run(operators_of_a_step, 2, watched)[0] for watched in (True, False))
    # Whether it is above 0 goes into the status.
    assert watched - plain == {"aten::sum": 1, "aten::gt": 1, "aten::mul": 1}


def said_on_a_device(rank: int) -> list[str]:
    """What a rank logs: rank 2's loss is not finite in two steps of four, of which no optimizer steps."""
    fake_cuda.schedule("lazy", 2)
    model = wrapped(DEVICE, on_corruption="report")
    with lines_of_the_logger() as said:
        for step in range(4):
            model.zero_grad()
            loss = model(torch.ones(4, 8, device=DEVICE)).sum()
            (loss * (math.nan if step in (1, 2) and rank == 2 else 1.0)).backward()
            torch.accelerator.synchronize()
            model._look_for_corruption()
    return [line.partition(".")[0] for line in said]


def test_on_a_device_a_change_of_state_is_said_by_whoever_had_it_and_by_the_first_rank(
    simulated_ranks: RankPool,
) -> None:
    opening = "fastddp: gradients of step 2 are not finite"
    assert simulated_ranks.run(said_on_a_device, 3) == [
        [f"{opening}, on another rank than this", "fastddp: gradients are finite again"],
        [],
        [f"{opening}: all 6 gradients: the loss was not finite on rank 2"],
    ]


def late(rank: int, order: str) -> tuple[list[fastddp.Corruption], list[int]]:
    """On a device the host learns of it later; and what it is told by step."""
    fake_cuda.schedule(order, 2)
    told: list[fastddp.Corruption] = []
    model = wrapped(DEVICE, on_corruption=told.append)
    numbers = []
    for step in range(4):
        model.zero_grad()
        handle = put(model.module[2].bias, {5: math.inf} if step == 1 and rank == 1 else {})
        backward(model, rank, step, DEVICE)
        handle.remove()
        torch.accelerator.synchronize()
        numbers.append(len(told))
    model._look_for_corruption()
    return told, numbers


@pytest.mark.parametrize("order", ["lazy", "others_first", "random"])
def test_on_a_device_each_rank_says_what_it_knows(simulated_ranks: RankPool, order: str) -> None:
    (other, numbers), (own, own_numbers) = simulated_ranks.run(late, 2, order)
    assert numbers == own_numbers == [0, 0, 1, 1]
    assert (own[0].step, own[0].ranks, own[0].parameter) == (2, (1,), "2.bias")
    assert (other[0].step, other[0].ranks, other[0].parameter) == (2, (), None)
    assert "on another rank" in other[0].message


def replayed(rank: int, exchange: str) -> list[list[NonFiniteGradient] | None]:
    fake_cuda.schedule("others_first", 3)
    with torch.Stream(device=DEVICE):
        model = wrapped(DEVICE, exchange, on_corruption="report")
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
        for value in (1.0, math.nan if rank == 1 else 1.0, 2.0):
            static.fill_(value)
            graph.replay()
            found = model.blame_non_finite()
            blamed.append(None if found is None else list(found.gradients))
        torch.accelerator.synchronize()
    return blamed


@pytest.mark.parametrize("exchange", ["plain", "bf16", "powersgd"])
def test_a_captured_step_can_be_asked_behind_each_replay(simulated_ranks: RankPool, exchange: str) -> None:
    for before, bad, after in simulated_ranks.run(replayed, 2, exchange):
        assert before is after is None
        assert {one.rank for one in bad} == {1}
        assert bad[0] == NonFiniteGradient(1, "4.bias", 4, 4)
