"""Another group of ranks for a model: what its ranks agree on, once, and what the newest of them hands to the rest.

Note [A generation]

A model trains in one *generation* of its ranks after another. An engine lives for one generation. The engine before has
left without a wait for anybody (``Engine.leave``). What it has learned goes to the next one, and nothing else changes
inside of it.

All ranks of the new group, those that join too, make one all-gather: a digest of model and options, as at construction,
and some numbers. Ranks whose digests differ are named, on all ranks. The *source* is the rank with the most windows
among those that were in the most generations. It hands its windows, buckets, sampling and what a hook's state has alike
on all ranks to the others, where these differ. What a rank has of its own, as errors of compression, stays; a rank that
joins begins without.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fastddp._C import Expect, Lost
from fastddp.engine import Carried, Recipe
from fastddp.errors import see
from fastddp.exchange.descriptions import name_of
from fastddp.module.backward import is_inside_backward
from fastddp.module.numbering import ModelNumber, next_number, take_number
from fastddp.module.parameters import replicated_tensors
from fastddp.module.replicas import broadcast_replicas, numbers_of, verify_replicas
from fastddp.ranks.generations import begin_generation, this_process
from fastddp.ranks.groups import destroy_parts
from fastddp.ranks.hierarchy import describe_hierarchy
from fastddp.ranks.together import models

_log = logging.getLogger("fastddp")

Names = Callable[[list[int]], str]
"""Says ranks in words."""

_SAY_HOW = ("accumulate", "start_localSGD_iter")  # of CompressState, PostLocalSGDState
_EXPECTED = {Expect.all: "neither", Expect.as_last: "find_unused_parameters", Expect.as_first: "static_graph"}


class Remembers(Protocol):
    """A hook's state that outlives a group: those of 8 bits and of PowerSGD."""

    settings: list[str]
    hand_out: Callable[[], tuple[dict[str, Any], dict[str, Tensor]]]
    take_over: Callable[..., None]


def options_of(recipe: Recipe) -> list[str]:
    """The options that decide which collectives a step has, a text each, for ranks to compare."""
    config, watch, average = recipe.config, recipe.watch, recipe.gradient_average
    return [
        describe_hierarchy(recipe.hierarchy),
        f"bucket_cap_mb={'auto' if config.plans_buckets else [cap / 2**20 for cap in config.bucket_caps]}",
        f"find_unused_parameters or static_graph: {_EXPECTED[config.expect]}",
        f"gradient_average={average!r}" if isinstance(average, str) else "gradient_average=a weight",
        f"forward_sync_buffers={config.forward_sync_buffers}",
        f"main_grads={config.main_grads!r}",
        f"wire_memory={config.wire_memory!r}",
        f"mixed_precision, with gradients in {recipe.wire}" if recipe.wire else "no mixed_precision",
        f"watch=Watch(corruption={'given' if watch.corruption else None}, audit_every={watch.audit_every})",
    ]


def check_may_regroup(
    recipe: Recipe, hook: tuple[object, object] | None, before: dist.ProcessGroup, *, stays: bool
) -> None:
    """Raise unless a model may leave the group ``before``; ``stays``: it may come back to the object.

    Raises:
        RuntimeError: a backward is running.
        ValueError: the hook's state names the group, or the hierarchy has ranks of its own.
    """
    if is_inside_backward():
        raise RuntimeError("regroup() comes between two steps, and a backward is running." + see("FD014"))
    if isinstance(recipe.hierarchy, DeviceMesh):
        raise ValueError(
            "hierarchy is a mesh of the ranks that the model leaves. Wrap the module again, with a mesh of the other "
            'ranks; or use hierarchy="node".' + see("FD028")
        )
    state = None if hook is None else hook[0]
    if not stays and before in (state, *getattr(state, "__dict__", {}).values()):
        raise ValueError(
            "The communication hook's state names the process group that the model leaves. Give the state no group: it "
            "then means the model's." + see("FD034")
        )


def change_groups(before: dist.ProcessGroup, group: dist.ProcessGroup) -> None:
    """A model has left the group ``before`` for this one: forget what was made of the one, or is known of the other."""
    if not any(now.process_group is before for now in models):
        destroy_parts(before)
    begin_generation(group)


@dataclass(frozen=True)
class Agreed:
    """What ranks have agreed on."""

    number: ModelNumber
    carried: Carried
    without_state: bool
    """A rank had state of a sharded optimizer, of which no rank has all."""


class _Said(NamedTuple):
    """What a rank says beside its description. The newest is the greatest."""

    generation: int
    windows: int
    model: int  # its proposal of a number for the model
    process: int
    bytes: int  # of what it would hand out
    digest: int  # of that
    has_sharded_state: int


