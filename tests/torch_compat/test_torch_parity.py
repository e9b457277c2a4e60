"""Bit for bit what torch's DDP computes, over the product of the options that both have.

Two ranks add two numbers, which gives one result in any order: every model is compared. Four ranks may add in another
order where buckets differ, so there the gradients are dyadic rationals, whose sums are exact.
"""

# No `from __future__ import annotations` here: torch's DDP reads a hook's annotations, and refuses strings.
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fastddp
from models import MODELS, inputs
from program_models import Linear
from programs import ParameterSpec, Program
from ranks import RankPool
from releases import torch_takes

# --------------------------------------------------------------------------------------------------------- the axes

GRADIENT_AS_BUCKET_VIEW = [False, True]
BUCKET_CAPS = [{}, {"bucket_cap_mb": 1e-4}, {"bucket_cap_mb_list": [1e-4, 4e-4]}]
BUFFERS = [o for o in ({}, {"broadcast_buffers": False}, {"forward_sync_buffers": False}) if torch_takes(o)]
INIT_SYNC = [True, False]
ZERO_GRAD = ["to none", "to zero", "never"]
SYNCS = [(True, True, True, True), (False, True, False, True), (True, False, False, True)]  # by backward
OPTIMIZERS = ["SGD", "Adam"]


def keep_local(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """No collective at all."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def largest_over_ranks(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Another collective, into another tensor than the bucket's, with work done after it."""
    work = dist.all_reduce(bucket.buffer().double(), dist.ReduceOp.MAX, async_op=True)
    return work.get_future().then(lambda future: future.value()[0].mul_(0.5).to(bucket.buffer().dtype))


def fp16_in_python(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Torch's hook where fastddp does not recognise it, and so does what torch does."""
    return default_hooks.fp16_compress_hook(None, bucket)


SLOW = pytest.mark.tier("nightly")
HOOKS: dict[str, Callable[[object, dist.GradBucket], torch.futures.Future[Tensor]] | None] = {
    "no hook": None,
    "allreduce_hook": default_hooks.allreduce_hook,
    "fp16 in Python": fp16_in_python,
    "keep_local": keep_local,
    "largest_over_ranks": largest_over_ranks,
}

DYADIC = Program(
    parameters=(
        ParameterSpec((40, 3)),
        ParameterSpec((4, 3, 2, 2), layout="channels_last", shared=True),
        ParameterSpec((2, 3), "float16", layout="reversed"),
        ParameterSpec((), "bfloat16"),
        ParameterSpec((5,), frozen=True),
        ParameterSpec((6, 2), "complex64"),
        ParameterSpec((7,), "float64"),
        ParameterSpec((3, 4), layout="gaps"),
        ParameterSpec((300, 40)),
    ),
    order=(3, 0, 8, 1, 7, 2, 6, 5, 4),
    rotated=True,
)


@dataclass(frozen=True)
class Combination:
    """One point of a product of axes."""

    options: dict[str, object]
    zero_grad: str
    syncs: tuple[bool, ...]
    optimizer: str


def how_gradients_travel() -> list[Combination]:
    axes = itertools.product(GRADIENT_AS_BUCKET_VIEW, BUCKET_CAPS, ZERO_GRAD, SYNCS)
    return [
        Combination({"gradient_as_bucket_view": view, **caps}, zero, syncs, "SGD") for view, caps, zero, syncs in axes
    ]


def what_is_equal_at_the_start() -> list[Combination]:
    axes = itertools.product(GRADIENT_AS_BUCKET_VIEW, BUFFERS, INIT_SYNC, SYNCS, OPTIMIZERS)
    return [
        Combination(
            {"gradient_as_bucket_view": view, "init_sync": init_sync, **buffers}, ZERO_GRAD[0], syncs, optimizer
        )
        for view, buffers, init_sync, syncs, optimizer in axes
    ]


# ------------------------------------------------------------------------------------------------- what ranks execute


def train(
    wrapper: type[TorchDDP], name: str, hook: str, combination: Combination, rank: int
) -> Iterator[tuple[str, Tensor | None]]:
    """Everything that can be compared, with a name: gradients after each backward, parameters and buffers after all."""
    torch.manual_seed(rank)
    module = Linear(DYADIC, rank, "cpu") if name == "dyadic" else MODELS[name]()
    for buffer in module.buffers():
        buffer += rank
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # broadcast_buffers is deprecated
        model = wrapper(module, **combination.options)  # type: ignore[arg-type]
    if HOOKS[hook] is not None:
        model.register_comm_hook(None, HOOKS[hook])  # type: ignore[arg-type]
    optimizer = getattr(torch.optim, combination.optimizer)(model.parameters(), lr=0.125)
    for step, syncs in enumerate(combination.syncs):
        with nullcontext() if syncs else model.no_sync():
            loss = model(step) if name == "dyadic" else model(inputs(name, rank, step)).square().mean()
        loss.backward()
        for parameter_name, parameter in module.named_parameters():
            gradient = None if parameter.grad is None else parameter.grad.clone()
            yield f"gradient of {parameter_name} after backward {step}", gradient
        if syncs:
            optimizer.step()
        if syncs and combination.zero_grad != "never":
            optimizer.zero_grad(set_to_none=combination.zero_grad == "to none")
    yield from module.state_dict().items()


def compare(rank: int, name: str, hook: str, combinations: list[Combination]) -> tuple[list[str], int]:
    """What differs, and how many tensors were compared."""
    warnings.filterwarnings("ignore", "Grad strides do not match")
    found, compared = [], 0
    for combination in combinations:
        ours = train(fastddp.DistributedDataParallel, name, hook, combination, rank)
        torchs = train(TorchDDP, name, hook, combination, rank)
        pairs = list(zip(list(ours), list(torchs), strict=True))
        differing = [our_name for (our_name, our), (_, torch_) in pairs if not identical(our, torch_)]
        compared += len(pairs)
        if differing:
            found.append(f"{combination}: {len(differing)} of {len(pairs)} tensors, first {differing[0]}")
    return found, compared


def identical(a: Tensor | None, b: Tensor | None) -> bool:
    """Bit for bit: a zero's sign and a NaN's payload included."""
    if a is None or b is None:
        return a is b
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    a, b = (tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in (a, b))
    return torch.equal(a, b)


# ------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("hook", [hook if hook == "no hook" else pytest.param(hook, marks=SLOW) for hook in HOOKS])
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_get_torchs_gradients_however_these_travel(ranks: RankPool, name: str, hook: str) -> None:
    combinations = how_gradients_travel()
    for found, compared in ranks.run(compare, 2, name, hook, combinations):
        assert found == []
        assert compared > 20 * len(combinations)


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_get_torchs_parameters_and_buffers_from_whatever_start(ranks: RankPool, name: str) -> None:
    assert [found for found, _ in ranks.run(compare, 2, name, "no hook", what_is_equal_at_the_start())] == [[], []]


@pytest.mark.tier("slow", but_one_in=2)
@pytest.mark.parametrize(
    "hook", ["no hook", *(pytest.param(hook, marks=SLOW) for hook in ["allreduce_hook", "keep_local"])]
)
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=SLOW)])
def test_gradients_that_are_exact_are_torchs_on_more_ranks(ranks: RankPool, world_size: int, hook: str) -> None:
    results = ranks.run(compare, world_size, "dyadic", hook, how_gradients_travel())
    assert [found for found, _ in results] == [[]] * world_size
