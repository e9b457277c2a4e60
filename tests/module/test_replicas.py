"""What the ranks do together before they train: verify, broadcast, agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastddp.module import replicas
from ranks import RankPool

# ------------------------------------------------------------------------------------------------- verify_replicas


def named_parameters() -> list[tuple[str, Tensor]]:
    return [
        ("weight", nn.Parameter(torch.zeros(4, 3, 2, 2))),
        ("bias", nn.Parameter(torch.zeros(4))),
        ("scale", nn.Parameter(torch.zeros(()), requires_grad=False)),
        ("half", nn.Parameter(torch.zeros(2, 3, dtype=torch.float16))),
        ("empty", nn.Parameter(torch.zeros(0, 5))),
    ]


def replaced(index: int, name: str, tensor: Tensor, **options: Any) -> list[tuple[str, Tensor]]:
    parameters = named_parameters()
    parameters[index] = (name, nn.Parameter(tensor, **options))
    return parameters


# What one rank may hold instead → what the message must say about rank 0's parameter and about this one's.
OTHER_MODELS: dict[str, tuple[Callable[[], list[tuple[str, Tensor]]], str, str]] = {
    "another shape": (lambda: replaced(1, "bias", torch.zeros(5)), "'bias' of shape (4,), ", "'bias' of shape (5,), "),
    "another shape of as many elements": (
        lambda: replaced(3, "half", torch.zeros(3, 2, dtype=torch.float16)),
        "'half' of shape (2, 3), ",
        "'half' of shape (3, 2), ",
    ),
    "other strides": (
        lambda: replaced(0, "weight", torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last)),
        "strides (12, 4, 2, 1), ",
        "strides (12, 1, 6, 3), ",
    ),
    "another dtype": (lambda: replaced(3, "half", torch.zeros(2, 3)), "torch.float16 on cpu", "torch.float32 on cpu"),
    "another name": (lambda: replaced(1, "bais", torch.zeros(4)), "'bias' of shape", "'bais' of shape"),
    "frozen": (lambda: replaced(1, "bias", torch.zeros(4), requires_grad=False), "grad=True", "grad=False"),
    "one fewer": (lambda: named_parameters()[:-1], "'empty' of shape (0, 5)", "none of this number"),
    "one more": (lambda: [*named_parameters(), ("extra", torch.zeros(2))], "none of this", "'extra' of shape (2,)"),
    "none at all": (list, "'weight' of shape", "none of this number"),
    "another order": (lambda: named_parameters()[::-1], "'weight' of shape", "'empty' of shape"),
    "a name too long for a report": (lambda: replaced(1, "ü" * 5000, torch.zeros(4)), "'bias' of shape", "'üüüü"),
}


def verify_with_another_model_on(rank: int, other: dict[int, str]) -> None:
    parameters = OTHER_MODELS[other[rank]][0]() if rank in other else named_parameters()
    replicas.verify_replicas(parameters, dist.group.WORLD)


def verify_and_count_collectives(rank: int) -> list[int]:
    with mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as all_gather:
        replicas.verify_replicas(named_parameters(), dist.group.WORLD)
        replicas.verify_replicas([], dist.group.WORLD)
    return [call.args[1].nbytes for call in all_gather.call_args_list]


def test_equal_models_cost_one_small_all_gather(ranks: RankPool) -> None:
    assert ranks.run(verify_and_count_collectives, 3) == [[64, 64]] * 3


@pytest.mark.parametrize("other", OTHER_MODELS)
def test_every_rank_names_the_parameter_that_differs_and_both_values(ranks: RankPool, other: str) -> None:
    errors = ranks.errors(verify_with_another_model_on, 3, {2: other})
    _, value_of_rank_0, value_of_rank = OTHER_MODELS[other]
    lines = errors[0].message.splitlines()
    assert [error.type_name for error in errors] == ["RuntimeError"] * 3
    assert len({error.message for error in errors}) == 1, "all ranks say the same"
    assert lines[1].startswith("  rank 0: ")
    assert value_of_rank_0 in lines[1]
    assert lines[2].startswith("  rank 2: ")
    assert value_of_rank in lines[2]
    for text in ("Ranks that differ from rank 0: 2.", "Causes:", "Remedies:"):
        assert text in errors[0].message


@pytest.mark.parametrize(
    ("world_size", "other", "texts"),
    [
        (
            4,
            {1: "one fewer", 3: "another shape"},
            ["that differs is number 1:", "rank 3: 'bias' of shape (5,)", "Ranks that differ from rank 0: 1, 3."],
        ),
        (2, {1: "another order"}, ["Between these two ranks 4 differ."]),  # the one in the middle stays where it was
        (2, {1: "none at all"}, ["Between these two ranks 5 differ; rank 0 has 5 in all and rank 1 0."]),
        (3, {0: "none at all"}, ["rank 0: none of this number", "Ranks that differ from rank 0: 1, 2."]),
    ],
)
def test_the_first_difference_is_named_and_how_many_there_are(
    ranks: RankPool, world_size: int, other: dict[int, str], texts: list[str]
) -> None:
    for error in ranks.errors(verify_with_another_model_on, world_size, other):
        assert all(text in error.message for text in texts)


# ---------------------------------------------------------------------------------------------- broadcast_replicas

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
    *(torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
]


def tensors_of_all_kinds(rank: int) -> list[Tensor]:
    """Values differ between ranks and between the tensors of one rank."""

    def filled(*shape: int) -> Tensor:
        return torch.randint(0, 100, shape, generator=generator).float()

    generator = torch.Generator().manual_seed(rank)
    every_dtype = [filled(3, 5).gt(50) if dtype is torch.bool else filled(3, 5).to(dtype) for dtype in DTYPES]
    return [
        *every_dtype,
        filled(),  # 0-dim
        filled(0, 3),  # empty
        filled(4, 6).t(),
        filled(2, 3, 4, 4).to(memory_format=torch.channels_last),
        filled(8, 8)[::2, 1:7:3],  # with holes
        filled(1, 5).expand(3, 5),  # repeats memory
        filled(3).as_strided((1,), (2,)),  # contiguous, with a stride that says nothing
        nn.Parameter(filled(7)),
        nn.Parameter(filled(5, 7).t()),
        torch.complex(filled(3), filled(3)).conj(),
        torch.complex(filled(3), filled(3)).conj().imag,
    ]


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, dtype and strides included."""
    if (a.dtype, a.stride(), a.requires_grad) != (b.dtype, b.stride(), b.requires_grad):
        return False
    a, b = (torch.cat([tensor.detach().resolve_conj().resolve_neg().flatten()] * 2) for tensor in (a, b))
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def broadcast_all_kinds(rank: int, piece_bytes: int, in_flight: int, src: int) -> list[int]:
    """The indices of tensors that are not what rank ``src`` started with."""
    tensors = tensors_of_all_kinds(rank)
    replicas.broadcast_replicas(tensors, dist.group.WORLD, src, piece_bytes, in_flight)
    expected = tensors_of_all_kinds(src)
    return [index for index, pair in enumerate(zip(tensors, expected, strict=True)) if not same(*pair)]


