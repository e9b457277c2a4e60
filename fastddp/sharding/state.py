"""The state of a sharded optimizer, put together from all ranks: for other buckets, and for checkpoints."""

from __future__ import annotations

import io
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fastddp import _C
from fastddp.ranks.agreement import gather_numbers
from fastddp.ranks.together import of_all_ranks
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


def gathered(shards: Shards, of_span: Callable[[Span], State]) -> Iterator[tuple[int, Whole]]:
    """The state of each parameter that has one, bucket by bucket, from each rank's part by name. A collective."""
    own = [{span.parameter: _described(span, of_span(span)) for span in bucket.spans} for bucket in shards.buckets]
    of_ranks = _of_all_ranks(own, shards)
    for number, bucket in enumerate(shards.plan):
        places = dict(zip(bucket, shards.sharding.places(number), strict=True))
        wholes = {index: Whole(places[index]) for index in bucket}
        kinds: dict[str, Any] = {}  # dtypes of elements
        for of_rank in of_ranks:
            for index, (dtypes, values) in of_rank[number].items():
                wholes[index].values.update(values)
                wholes[index].elements.update(dict.fromkeys(dtypes))
                kinds.update(dtypes)
        for key in sorted(kinds):
            flat = shards.gather_now(number, kinds[key], lambda span, key=key: _elements(span, of_span(span), key))  # type: ignore[misc]
            for whole in wholes.values():
                if key in whole.elements:
                    whole.elements[key] = flat
        yield from ((index, whole) for index, whole in wholes.items() if whole.elements or whole.values)


def _elements(span: Span, state: State, key: str) -> Tensor | None:
    return value if is_of_elements(value := state.get(key), span.like) else None


def _of_all_ranks(own: Any, shards: Shards) -> list[Any]:
    """What each rank has. It travels as torch saves it, and may have objects of the classes that it has here."""
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

    def here(storage: Any, place: str) -> Any:
        return storage if place == "cpu" else torch.UntypedStorage(len(storage), device=content.device).copy_(storage)

    return torch.load(io.BytesIO(buffer), weights_only=True, map_location=here)


def _described(span: Span, state: State) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of what has a value for each element the dtype; everything else as it is."""
    dtypes = {key: value.real.dtype for key, value in state.items() if is_of_elements(value, span.like)}
    return dtypes, {key: value for key, value in state.items() if key not in dtypes}


def is_of_elements(value: Any, like: Tensor) -> bool:
    """Whether ``value`` has a value for each element of a span. A scalar says nothing of that, nor does a subclass."""
    return type(value) in (Tensor, nn.Parameter) and value.shape == like.shape and like.dim() > 0
