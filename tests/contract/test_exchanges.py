"""What every exchange promises. What compresses, carries or adds up gradients is a row here before anything else."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import fake_cuda
from exchanges import (
    AFTER_THE_LAST,
    CODECS,
    FAILING,
    SHAPES,
    Exchange,
    Training,
    assert_averages,
    exchanges_and,
    means,
    scale,
    wave,
)
from failing_allocator import compile_allocator, until_memory_suffices
from ranks import RankPool

WINDOWS = 4


@pytest.fixture(scope="session")
def pools(ranks: RankPool, simulated_ranks: RankPool) -> dict[str, RankPool]:
    return {"cpu": ranks, fake_cuda.DEVICE: simulated_ranks}


# -------------------------------------------------------------------------------------------------------- averages

WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "accumulated": {},
    "sum": {"gradient_average": "sum"},
    "weights": {},
    "grad in fp32": {"dtype": torch.bfloat16, "main_grads": "grad"},
    "main_grad": {"dtype": torch.bfloat16, "main_grads": "main_grad"},
    "larger buckets": {"bucket_cap_mb": 0.001},
    "two lanes": {},
}


def averages(rank: int, exchange: Exchange, way: str) -> list[list[Tensor | None]]:
    options = dict(WAYS[way])
    if way == "weights":
        options["gradient_average"] = lambda: rank + 1.0
    with mock.patch("fastddp.engine.lanes_pay", return_value=way == "two lanes"):
        training = Training(rank, exchange, **options)
        return [training.step(window, passes=3 if way == "accumulated" else 1) for window in range(WINDOWS)]


def factor(exchange: Exchange, way: str) -> float:
    """Of the result, by the mean: a sum, or a mean in which a rank counts by its number."""
    numbers = [rank + 1.0 for rank in range(exchange.ranks)]
    if way == "sum":
        return exchange.ranks
    mean = sum(numbers) / len(numbers)
    return sum(n * n for n in numbers) / sum(numbers) / mean if way == "weights" else 1.0


def averages_as(exchange: Exchange, way: str) -> bool:
    if exchange.is_sharded and way.startswith("main_grad"):
        return False  # which is refused
    if way == "two lanes" and exchange.device != "cpu":
        return False  # there are none
    if exchange.codec == "Python":  # which divides by itself
        return way not in ("sum", "weights")
    return not exchange.is_low_rank or way != "sum"  # which is refused


@pytest.mark.parametrize(("exchange", "way"), exchanges_and(list(WAYS), fits=averages_as))
def test_averages_are_right_and_the_same_bits_on_all_ranks_37002(
    pools: dict[str, RankPool], exchange: Exchange, way: str
) -> None:
    of_ranks = exchange.run(pools, averages, way)
    for window in range(WINDOWS):
        expected = [factor(exchange, way) * mean for mean in means(exchange, window)]
        assert_averages([of_rank[window] for of_rank in of_ranks], expected, exchange.rounding)


WRITTEN = (0, 1, 3, 4, len(SHAPES) - 1)  # the last: its gradient comes before all others
LAYERS: dict[str, dict[str, Any]] = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused, hidden": {"find_unused_parameters": True, "hides": True},
    "unused, views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "sum": {"gradient_average": "sum"},
    "main_grad": {"main_grads": "main_grad"},
    "main_grad in fp32": {"main_grads": "main_grad", "dtype": torch.bfloat16},
    "main_grad, unused": {"main_grads": "main_grad", "find_unused_parameters": True},
    "main_grad, static": {"main_grads": "main_grad", "static_graph": True},
}


def written_by_layers(rank: int, exchange: Exchange, way: str) -> list[list[Tensor | None]]:
    """Averages; the first parameters take each form of Megatron's protocol, and one is often left out."""
    training = Training(rank, exchange, written=WRITTEN, **LAYERS[way])
    training.model.module.own[0].zero_out_wgrad = True
    training.model.module.own[1].zero_out_wgrad = False
    found = []
    for window in range(WINDOWS):
        alone = (1, 4) if "unused" in way and window % 2 == rank else ()
        if window == 2:
            training.model.module.own[4].overwrite_main_grad = True  # by each pass
        in_place = window > 1 and not exchange.is_sharded  # sharded, there is nothing in .grad to add to
        found.append(training.step(window, alone, passes=2 if window == 1 else 1, set_to_none=not in_place))
    return found