class WatchedWork:
    """A broadcast on its way. The class counts how many are."""

    on_the_way = most = 0

    def __init__(self, work: dist.Work) -> None:
        self._work = work
        WatchedWork.on_the_way += 1
        WatchedWork.most = max(WatchedWork.most, WatchedWork.on_the_way)

    def wait(self) -> None:
        WatchedWork.on_the_way -= 1
        self._work.wait()


def watch_broadcasts(rank: int, tensors: list[Tensor], piece_bytes: int, in_flight: int) -> tuple[int, list[int], int]:
    """The most pieces on the way at once, the sizes of all, and how many were sent from a tensor's own memory."""
    original, sent = dist.broadcast, []
    WatchedWork.most = 0

    def watched(tensor: Tensor, **options: Any) -> WatchedWork:
        sent.append(tensor)
        return WatchedWork(original(tensor, **options))

    with mock.patch.object(dist, "broadcast", watched):
        replicas.broadcast_replicas(tensors, dist.group.WORLD, 0, piece_bytes, in_flight)
    addresses = {tensor.data_ptr() for tensor in tensors}
    in_place = sum(wire.data_ptr() in addresses for wire in sent)
    return WatchedWork.most, [wire.nbytes for wire in sent], in_place


def backward_after_broadcast(rank: int, preserve_versions: bool) -> bool:
    """Whether a graph that saved a buffer still runs backward after that buffer was broadcast."""
    buffer, weight = torch.full((3,), 2.0), torch.ones(3, requires_grad=True)
    product = weight * buffer
    replicas.broadcast_replicas([buffer, torch.zeros(2)], dist.group.WORLD, preserve_versions=preserve_versions)
    try:
        product.sum().backward()
    except RuntimeError as error:
        return "modified by an inplace operation" not in str(error)
    return True


