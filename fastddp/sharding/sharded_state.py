"""A rank's part of a tensor of the optimizer's state, as checkpoints take it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fastddp.errors import see
from fastddp.sharding.notice import HARMLESS

if TYPE_CHECKING:  # it is large, and imported by whoever calls these methods
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

_OF_PART = {Tensor.__deepcopy__, Tensor.clone, Tensor.cpu, Tensor.cuda, Tensor.detach, Tensor.pin_memory, Tensor.to}
_OF_PART |= {Tensor.data.__get__, torch.empty_like, torch.full_like, torch.ones_like, torch.zeros_like}  # type: ignore[attr-defined]
_WRITES = re.compile(r"__setitem__|__i(add|sub|mul|div|truediv|floordiv|mod|pow|and|or|xor)__|[a-z]\w*_")
_READS_OTHERS = {"cumsum_", "cumprod_", "renorm_", "set_"}  # elements, or memory


class Box(NamedTuple):
    """A rectangle of a tensor."""

    offsets: torch.Size
    sizes: torch.Size
    values: Tensor

    def within(self, whole: Tensor) -> Tensor:
        """The rectangle's place in ``whole``."""
        return whole[tuple(slice(at, at + size) for at, size in zip(self.offsets, self.sizes, strict=True))]


class ShardedState(Tensor):
    """Elements ``begin`` to ``end`` of a tensor of this shape, in the order of the parameter's memory.

    It has the whole tensor's shape, and memory for the part. It can be pickled, copied and moved, and
    ``torch.distributed.checkpoint`` saves and loads the part as rectangles of the whole. What is written in place, by
    all ranks alike, is written to the part. Any other use raises.
    """

    part: Tensor
    """Of the whole's shape if it is all of it, else of one dimension."""
    begin: int
    end: int
    order: tuple[int, ...]
    """Dimensions in the order of memory, the one whose neighbours are farthest apart first."""

    @staticmethod
    def of(part: Tensor, parameter: Tensor, begin: int, end: int) -> ShardedState:
        """Return a part of a tensor that is laid out like a parameter.

        Args:
            part: the elements.
            parameter: the parameter.
            begin: the first of them in it.
            end: the one after the last.
        """
        return sharded_state(part, tuple(parameter.shape), memory_order(parameter), begin, end)

    def has(self, parameter: Tensor, begin: int, end: int) -> bool:
        """Whether elements of a parameter are in the part.

        Args:
            parameter: the parameter.
            begin: the first of them.
            end: the one after the last.
        """
        same_order = self.order == memory_order(parameter)
        return self.part.shape == self.shape or (same_order and self.begin <= begin and end <= self.end)

    def boxes(self) -> Iterator[Box]:
        """The part as rectangles."""
        if self.part.shape == self.shape:
            yield Box(torch.Size([0] * self.dim()), self.shape, self.part)
            return
        first = 0
        back = [self.order.index(dim) for dim in range(self.dim())]
        for offsets, sizes in _boxes([self.shape[dim] for dim in self.order], self.begin, self.end):
            values = self.part[first : first + math.prod(sizes)].view(sizes).permute(back)
            yield Box(torch.Size(offsets[at] for at in back), values.shape, values)
            first += values.numel()

    def _whole(self) -> Tensor:
        """The whole, with zeros where other ranks have it."""
        whole = torch.zeros(self.shape, dtype=self.part.dtype, device=self.part.device)
        for box in self.boxes():
            box.within(whole).copy_(box.values)
        return whole

    def _write(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Do it with a whole, and take the part; False: it is no write to elements."""
        wholes = tree_map_only(ShardedState, ShardedState._whole, (self, *args))
        func(*wholes, **tree_map_only(ShardedState, ShardedState._whole, kwargs))
        for box in self.boxes() if wholes[0].shape == self.shape else ():
            box.values.copy_(box.within(wholes[0]))
        return wholes[0].shape == self.shape

    # ------------------------------------------------------------- what torch/distributed/_checkpointable.py asks for

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        from torch.distributed.checkpoint import metadata, planner

        properties = metadata.TensorProperties.create_from_tensor(self.part)
        return [
            planner.WriteItem(
                metadata.MetadataIndex(fqn, chunk.offsets),
                planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint import metadata

        return [metadata.ChunkStorageMetadata(box.offsets, box.sizes) for box in self.boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(box.values for box in self.boxes() if box.offsets == index.offset)

    # ---------------------------------------------------------------------------------------------------- as a tensor

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return sharded_state, (self.part, tuple(self.shape), self.order, self.begin, self.end)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedState({self.begin}:{self.end} of {tuple(self.shape)}, {self.part!r})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let through what reads no values, or is the same for a part; raise RuntimeError for everything else."""
        if func in HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        this = args[0] if args else None
        if func is Tensor.data_ptr:
            return 0  # async_save copies attributes of what has no memory, to a new_empty
        if isinstance(this, ShardedState) and (func in _OF_PART or func is Tensor.new_empty):
            part = func(this.part, *args[1:], **(kwargs or {})) if func in _OF_PART else this.part
            return sharded_state(part, tuple(this.shape), this.order, this.begin, this.end)
        name = getattr(func, "__name__", "")
        writes = _WRITES.fullmatch(name) and name not in _READS_OTHERS
        if writes and isinstance(this, ShardedState) and this._write(func, args[1:], kwargs or {}):
            return this
        raise RuntimeError(
            f"This state of a ShardedOptimizer is one rank's part, and {getattr(func, '__name__', func)} needs all of "
            "it. Take the whole state from full_state_dict(), which all ranks call." + see("FD043")
        )


def sharded_state(part: Tensor, shape: tuple[int, ...], order: tuple[int, ...], begin: int, end: int) -> ShardedState:
    """As :meth:`ShardedState.of`; pickles name this function."""
    empty = torch.empty((), dtype=part.dtype, device=part.device).expand(shape)
    state: ShardedState = Tensor._make_subclass(ShardedState, empty)  # type: ignore[attr-defined]
    state.part, state.order, state.begin, state.end = part, order, begin, end
    return state


torch.serialization.add_safe_globals([sharded_state])


def memory_order(parameter: Tensor) -> tuple[int, ...]:
    """As :attr:`ShardedState.order`. Dimensions of size 1 are last, because they may have any stride."""
    shape, strides = parameter.shape, parameter.stride()
    return tuple(sorted(range(len(shape)), key=lambda dim: (shape[dim] == 1, -strides[dim])))


def _boxes(shape: list[int], begin: int, end: int) -> Iterator[tuple[list[int], list[int]]]:
    """Offsets and sizes of the rectangles that make up elements ``begin`` to ``end``, in their order.

    They are the end of a row, whole rows, and the beginning of a row; a part of a row is cut in the same way.
    """
    if len(shape) == 1:
        yield [begin], [end - begin]
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # whole rows
    if begin % row or first > last:
        until = min(end - (first - 1) * row, row)
        for offsets, sizes in _boxes(shape[1:], begin % row, until):
            yield [first - 1, *offsets], [1, *sizes]
    if first < last:
        yield [first, *(0 for _ in shape[1:])], [last - first, *shape[1:]]
    if end % row and first <= last:
        for offsets, sizes in _boxes(shape[1:], 0, end % row):
            yield [last, *offsets], [1, *sizes]