@pytest.mark.tier("nightly", but_one_in=3)
@pytest.mark.tier("slow", but_one_in=42)
@pytest.mark.parametrize(("exchange", "way"), exchanges_and(list(LAYERS), fits=averages_as))
def test_a_layer_writes_its_gradient_itself(pools: dict[str, RankPool], exchange: Exchange, way: str) -> None:
    of_ranks = exchange.run(pools, written_by_layers, way)
    for window in range(WINDOWS):
        ranks = range(exchange.ranks)
        using = [rank for rank in ranks if "unused" not in way or window % 2 != rank]
        users = {number: using if number in (1, 4) else ranks for number in range(len(SHAPES))}
        expected = [factor(exchange, way) * mean for mean in means(exchange, window, users.__getitem__)]
        assert_averages([of_rank[window] for of_rank in of_ranks], expected, 2 * exchange.rounding)


def left_out(rank: int) -> tuple[int, ...]:
    return (0, 4) if rank == 0 else (4,)


Pairs = list[list[Tensor | None]]


def with_unused(rank: int, exchange: Exchange, view: bool) -> tuple[list[list[Tensor | None]], list[Tensor], Pairs]:
    """Averages of each window, and after it what waits of the parameter that nobody uses in every second one.

    In the window after that its gradient comes after its bucket, and counts in the norm. At last its average and what
    waits of it, before and after a window that adds to other averages alone.
    """
    training = Training(rank, exchange, find_unused_parameters=True, gradient_as_bucket_view=view)
    found, waiting = [], []
    for window in range(WINDOWS):
        found.append(training.step(window, left_out(rank) if window % 2 else ()))
        waiting.append(training.left_out_of(4))
        if exchange.is_sharded:
            continue
        norm = torch.nn.utils.get_total_norm([gradient for gradient in found[-1] if gradient is not None])
        torch.testing.assert_close(training.model.last_grad_norm().cpu().float(), norm, rtol=1e-5, atol=0)
    training.step(WINDOWS)
    beside = [[training.gradients()[4], training.left_out_of(4)]]
    training.loss(WINDOWS, (4,)).backward()
    beside.append([training.gradients()[4], training.left_out_of(4)])
    return found, waiting, beside


@pytest.mark.parametrize(("exchange", "view"), exchanges_and([False, True]))
def test_what_some_ranks_leave_out_counts_as_zeros_and_what_all_do_is_left_alone(
    pools: dict[str, RankPool], exchange: Exchange, view: bool
) -> None:
    of_ranks = exchange.run(pools, with_unused, view)
    for window in range(WINDOWS):
        found = [averages[window] for averages, _, _ in of_ranks]
        expected = means(exchange, window)
        if window % 2:
            for _, waiting, _ in of_ranks:
                assert_waiting(waiting[window], waiting[window - 1])
            assert all(gradients[4] is None or not gradients[4].any() for gradients in found)
            for gradients in found:
                gradients[4] = torch.zeros(SHAPES[4])
            expected = means(
                exchange, window, lambda number: [r for r in range(exchange.ranks) if number not in left_out(r)]
            )
        # Those that leave much out count with what they had left out before, too.
        assert_averages(found, expected, 2 * exchange.rounding)
    for _, _, (before, after) in of_ranks:
        assert torch.equal(before[0], after[0])
        assert_waiting(after[1], before[1])


def assert_waiting(found: Tensor, expected: Tensor) -> None:
    most = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(found, expected, rtol=0, atol=0.01 * most)


# --------------------------------------------------------------------------------------------------------- failures

PLACES = {
    "before the first gradient": len(SHAPES),
    "at the first": 5,
    "in the middle": 2,
    "at the last": 0,
    "after it": AFTER_THE_LAST,
}


def around_a_failure(rank: int, exchange: Exchange, place: str, view: bool) -> dict[str, Any]:
    training = Training(rank, exchange, gradient_as_bucket_view=view)
    for window in range(3):
        training.step(window)
    before = training.remembered()
    said = training.failing_step(3, PLACES[place])
    after = training.remembered()
    same = len(before) == len(after) and all(map(torch.equal, before, after))
    return {"said": said, "same": same, "gradients": [training.step(window) for window in range(4, 6)]}


