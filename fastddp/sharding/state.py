"""The state of a sharded optimizer, put together from all ranks: for other buckets, and for checkpoints."""

from __future__ import annotations

import io
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from fastddp import _C
from fastddp.errors import see
from fastddp.ranks.agreement import gather_numbers
from fastddp.ranks.together import of_all_ranks
from fastddp.sharding.mixed import names_of
from fastddp.sharding.shards import Shards, Span

State = Mapping[str, Any]


@dataclass
class Whole:
    """One parameter's state, of all ranks."""

    place: int  # where the parameter begins in :attr:`elements`, in numbers
    elements: dict[str, Tensor] = field(default_factory=dict)
    """What has a value for each element of the parameter: by key, in the flat memory of a bucket."""
    values: dict[str, Any] = field(default_factory=dict)  # everything else, as the number of steps

    def of_parameter(self, parameter: Tensor) -> dict[str, Any]:
        """The state in the parameter's shape: views of :attr:`elements`."""
        return {**{key: _C.view_of(flat, parameter, self.place) for key, flat in self.elements.items()}, **self.values}

    def of_span(self, span: Span) -> dict[str, Any]:
        """The part that belongs to ``span``, in memory of its own."""
        begin = self.place + span.begin * (2 if span.holder.is_complex() else 1)
        parts = {key: _C.view_of(flat, span.like, begin).clone() for key, flat in self.elements.items()}
        return {**parts, **self.values}


def gathered(
    shards: Shards, inner: Sequence[Optimizer], of_span: Callable[[Span], State]
) -> Iterator[tuple[int, Whole]]:
    """The state of each parameter that has one, bucket by bucket, from each rank's part by name. A collective.

    Raises ValueError, on all ranks, if parts of parameters have state that cannot be put together.
    """
    own = [{span.parameter: _described(span, of_span(span)) for span in bucket.spans} for bucket in shards.buckets]
    of_ranks = _of_all_ranks(own, shards)
    for number, bucket in enumerate(shards.plan):
        places = dict(zip(bucket, shards.sharding.places(number), strict=True))
        wholes = {index: Whole(places[index]) for index in bucket}
        for of_rank in of_ranks:
            for index, (dtypes, values) in of_rank[number].items():
                before: dict[str, Any] = wholes[index].elements
                blocks = [key for key, value in values.items() if any(map(_is_block, tree_leaves(value)))]
                blocks += [key for key, dtype in dtypes.items() if before.get(key, dtype) is not dtype]
                if blocks and not shards.whole:
                    raise ValueError(
                        f"{names_of(inner)} has in its state {', '.join(blocks)} of {shards.names[index]}, no number "
                        'for each element, and ranks have parts of parameters. Pass shard="parameters".' + see("FD046")
                    )
                wholes[index].values.update(values)
                before.update(dtypes)
        kinds = {(key, dtype) for whole in wholes.values() for key, dtype in whole.elements.items()}
        for kind in sorted(kinds, key=str):
            flat = shards.gather_now(number, kind[1], lambda span, kind=kind: _elements(span, of_span(span), *kind))  # type: ignore[arg-type, misc]
            for whole in wholes.values():
                if whole.elements.get(kind[0]) is kind[1]:
                    whole.elements[kind[0]] = flat
        yield from ((index, whole) for index, whole in wholes.items() if whole.elements or whole.values)


def _elements(span: Span, state: State, key: str, dtype: torch.dtype) -> Tensor | None:
    value: Any = state.get(key)
    return value if is_of_elements(value, span.like) and value.real.dtype is dtype else None


def _is_block(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _of_all_ranks(own: Any, shards: Shards) -> list[Any]:
    """What each rank has. It travels as torch saves it."""
    saved = io.BytesIO()
    torch.save(own, saved)
    device = shards.buckets[0].flat.device if shards.buckets else torch.device("cpu")
    content = torch.frombuffer(saved.getbuffer(), dtype=torch.uint8).to(device)
    lengths = [length for (length,) in gather_numbers([len(content)], shards.group, device, torch.int64)]
    rows = of_all_ranks(nn.functional.pad(content, (0, max(lengths) - len(content))), shards.group)
    known = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(saved.getbuffer()))
    with torch.serialization.safe_globals([pkgutil.resolve_name(name) for name in known]):
        return [_loaded(row[:length]) for row, length in zip(rows, lengths, strict=True)]


def _loaded(content: Tensor) -> Any:
    """On the device of ``content`` what was on another rank's."""
    buffer = bytearray(len(content))
    torch.frombuffer(buffer, dtype=torch.uint8).copy_(content)
    device = content.device  # a dict, since subclasses of tensors take no function
    here = {f"{device.type}:{index}": str(device) for index in range(1024)} if device.type != "cpu" else None
    return torch.load(io.BytesIO(buffer), weights_only=True, map_location=here)


def _described(span: Span, state: State) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of what has a value for each element the dtype; everything else as it is."""
    dtypes = {key: value.real.dtype for key, value in state.items() if is_of_elements(value, span.like)}
    return dtypes, {key: value for key, value in state.items() if key not in dtypes}


def is_of_elements(value: Any, like: Tensor) -> bool:
    """Whether ``value`` has a value for each element of a span. A scalar says nothing of that, nor does a subclass."""
    return type(value) in (Tensor, nn.Parameter) and value.shape == like.shape and like.dim() > 0
