"""Bit for bit what torch's DDP computes, over the product of the options that both have.

Two ranks add two numbers, which gives one result in any order. Random programs compare what more ranks do.
"""

# No `from __future__ import annotations` here: torch's DDP reads a hook's annotations, and refuses strings.
import itertools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import in_place
from models import MODELS, inputs
from nodes import by_reads
from on_ranks import BOTH, Wrap, differences, on_ranks
from releases import FORWARD_SYNC_BUFFERS


def largest_over_ranks(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Another collective, into another tensor than the bucket's, with work done after it."""
    work = dist.all_reduce(bucket.buffer().double(), dist.ReduceOp.MAX, async_op=True)
    return work.get_future().then(lambda future: future.value()[0].mul_(0.5).to(bucket.buffer().dtype))


def fp16_in_python(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Torch's hook where fastddp does not recognise it, and so does what torch does."""
    return default_hooks.fp16_compress_hook(None, bucket)


HOOKS: dict[str, Callable[[object, dist.GradBucket], torch.futures.Future[Tensor]] | None] = {
    "no hook": None,
    "allreduce_hook": default_hooks.allreduce_hook,
    "fp16 in Python": fp16_in_python,
    "largest_over_ranks": largest_over_ranks,
}

VIEWS = [{"gradient_as_bucket_view": view} for view in (False, True)]
BUCKETS: list[dict[str, Any]] = [{}, {"bucket_cap_mb": 1e-4}, {"bucket_cap_mb_list": [1e-4, 4e-4]}]
BUFFERS = [{}, {FORWARD_SYNC_BUFFERS: False}]
INIT_SYNC = [{"init_sync": True}, {"init_sync": False}]
ZERO_GRAD = ["to none", "to zero", "never"]
SYNCS = [(True, True, True, True), (False, True, False, True), (True, False, False, True)]  # by backward
# Options, how gradients are zeroed, and which backwards synchronise.
Combination = tuple[dict[str, Any], str, tuple[bool, ...]]
HOW_GRADIENTS_TRAVEL: list[Combination] = [
    (view | buckets, *rest) for view, buckets, *rest in itertools.product(VIEWS, BUCKETS, ZERO_GRAD, SYNCS)
]
WHATEVER_START: list[Combination] = [
    (view | buffers | init_sync, "to none", syncs)
    for view, buffers, init_sync, syncs in itertools.product(VIEWS, BUFFERS, INIT_SYNC, SYNCS)
]


def train(wrap: Wrap, rank: int, name: str, hook: str, combination: Combination) -> dict[str, Tensor | None]:
    """Gradients after each backward, parameters and buffers after all."""
    options, zero_grad, syncs = combination
    torch.manual_seed(rank)
    module = MODELS[name]()
    for buffer in module.buffers():
        buffer += rank
    model = wrap(module, **options)
    if HOOKS[hook] is not None:
        model.register_comm_hook(None, HOOKS[hook])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    found: dict[str, Tensor | None] = {}
    for step, sync in enumerate(syncs):
        with nullcontext() if sync else model.no_sync():
            model(inputs(name, rank, step)).square().mean().backward()
        for key, parameter in module.named_parameters():
            found[f"gradient of {key} in step {step}"] = None if parameter.grad is None else parameter.grad.clone()
        if sync:
            optimizer.step()
        if sync and zero_grad != "never":
            optimizer.zero_grad(set_to_none=zero_grad == "to none")
    return found | module.state_dict()


def assert_same(rank: int, name: str, hook: str, combinations: list[Combination]) -> None:
    warnings.filterwarnings("ignore", "Grad strides do not match")
    warnings.filterwarnings("ignore", category=FutureWarning)  # broadcast_buffers is deprecated
    for combination in combinations:
        theirs, ours = (train(wrap, rank, name, hook, combination) for wrap in map(in_place.wrap, BOTH))
        assert len(ours) > 20
        assert differences(theirs, ours) == [], combination


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("read", [False, True], ids=["allreduce", "reads"])
@on_ranks(2)
def test_every_bit_is_torchs_for_a_part_of_all_combinations(rank: int, read: bool, name: str) -> None:
    """A quarter, another one for each model; and an eighth where ranks read each other's gradients."""
    with by_reads() if read else nullcontext():
        assert_same(rank, name, "no hook", HOW_GRADIENTS_TRAVEL[list(MODELS).index(name) :: 8 if read else 4])


@pytest.mark.tier("nightly")
@pytest.mark.parametrize(
    ("name", "hook", "combinations"),
    [
        *((name, hook, HOW_GRADIENTS_TRAVEL) for name in MODELS for hook in HOOKS),
        *((name, "no hook", WHATEVER_START) for name in MODELS),
    ],
)
@on_ranks(2)
def test_every_bit_is_torchs(rank: int, name: str, hook: str, combinations: list[Combination]) -> None:
    assert_same(rank, name, hook, combinations)