def agree(
    recipe: Recipe,
    group: dist.ProcessGroup,
    device: torch.device,
    number: ModelNumber,
    carried: Carried,
    hook: tuple[object, Callable[..., Any]] | None,
    state: Remembers | None,
    sharded: tuple[list[str], bool],
) -> Agreed:
    """Agree with the other ranks of ``group``; a collective. ``number``, ``carried``, ``state``: of this rank before.

    Args:
        recipe: the model.
        group: its ranks from now on.
        device: where tensors must live for the group's collectives.
        number: the model's before.
        carried: what its engine has left.
        hook: its communication hook, with the state that it was registered with.
        state: what the hook remembers, if that outlives a group.
        sharded: settings of a sharded optimizer, and whether it has state.

    Raises:
        RanksDiffer: ranks have different models or options. Nothing has been changed.
    """
    handed, tensors = ({}, {}) if state is None else state.hand_out()
    outline = {name: [list(tensor.shape), str(tensor.dtype)] for name, tensor in tensors.items()}
    left = dataclasses.asdict(carried)
    own = left.pop("own")
    blob = json.dumps([left, handed, outline, number.members]).encode()
    digest = int.from_bytes(hashlib.sha256(blob).digest()[:8], "little", signed=True)
    told = verify_replicas(
        replicated_tensors(recipe.module, recipe.ignored, recipe.config.init_sync_buffers),
        group,
        device,
        recipe.pinned_plan.rows,
        [*options_of(recipe), _in_words(hook), *([] if state is None else state.settings), *sharded[0]],
        numbers=_Said(
            number.generation, carried.learned[0], next_number(group), this_process(), len(blob), digest, sharded[1]
        ),
        choose_source=_newest,
    )
    source, said = _newest(told), [_Said(*row) for row in told]
    newest = said[source]
    if len({rank.digest for rank in said}) > 1:
        blob = bytes(numbers_of(source, [*blob.ljust(newest.bytes)[: newest.bytes]], group, device))
    left, handed, outline, members = json.loads(blob)
    if state is not None:
        tensors = {
            name: _like(tensors.get(name), shape, getattr(torch, dtype.removeprefix("torch.")), device)
            for name, (shape, dtype) in outline.items()
        }
        broadcast_replicas(tensors.values(), group, source)
        was_there = this_process() in members if members else number.generation == newest.generation
        state.take_over(handed, tensors, is_new=not was_there)
    taken = take_number(
        group,
        max(rank.model for rank in said),
        True,
        generation=newest.generation + 1,
        members=tuple(rank.process for rank in said),
    )
    return Agreed(taken, Carried(**left, own=own), any(rank.has_sharded_state for rank in said))


def _in_words(hook: tuple[object, Callable[..., Any]] | None) -> str:
    """Its name, and what a state without ``settings`` says of collectives."""
    if hook is None:
        return "communication hook: None"
    said = {name: getattr(hook[0], name, None) for name in _SAY_HOW}
    how = "".join(f", {name}={value!r}" for name, value in said.items() if value is not None)
    return f"communication hook: {name_of(hook[1])}{how}"


def _newest(told: list[list[int]]) -> int:
    return max(range(len(told)), key=lambda rank: (told[rank][:2], -rank))


def _like(known: Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    if known is not None and known.shape == torch.Size(shape) and known.dtype == dtype:
        return known
    return torch.zeros(list(shape), dtype=dtype, device=device)


def tell(before: ModelNumber, now: ModelNumber, lost: Lost | None, names: tuple[Names, Names]) -> None:
    """Say which ranks have left and joined, by their ``names`` before and now."""
    left = [rank for rank, member in enumerate(before.members) if member not in now.members]
    joined = [rank for rank, member in enumerate(now.members) if member not in before.members]
    said = []
    if left:
        why = "" if lost is None else f" ({_in_short(lost.what)}) in step {lost.window + 1}"
        why += "" if lost is None or lost.bucket is None else f", bucket {lost.bucket}"
        said.append(f"{names[0](left)} left{why}")
    if joined:
        said.append(f"{names[1](joined)} joined")
    if not said:
        return
    said.append(f"{len(before.members)} → {len(now.members)} ranks")
    _log.warning("%s, generation %d.", "; ".join(said), now.generation)


def _in_short(what: str) -> str:
    """An error's first sentence, without the places where gloo and torch say that it was raised.

    >>> _in_short("[/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:80. This is typical.")
    'Connection closed by peer'
    """
    return re.split(r" \[|\. ", re.sub(r"^\[[^\]]*\] ", "", what))[0].rstrip(".")
