"""What ranks do together before they train: check that they hold the same model, and start from rank 0's values.

Every function here is a collective: all ranks of the group call it, in the same order. No rank can hang in
``verify_replicas``, however much the models differ. The other functions rely on what it has verified.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from fastddp.errors import see
from fastddp.ranks.agreement import gather_numbers
from fastddp.ranks.listing import listed
from fastddp.ranks.together import finish, together

# A row is compared, and sent. For a parameter: name, shape, strides (or its layout, if it has none), dtype, device
# type, requires_grad. For a parameter's place in a plan: a text.
_Row: TypeAlias = list[Any] | str

_CPU = torch.device("cpu")

PIECE_BYTES = 8 * 2**20
_ALONE_BYTES = 2**20  # from this size a collective of its own costs less than two copies, into fresh memory
_ALIGNMENT = 16  # bytes; a multiple of every element size, so that a piece can hold several dtypes
_REPORT_BYTES = 2048  # of one rank's report about its first difference


def verify_replicas(
    parameters: Sequence[tuple[str, Tensor]],
    process_group: dist.ProcessGroup,
    device: torch.device = _CPU,
    plan: Sequence[str] = (),
    settings: Sequence[str] = (),
    numbers: Sequence[int] = (),
    choose_source: Callable[[list[list[int]]], int] = lambda numbers: 0,
) -> list[list[int]]:
    """Raise on every rank, with the same message, unless all ranks hold the same parameters (or buffers).

    Ranks compare the number of parameters and, in order, each one's name, shape, strides, dtype, type of device and
    ``requires_grad``. They do not compare values. If all is well, this costs one all-gather of 56 bytes a rank, and 8 a
    number. After a mismatch, which all ranks see in the gathered numbers, one rank sends its description for the others
    to compare.

    Args:
        parameters: (name, tensor) pairs of any shape and dtype. All tensors that will be broadcast or reduced should be
            among them, since those collectives cannot notice a rank whose tensors differ.
        process_group: the ranks that hold replicas.
        device: where tensors must live for this group's collectives.
        plan: the parameters of a bucket plan that was given, a text for each, to be compared as well.
        settings: arguments and their values, a text for each, to be compared as well.
        numbers: of this rank, which are not compared.
        choose_source: returns whose description is the right one, from the numbers of all ranks.

    Returns:
        The numbers of each rank.

    Raises:
        RanksDiffer: it says which ranks differ.
    """
    model: list[_Row] = [_describe(name, tensor) for name, tensor in parameters]
    texts = [json.dumps(rows).encode() for rows in (model, list(plan), list(settings))]
    digest = memoryview(hashlib.sha256(b"".join(texts)).digest()).cast("q")
    every = gather_numbers([*map(len, texts), *digest, *numbers], process_group, device, torch.int64)
    compared = len(texts) + len(digest)
    told = [of_rank[compared:] for of_rank in every]
    source = choose_source(told)
    differ = any(of_rank[:compared] != every[0][:compared] for of_rank in every)
    for text, length, message in zip(texts, every[source], _MISMATCHES if differ else (), strict=False):
        theirs = json.loads(bytes(numbers_of(source, [*text.ljust(length)[:length]], process_group, device)))
        reports = _gather_reports(_first_difference(json.loads(text), theirs), process_group, device)
        if reports:
            raise RanksDiffer(message(source, theirs, reports), sorted(reports))
    return told


class RanksDiffer(RuntimeError):
    """Ranks do not hold the same model, or were given different arguments. ``ranks``: those that differ."""

    def __init__(self, message: str, ranks: list[int]) -> None:
        super().__init__(message)
        self.ranks = ranks


def check_dense(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise RuntimeError for a tensor that cannot be broadcast: quantised, or without strides, such as a sparse one."""
    for name, tensor in tensors:
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise RuntimeError(
                f"'{name}' is a tensor of layout {tensor.layout} and {tensor.dtype}, which cannot be broadcast. "
                "Exclude it by adding its name to the module's `_ddp_params_and_buffers_to_ignore`, a list, before "
                "wrapping it, or wrap it with broadcast_buffers=False; each rank then keeps its own." + see("FD022")
            )