@pytest.mark.parametrize(("piece_bytes", "in_flight", "src"), [(1, 1, 0), (1, 2, 1), (100, 2, 0), (2**20, 2, 1)])
def test_tensors_of_every_kind_become_those_of_the_source(
    ranks: RankPool, piece_bytes: int, in_flight: int, src: int
) -> None:
    assert ranks.run(broadcast_all_kinds, 3, piece_bytes, in_flight, src) == [[], [], []]


MIB = 2**20 // 4  # of fp32


@pytest.mark.parametrize(
    ("tensors", "piece_bytes", "in_flight", "expected"),
    [
        # No more pieces are on their way than allowed.
        *(([torch.zeros(100) for _ in range(10)], 800, number, (number, [800] * 5, 0)) for number in (1, 2, 3)),
        # Neighbours of any dtype share a piece: 32 + 8 + 1 bytes, padded to 16 each.
        ([torch.zeros(5), torch.tensor(1), torch.zeros(3), torch.zeros(1).bool()], 2**20, 2, (1, [64], 0)),
        # A contiguous tensor alone in its piece is not copied.
        ([torch.zeros(100), torch.zeros(1000), torch.zeros(10, 10).t()], 500, 2, (2, [400, 4000, 400], 2)),
        # Large tensors travel alone, and small ones together across them: 15 elements more than the last, and padding.
        (
            [torch.zeros(size) for size in (10, MIB, 5, 2 * MIB, MIB - 1)],
            2**30,
            2,
            (2, [4 * MIB, 8 * MIB, 4 * MIB + 64], 2),
        ),
    ],
)
def test_what_travels(
    ranks: RankPool, tensors: list[Tensor], piece_bytes: int, in_flight: int, expected: tuple[int, list[int], int]
) -> None:
    assert ranks.run(watch_broadcasts, 2, tensors, piece_bytes, in_flight) == [expected] * 2


def test_a_broadcast_breaks_no_earlier_graph_where_versions_are_preserved(ranks: RankPool) -> None:
    assert ranks.run(backward_after_broadcast, 2, preserve_versions=True) == [True, True]
    assert False in ranks.run(backward_after_broadcast, 2, preserve_versions=False)


# -------------------------------------------------------------------------------------------------- agree_on_order


def agree(rank: int, orders: list[list[int]]) -> list[int]:
    numbers = range(len(orders[rank]))
    return replicas.agree_on_order(orders[rank], numbers, dist.group.WORLD, torch.device("cpu"))


def test_all_ranks_get_the_order_of_rank_0(ranks: RankPool) -> None:
    assert ranks.run(agree, 3, [[2, 0, 1], [0, 1, 2], [2, 1, 0]]) == [[2, 0, 1]] * 3
    assert ranks.run(agree, 2, [[], []]) == [[], []]


@pytest.mark.parametrize("order", [[0, 0, 1], [1, 2, 3], [-1, 0, 1]])
def test_every_rank_refuses_an_order_of_rank_0_that_is_no_permutation(ranks: RankPool, order: list[int]) -> None:
    errors = ranks.errors(agree, 2, [order, [0, 1, 2]])
    assert all(
        error.type_name == "ValueError" and "not a permutation of [0, 1, 2]" in error.message for error in errors
    )