@pytest.mark.parametrize(("exchange", "place", "view"), exchanges_and(list(PLACES), [False, True]))
def test_a_window_that_fails_is_named_and_leaves_no_trace(
    pools: dict[str, RankPool], exchange: Exchange, place: str, view: bool
) -> None:
    of_ranks = exchange.run(pools, around_a_failure, place, view)
    for rank, found in enumerate(of_ranks):
        assert ("in the middle of backward" if rank == FAILING else f"failed on rank {FAILING}") in found["said"]
        assert found["same"]
    for number, window in enumerate(range(4, 6)):
        gradients = [found["gradients"][number] for found in of_ranks]
        assert_averages(gradients, means(exchange, window), exchange.rounding)


# ---------------------------------------------------------------------------------------------- what else may happen


def resumed(rank: int, exchange: Exchange) -> list[bool]:
    """A training that goes on from a copy of what its codec remembers, against one that was not stopped."""
    whole = Training(rank, exchange)
    for window in range(4):
        whole.step(window)
    saved = copy.deepcopy(whole.state.state_dict())
    other = Training(rank, exchange)
    other.step(7)  # which it forgets
    other.state.load_state_dict(saved)
    pairs = [(whole.step(window), other.step(window)) for window in range(4, 7)]
    return [torch.equal(a, b) for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True)]


@pytest.mark.parametrize("exchange", exchanges_and(fits=lambda exchange: CODECS[exchange.codec].remembers))
def test_training_goes_on_from_a_checkpoint_of_the_state(pools: dict[str, RankPool], exchange: Exchange) -> None:
    for same in exchange.run(pools, resumed):
        assert all(same)


def sends_zeros(exchange: Exchange) -> bool:
    """Whether a rank without inputs owes others nothing that it remembers: docs/differences.md."""
    if exchange.is_sharded:
        return False  # which is refused
    return exchange.codec != "Python" and not (exchange.is_low_rank and exchange.levels == "one level")


def joined(rank: int, exchange: Exchange) -> list[Tensor | None]:
    training = Training(rank, exchange)
    gradients: list[Tensor | None] = []
    with training.model.join(divide_by_initial_world_size=True):
        for window in range(2 if rank == 0 else 4):
            gradients = training.step(window)
    return gradients


@pytest.mark.parametrize("exchange", exchanges_and(fits=sends_zeros))
def test_ranks_whose_inputs_have_ended_count_as_zeros(pools: dict[str, RankPool], exchange: Exchange) -> None:
    _, *others = exchange.run(pools, joined)
    total = sum(scale(rank, 3) for rank in range(1, exchange.ranks)) / exchange.ranks
    assert_averages(others, [total * wave(number) for number in range(len(SHAPES))], 2 * exchange.rounding)


def joined_while_one_fails(rank: int, exchange: Exchange) -> tuple[list[Tensor], str]:
    """What is remembered on a rank whose inputs have ended, and on those whose window fails after that."""
    training, said = Training(rank, exchange), ""
    with training.model.join():
        for window in range(2):
            training.step(window)
        if rank != 0:
            try:
                training.loss(2, (), PLACES["in the middle"] if rank == FAILING else None).backward()
            except (ArithmeticError, RuntimeError) as error:
                said = str(error)
            training.model.reducer.repair_if_failed()  # as the next forward would
    qs = getattr(training.state, "qs", {})
    return [qs[name].clone() for name in sorted(qs)], said


def has_one_q_and_its_status(exchange: Exchange) -> bool:
    return exchange.is_low_rank and exchange.device == "cpu" and exchange.levels == "one level"


@pytest.mark.parametrize("exchange", exchanges_and(fits=has_one_q_and_its_status))
def test_a_rank_whose_inputs_have_ended_undoes_what_others_undo(pools: dict[str, RankPool], exchange: Exchange) -> None:
    """Else its Q would differ from theirs: it learns by the status that they have failed."""
    (first, _), *others = exchange.run(pools, joined_while_one_fails)
    for found, said in others:
        assert said
        assert len(first) == len(found) > 0
        assert all(map(torch.equal, first, found))