@torch.no_grad()
def broadcast_replicas(
    tensors: Iterable[Tensor],
    process_group: dist.ProcessGroup,
    src: int = 0,
    piece_bytes: int = PIECE_BYTES,
    in_flight: int = 2,
    preserve_versions: bool = False,
) -> None:
    """Overwrite ``tensors`` in place with those of rank ``src`` of the group, many tensors to a collective.

    They are parameters or buffers, as many and of the same sizes on each rank. They travel as bytes, so a piece can mix
    dtypes, and every dtype works on every backend. Each rank keeps its own strides: elements correspond by their
    logical order. A piece of one contiguous tensor is sent from and received into the tensor's own memory. All ranks
    pack and unpack: what a class of tensors cannot do raises on all of them, and no rank waits.

    Args:
        tensors: of any dtype, shape and strides; empty ones are skipped.
        process_group: the ranks that hold replicas.
        src: the rank whose values all get.
        piece_bytes: of several tensors at most. A larger tensor is a piece of its own, and so is one of 1 MiB or more.
        in_flight: pieces that may be on their way at once, which bounds the memory used: in_flight x piece_bytes.
        preserve_versions: leave autograd's version counters as they are, so that a graph that saved one of these
            tensors can still run backward: right for buffers before a forward, wrong for parameters.
    """
    writable = [_without_repeats(tensor) for tensor in tensors if tensor.numel()]
    versions = torch.autograd._unsafe_preserve_version_counter(tuple(writable)) if preserve_versions else nullcontext()
    flying: deque[tuple[dist.Work, _Piece]] = deque()

    def land() -> None:
        work, piece = flying.popleft()
        finish(work, process_group)
        piece.unpack()

    with versions:
        for together in _pieces(writable, piece_bytes):
            if len(flying) >= in_flight:
                land()
            piece = _Piece.of(together)
            work = dist.broadcast(piece.wire, group=process_group, group_src=src, async_op=True)
            flying.append((work, piece))
        while flying:
            land()


