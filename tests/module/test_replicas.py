"""What the ranks do together before they train: verify, broadcast, agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastddp import DistributedDataParallel
from fastddp.module import replicas
from on_ranks import of_ranks, on_ranks

# ------------------------------------------------------------------------------------------------- verify_replicas

Named = list[tuple[str, Tensor]]


def named_parameters() -> Named:
    return [
        ("weight", nn.Parameter(torch.zeros(4, 3, 2, 2))),
        ("bias", nn.Parameter(torch.zeros(4))),
        ("scale", nn.Parameter(torch.zeros(()), requires_grad=False)),
        ("half", nn.Parameter(torch.zeros(2, 3, dtype=torch.float16))),
        ("empty", nn.Parameter(torch.zeros(0, 5))),
    ]


def replaced(index: int, name: str, tensor: Tensor, **options: Any) -> Named:
    parameters = named_parameters()
    parameters[index] = (name, nn.Parameter(tensor, **options))
    return parameters


OTHER_MODELS: dict[str, Callable[[], Named]] = {
    "shape": lambda: replaced(1, "bias", torch.zeros(2, 2)),
    "strides": lambda: replaced(0, "weight", torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last)),
    "dtype": lambda: replaced(3, "half", torch.zeros(2, 3)),
    "frozen": lambda: replaced(1, "bias", torch.zeros(4), requires_grad=False),
    "one more": lambda: [*named_parameters(), ("extra", torch.zeros(2))],
    "none": list,
    "order": lambda: named_parameters()[::-1],
    "a name too long for a report": lambda: replaced(1, "ü" * 5000, torch.zeros(4)),
}


@pytest.mark.parametrize(
    ("other", "of_rank_0", "of_another", "more"),
    [
        ({2: "shape"}, "'bias' of shape (4,), ", "rank 2: 'bias' of shape (2, 2), ", "from rank 0: 2."),
        ({2: "strides"}, "strides (12, 4, 2, 1), ", "strides (12, 1, 6, 3), ", "number 0"),
        ({2: "dtype"}, "torch.float16 on cpu", "torch.float32 on cpu", "number 3"),
        ({2: "frozen"}, "grad=True", "grad=False", "number 1"),
        ({2: "one more"}, "none of this number", "'extra' of shape (2,)", "number 5"),
        ({2: "a name too long for a report"}, "'bias' of shape", "'üüüü", "number 1"),
        # The one in the middle stays where it was.
        ({2: "order"}, "'weight' of shape", "'empty' of shape", "Between these two ranks 4 differ."),
        ({2: "none"}, "'weight'", "none of this number", "ranks 5 differ; rank 0 has 5 in all and rank 2 0."),
        ({0: "none"}, "none of this number", "rank 1: 'weight'", "Ranks that differ from rank 0: 1, 2."),
        # The first difference is that of the rank after.
        ({1: "one more", 2: "shape"}, "'bias'", "rank 2: 'bias' of shape (2, 2)", "differ from rank 0: 1, 2."),
    ],
    ids=str,
)
@on_ranks(3)
def test_every_rank_names_the_first_parameter_that_differs_both_values_and_the_ranks(
    rank: int, other: dict[int, str], of_rank_0: str, of_another: str, more: str
) -> None:
    parameters = OTHER_MODELS[other[rank]]() if rank in other else named_parameters()
    with pytest.raises(RuntimeError) as raised:
        replicas.verify_replicas(parameters, dist.group.WORLD)
    said = str(raised.value)
    assert of_ranks(said) == [said] * 3
    _, first, second, *_ = said.splitlines()
    assert first.startswith("  rank 0: ")
    assert of_rank_0 in first
    assert of_another in second
    assert more in said


@on_ranks(3)
def test_equal_models_cost_one_small_all_gather(rank: int) -> None:
    with mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as all_gather:
        replicas.verify_replicas(named_parameters(), dist.group.WORLD)
        replicas.verify_replicas([], dist.group.WORLD)
    assert [call.args[1].nbytes for call in all_gather.call_args_list] == [56, 56]


# ---------------------------------------------------------------------------------------------- broadcast_replicas

DTYPES = [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int8, torch.int64]


def tensors_of_all_kinds(rank: int) -> list[Tensor]:
    """Values differ between ranks and between the tensors of one rank."""

    def filled(*shape: int) -> Tensor:
        return torch.randint(0, 100, shape, generator=generator).float()

    generator = torch.Generator().manual_seed(rank)
    return [
        *(filled(3, 5).sub(50).relu().to(dtype) for dtype in DTYPES),
        filled(),  # 0-dim
        filled(0, 3),  # empty
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


@pytest.mark.parametrize(("piece_bytes", "in_flight", "src"), [(1, 1, 0), (1, 2, 1), (100, 2, 0), (2**20, 2, 1)])
@on_ranks(3)
def test_tensors_of_every_kind_become_the_sources(rank: int, piece_bytes: int, in_flight: int, src: int) -> None:
    tensors = tensors_of_all_kinds(rank)
    replicas.broadcast_replicas(tensors, dist.group.WORLD, src, piece_bytes, in_flight)
    expected = tensors_of_all_kinds(src)
    assert [index for index, pair in enumerate(zip(tensors, expected, strict=True)) if not same(*pair)] == []


class ReadOnly(Tensor):
    """Can be packed, and not unpacked."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.copy_, torch._foreach_copy_):
            raise NotImplementedError("no write")
        return super().__torch_function__(func, types, args, kwargs)


def quantised() -> Tensor:
    return torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)


def read_only() -> Tensor:
    return torch.ones(4).as_subclass(ReadOnly)


@pytest.mark.parametrize("src", [0, 1])
@pytest.mark.parametrize("make", [quantised, read_only])
@on_ranks(2)
def test_what_cannot_be_copied_raises_on_all_ranks_at_once(rank: int, make: Callable[[], Tensor], src: int) -> None:
    pieces = [torch.full((3,), rank), make()]
    with pytest.raises(NotImplementedError):
        replicas.broadcast_replicas(pieces, dist.group.WORLD, src)
    dist.barrier()  # which no rank's broadcast has met
    module = nn.Linear(2, 2)
    module.frozen = nn.Parameter(make(), requires_grad=False)
    with pytest.raises(RuntimeError, match=r"no write|'frozen' is a tensor of layout torch\.strided and torch\.qint8"):
        DistributedDataParallel(module)
    dist.barrier()


@pytest.mark.parametrize("in_flight", [1, 3])
@on_ranks(2)
def test_no_more_pieces_are_on_their_way_than_allowed(rank: int, in_flight: int) -> None:
    original, on_the_way = dist.broadcast, [0]

    def broadcast(tensor: Tensor, **options: Any) -> mock.Mock:
        assert tensor.nbytes == 800
        work = original(tensor, **options)
        on_the_way.append(on_the_way[-1] + 1)
        return mock.Mock(wait=lambda: on_the_way.append(on_the_way[-1] - 1) or work.wait())  # type: ignore[func-returns-value]

    with mock.patch.object(dist, "broadcast", broadcast):
        replicas.broadcast_replicas([torch.zeros(100) for _ in range(10)], dist.group.WORLD, 0, 800, in_flight)
    assert max(on_the_way) == in_flight