def two_models(rank: int, exchange: Exchange) -> list[list[Tensor | None]]:
    first, second = Training(rank, exchange), Training(rank, exchange, gradient_as_bucket_view=True)
    found = []
    for window in range(3):
        first.model.zero_grad()
        second.model.zero_grad()
        (first.loss(window) + second.loss(window + 1)).backward()
        found += [first.gradients(), second.gradients()]
    return found


@pytest.mark.parametrize("exchange", exchanges_and())
def test_two_models_in_one_loss_get_their_own_averages(pools: dict[str, RankPool], exchange: Exchange) -> None:
    of_ranks = exchange.run(pools, two_models)
    for number in range(6):
        window = number // 2 + number % 2
        assert_averages([of_rank[number] for of_rank in of_ranks], means(exchange, window), exchange.rounding)


# -------------------------------------------------------------------------------- changes for which memory is short


@pytest.fixture(scope="session")
def allocator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_allocator(tmp_path_factory.mktemp("allocator"))


def registered_at_last(rank: int, exchange: Exchange, allocator: Path) -> list[list[Tensor | None]]:
    """Averages before the exchange's hook is there, after each try to register it, and after the one that ends well."""
    codec = CODECS[exchange.codec]
    training = Training(rank, dataclasses.replace(exchange, codec="plain"))
    averages = [training.step(0) for _ in range(2)]
    training.state = codec.state()
    until_memory_suffices(
        allocator,
        lambda: training.model.register_comm_hook(training.state, codec.hook),
        lambda: averages.append(training.step(0)),
    )
    return [*averages, training.step(1)]


def fails_alike(exchange: Exchange) -> bool:
    """Whether no rank waits for another while memory is short: where ranks read each other's, they meet first."""
    return (
        exchange.codec != "PowerSGD in fp16"
        and exchange.device == "cpu"
        and exchange.transport == ("messages" if exchange.has_pairs else "gloo")
    )


def has_hook(exchange: Exchange) -> bool:
    return fails_alike(exchange) and exchange.codec != "plain" and not exchange.has_nodes  # there ranks' runs differ


@pytest.mark.tier("slow", but_one_in=18)
@pytest.mark.parametrize("exchange", exchanges_and(fits=has_hook))
def test_a_hook_for_which_memory_is_short_leaves_the_exchange_of_before(
    pools: dict[str, RankPool], exchange: Exchange, allocator: Path
) -> None:
    of_ranks = exchange.run(pools, registered_at_last, allocator)
    for number in range(len(of_ranks[0]) - 1):
        assert_averages([found[number] for found in of_ranks], means(exchange, 0), 1e-6)
    assert_averages([found[-1] for found in of_ranks], means(exchange, 1), exchange.rounding)


def with_new_buckets(rank: int, exchange: Exchange, allocator: Path | None) -> tuple[int, list[list[Tensor | None]]]:
    """How often memory was short when buckets were rebuilt, and the averages of each step."""
    training = Training(rank, exchange)
    averages, errors = [training.step(0)], 0
    with mock.patch("fastddp.engine.agree_on_order", lambda order, *_: sorted(order)):
        if allocator is not None:
            errors = until_memory_suffices(allocator, training.model.engine.rebuild_buckets, lambda: None)
        averages += [training.step(window) for window in range(1, WINDOWS)]
    assert training.model.engine.now.plan[0] == [0]
    return errors, averages


def rebuilds_alone(exchange: Exchange) -> bool:
    return fails_alike(exchange) and not exchange.is_sharded  # there parameters and state move by collectives


@pytest.mark.tier("slow", but_one_in=18)
@pytest.mark.parametrize("exchange", exchanges_and(fits=rebuilds_alone))
def test_buckets_for_which_memory_is_short_are_taken_at_last(
    pools: dict[str, RankPool], exchange: Exchange, allocator: Path
) -> None:
    for (_, undisturbed), (errors, averages) in zip(
        exchange.run(pools, with_new_buckets, None), exchange.run(pools, with_new_buckets, allocator), strict=True
    ):
        assert errors > 0
        for mine, other in zip(averages, undisturbed, strict=True):
            assert all(map(torch.equal, mine, other))