def check_same_model(number: int, process_group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise RuntimeError on every rank, with ranks and models, if ranks are in forwards of different models.

    Otherwise each rank would take what they agree on next for its own model, for good. ``number`` is that of this
    rank's model in ``process_group``, from 1; or 0 if ranks have agreed on none, which is not compared.
    """
    numbers = [of_rank for (of_rank,) in gather_numbers([number], process_group, device, torch.int64)]
    models = sorted({*numbers} - {0})
    if len(models) > 1:
        where = [listed([rank for rank, of in enumerate(numbers) if of == model]) for model in models]
        places = "; ".join(f"model {model} on rank {ranks}" for model, ranks in zip(models, where, strict=True))
        raise RuntimeError(
            f"Ranks are in forwards of different models: {places} (models are numbered in the order of their "
            "wrappers). Forwards and backwards of models have to come in the same order on all ranks." + see("FD003")
        )


def agree_on_order(
    order: Sequence[int], numbers: Sequence[int], process_group: dist.ProcessGroup, device: torch.device
) -> list[int]:
    """Rank 0's ``order`` of the ``numbers``, which are the same on all ranks.

    On every rank this raises ValueError if rank 0's order is not a permutation of ``numbers``.
    """
    agreed = _rank_0s(order, process_group, device)
    if sorted(agreed) != sorted(numbers):
        raise ValueError(f"rank 0's order is not a permutation of {sorted(numbers)}: {agreed}")
    return agreed


def agree_on_plan(
    plan: Sequence[Sequence[int]], numbers: Sequence[int], process_group: dist.ProcessGroup, device: torch.device
) -> list[list[int]]:
    """Rank 0's ``plan``, on every rank: ``numbers`` divided into lists; errors as for :func:`agree_on_order`."""
    order = agree_on_order([number for part in plan for number in part], numbers, process_group, device)
    parts = _rank_0s([place for place, part in enumerate(plan) for _ in part], process_group, device)
    agreed: dict[int, list[int]] = {}
    for place, number in zip(parts, order, strict=True):
        agreed.setdefault(place, []).append(number)
    return [*agreed.values()]


def agree_on(choice: bool, process_group: dist.ProcessGroup, device: torch.device) -> bool:
    """Rank 0's ``choice``, on every rank."""
    return bool(_rank_0s([choice], process_group, device)[0])


def numbers_of(rank: int, numbers: Sequence[int], process_group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """The integers of this rank, on every rank; as many on each."""
    wire = torch.tensor(numbers, dtype=torch.int64, device=device)
    together(dist.broadcast, wire, group=process_group, group_src=rank)
    return wire.tolist()


def _rank_0s(numbers: Sequence[int], process_group: dist.ProcessGroup, device: torch.device) -> list[int]:
    return numbers_of(0, numbers, process_group, device)


# ---------------------------------------------------------------------------------------------- verify_replicas


def _describe(name: str, tensor: Tensor) -> _Row:
    layout = tensor.stride() if tensor.layout == torch.strided else str(tensor.layout)
    return [name, tensor.shape, layout, str(tensor.dtype), tensor.device.type, tensor.requires_grad]


@dataclass(frozen=True)
class _Difference:
    """How one rank's parameters differ from rank 0's."""

    first: int  # index of the first parameter that differs
    number: int  # how many differ; a parameter that only one of the two has counts
    count: int  # how many parameters this rank has
    value: str  # this rank's parameter at ``first``, in words


_Reports: TypeAlias = dict[int, _Difference]  # by rank


def _first_difference(mine: list[_Row], theirs: list[_Row]) -> _Difference | None:
    differing = [index for index, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b]
    differing += range(min(len(mine), len(theirs)), max(len(mine), len(theirs)))
    if not differing:
        return None
    return _Difference(differing[0], len(differing), len(mine), _in_words(mine, differing[0]))


def _in_words(rows: list[_Row], index: int) -> str:
    if index >= len(rows):
        return "none of this number"
    row = rows[index]
    if isinstance(row, str):
        return row
    name, shape, layout, dtype, device_type, requires_grad = row
    layout = layout if isinstance(layout, str) else f"strides {tuple(layout)}"
    return f"'{name}' of shape {tuple(shape)}, {layout}, {dtype} on {device_type}, requires_grad={requires_grad}"


def _gather_reports(mine: _Difference | None, process_group: dist.ProcessGroup, device: torch.device) -> _Reports:
    """Each differing rank's report. Reports have one fixed size, so this works whatever the models are."""
    report = b""
    if mine is not None:
        # A byte of text takes up to 6 bytes in JSON, and the rest of a report less than 128.
        # A name in a plan's file may hold half of a surrogate pair, which UTF-8 cannot encode.
        value = mine.value.encode(errors="replace")[: (_REPORT_BYTES - 128) // 6].decode(errors="ignore")
        report = json.dumps([mine.first, mine.number, mine.count, value]).encode()
    every = gather_numbers([*report.ljust(_REPORT_BYTES)], process_group, device, torch.uint8)
    texts = [bytes(characters).strip() for characters in every]
    return {rank: _Difference(*json.loads(text)) for rank, text in enumerate(texts) if text}


def _different_parameters(
    mismatch: str, first: str, advice: str, source: int, theirs: list[_Row], reports: _Reports
) -> str:
    """About the rank whose parameters differ first; the same on every rank."""
    rank = min(reports, key=lambda rank: (reports[rank].first, rank))
    report = reports[rank]
    counts = ""
    if len(theirs) != report.count:
        counts = f"; rank {source} has {len(theirs)} in all and rank {rank} {report.count}"
    return (
        f"{mismatch} {first} that differs is number {report.first}:\n"
        f"  rank {source}: {_in_words(theirs, report.first)}\n"
        f"  rank {rank}: {report.value}\n"
        f"Between these two ranks {report.number} differ{counts}. "
        f"Ranks that differ from rank {source}: {listed(sorted(reports))}.\n{advice}"
    )


def _different_settings(source: int, theirs: list[_Row], reports: _Reports) -> str:
    """Which rank was given what; the same on every rank."""
    first = min(report.first for report in reports.values())
    ranks_of: dict[str, list[int]] = {}
    for rank, report in sorted(reports.items()):
        if report.first == first:
            ranks_of.setdefault(report.value, []).append(rank)
    lines = "".join(f"  rank {listed(ranks)}: {value}\n" for value, ranks in ranks_of.items())
    return (
        "The ranks were not given the same argument:\n"
        f"  rank {source}, and every rank not named here: {_in_words(theirs, first)}\n{lines}"
        "Give DistributedDataParallel the same on all ranks." + see("FD002")
    )


_MISMATCHES: tuple[Callable[[int, list[_Row], _Reports], str], ...] = (
    functools.partial(
        _different_parameters,
        "The ranks do not hold the same model.",
        "The first parameter or buffer",
        "Causes: the model's construction depends on the rank, on data, on random numbers or on files that are not the "
        "same everywhere; parameters were added, frozen, cast or given another memory format on some ranks only; the "
        "ranks run different code.\n"
        "Remedies: build the model from the same configuration on every rank, and do to it the same things in the same "
        "order before wrapping it; exclude what is meant to differ by listing its names in the module's "
        "`_ddp_params_and_buffers_to_ignore`." + see("FD001"),
    ),
    functools.partial(
        _different_parameters,
        "The ranks were not given the same bucket plan.",
        "The plan's first parameter",
        "Causes: bucket_plan was given on some ranks only; the ranks read different files, or some could not read "
        "theirs.\nRemedies: save one rank's model.bucket_plan(), and give that file to all ranks." + see("FD002"),
    ),
    _different_settings,
)


# ------------------------------------------------------------------------------------------- broadcast_replicas


@dataclass(frozen=True)
class _Piece:
    """Tensors that travel together, and their wire."""

    wire: Tensor  # uint8, contiguous
    staged: list[tuple[Tensor, list[Tensor]]]  # for each dtype a view of the wire, and the tensors in it

    @staticmethod
    def of(tensors: list[Tensor]) -> _Piece:
        if len(tensors) == 1 and tensors[0].is_contiguous() and not _is_lazy(tensors[0]):
            # A dimension of one element may have any stride, and a view would keep it.
            flat = tensors[0].detach().as_strided((tensors[0].numel(),), (1,))
            return _Piece(flat.view(torch.uint8), [])
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        sizes = [sum(t.numel() for t in group) * dtype.itemsize for dtype, group in by_dtype.items()]
        padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        wire = torch.empty(sum(padded), dtype=torch.uint8, device=tensors[0].device)
        starts = wire.split(padded)
        views = [start[:size].view(dtype) for start, size, dtype in zip(starts, sizes, by_dtype, strict=True)]
        staged = list(zip(views, by_dtype.values(), strict=True))
        for view, group in staged:
            torch.cat([tensor.reshape(-1) for tensor in group], out=view)
        return _Piece(wire, staged)

    def unpack(self) -> None:
        for view, tensors in self.staged:
            values = _unflatten_dense_tensors(view, tensors)
            if any(_is_lazy(tensor) for tensor in tensors):
                for tensor, value in zip(tensors, values, strict=True):
                    tensor.copy_(value)
            else:
                torch._foreach_copy_(tensors, values)


def _pieces(tensors: Iterable[Tensor], piece_bytes: int) -> Iterator[list[Tensor]]:
    """Large tensors alone; the small ones between them together, up to ``piece_bytes`` on one device.

    This depends on sizes and devices alone, and is the same on every rank.
    """
    together: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if tensor.nbytes >= _ALONE_BYTES:
            yield [tensor]
            continue
        if together and (size + tensor.nbytes > piece_bytes or tensor.device != together[0].device):
            yield together
            together, size = [], 0
        together.append(tensor)
        size += tensor.nbytes
    if together:
        yield together


def _is_lazy(tensor: Tensor) -> bool:
    """Whether the tensor is conjugated or negated by a mark only, so that its memory does not hold its values."""
    return tensor.is_conj() or tensor.is_neg()


def _without_repeats(tensor: Tensor) -> Tensor:
    """The part of an expanded tensor that does not repeat memory: in-place copies refuse a tensor that does."""
    if tensor.is_contiguous():
        return tensor
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.size(dim) > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
