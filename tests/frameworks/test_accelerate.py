"""Hugging Face Accelerate over fastddp."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs
from accelerate.utils import DDPCommunicationHookType as Hook
from torch import nn
from torch.utils.data import DataLoader

import fastddp
from ranks import RankPool
from side_by_side import RESUMED, Network, Trained, data, resumed_elsewhere, same_training, without_buffers

SMALL_BUCKETS = {"bucket_cap_mb": 0.01}  # several buckets


@contextlib.contextmanager
def accelerator(*handlers: Any, cls: type[Accelerator] = Accelerator, **options: Any) -> Iterator[Accelerator]:
    """One whose state, which Accelerate keeps for a process, ends with the block."""
    try:
        yield cls(cpu=True, kwargs_handlers=list(handlers), **options)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def prepared(accelerator: Accelerator, model: nn.Module, loader: DataLoader, sharded: bool = False) -> tuple[Any, ...]:
    """The model under a DDP, its optimizer, this rank's share of the data, and a schedule.

    An optimizer that is sharded is made after the model has been wrapped, and is fastddp's: Accelerate does not take
    torch's.
    """
    if sharded:
        model, loader = accelerator.prepare(model, loader)
    optimizer = (
        fastddp.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
        if isinstance(model, fastddp.DistributedDataParallel)
        else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )
    others = optimizer, loader, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    return (model, *accelerator.prepare(*others)) if sharded else accelerator.prepare(model, *others)


def epoch(accelerator: Accelerator, model: nn.Module, optimizer: Any, loader: DataLoader, scheduler: Any) -> None:
    """The loop of Accelerate's own guide."""
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def plain(
    rank: int, arguments: dict[str, Any], options: dict[str, Any], unused_layer: bool = False, sharded: bool = False
) -> Trained:
    with accelerator(DistributedDataParallelKwargs(**arguments), **options) as here:
        assert here.num_processes == 2
        model, *others = prepared(here, Network(unused_layer), data(), sharded)
        for _ in range(2):
            epoch(here, model, *others)
        return Trained.of(model)


UNUSED, STATIC = {"find_unused_parameters": True}, {"static_graph": True}


@pytest.mark.parametrize(
    ("arguments", "options", "sharded", "windows"),
    [
        (SMALL_BUCKETS, {}, False, 8),
        ({"gradient_as_bucket_view": True}, {}, False, 8),
        (UNUSED, {}, False, 8),
        (STATIC, {}, False, 8),
        (SMALL_BUCKETS, {"mixed_precision": "bf16"}, False, 8),
        # Two in each epoch of four batches: after 2 and 4, or after 3 and 4.
        (SMALL_BUCKETS, {"gradient_accumulation_steps": 2}, False, 4),
        (SMALL_BUCKETS, {"gradient_accumulation_steps": 3}, False, 4),
        (UNUSED, {"gradient_accumulation_steps": 3}, False, 4),
        (SMALL_BUCKETS, {}, True, 8),
        (SMALL_BUCKETS, {"mixed_precision": "bf16"}, True, 8),
        (SMALL_BUCKETS, {"gradient_accumulation_steps": 3}, True, 4),
    ],
)
def test_training(
    ranks: RankPool, arguments: dict[str, Any], options: dict[str, Any], sharded: bool, windows: int
) -> None:
    # Sharded, the norm, by which gradients are clipped, has another order.
    given, rtol = (arguments, options, arguments in (UNUSED, STATIC), sharded), 1e-5 if sharded else 0.0
    for ours in same_training(ranks, plain, *given, rtol=rtol):
        assert ours.windows == windows


def late_synchronisation(rank: int) -> Trained:
    """Two forward passes under no_sync; the second backward is told to synchronise after all."""
    with accelerator(DistributedDataParallelKwargs(**SMALL_BUCKETS)) as here:
        model, optimizer, loader, _ = prepared(here, Network(), data())
        batches = [inputs for inputs, _ in loader]
        for first, second in zip(batches[::2], batches[1::2], strict=True):
            optimizer.zero_grad()
            with here.no_sync(model):
                losses = [model(inputs).square().mean() for inputs in (first, second)]
            here.backward(losses[0])
            local = model.module.layers[0].weight.grad.clone()
            with here.trigger_sync_in_backward(model):
                here.backward(losses[1])
            assert not torch.equal(local, model.module.layers[0].weight.grad)
            optimizer.step()
        return Trained.of(model)


def local_sgd(rank: int) -> Trained:
    """Ranks that step on their own and average parameters every third step."""
    with accelerator() as here:
        model, optimizer, loader, _ = prepared(here, Network(), data(48))
        with LocalSGD(here, model, local_sgd_steps=3) as averaging:
            for inputs, targets in loader:
                here.backward(nn.functional.cross_entropy(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
                averaging.step()
        return Trained.of(model)


@pytest.mark.parametrize("training", [late_synchronisation, local_sgd])
def test_synchronisation_that_users_decide_on(ranks: RankPool, training: Any) -> None:
    same_training(ranks, training)


class JoinsOnTheCpu(Accelerator):
    """Accelerate joins uneven inputs on accelerators only, so to say that there are some is all that it takes."""

    multi_device = False


def uneven(rank: int, of_accelerator: bool, of_context: bool | None) -> Trained:
    """Seven batches for two ranks, unless Accelerate makes them even, by the one setting or the other."""
    configuration = DataLoaderConfiguration(even_batches=of_accelerator)
    with accelerator(cls=JoinsOnTheCpu, dataloader_config=configuration) as here:
        model, optimizer, loader, _ = prepared(here, Network(), data(28))
        here.multi_device, batches = True, 0
        with here.join_uneven_inputs([model], even_batches=of_context):
            for inputs, targets in loader:
                here.backward(nn.functional.cross_entropy(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
                batches += 1
        return Trained.of(model, batches=batches)


@pytest.mark.parametrize(
    ("of_accelerator", "of_context", "batches"),
    [(True, None, [4, 4]), (False, None, [4, 3]), (True, False, [4, 3]), (False, True, [4, 4])],
)
def test_uneven_inputs(ranks: RankPool, of_accelerator: bool, of_context: bool | None, batches: list[int]) -> None:
    results = same_training(ranks, uneven, of_accelerator, of_context)
    assert [ours.others["batches"].item() for ours in results] == batches
    assert [ours.windows for ours in results] == [4, 4]


def hooked(rank: int, hook: Hook, wrapper: Hook) -> Trained:
    state = {} if hook is Hook.FP16 else {"matrix_approximation_rank": 4, "start_powerSGD_iter": 2}
    handler = DistributedDataParallelKwargs(comm_hook=hook, comm_wrapper=wrapper, comm_state_option=state)
    with accelerator(handler) as here:
        model, *others = prepared(here, without_buffers(), data(24, batch_size=1))
        epoch(here, model, *others)
        return Trained.of(model)


@pytest.mark.parametrize(
    ("hook", "wrapper", "exchange", "rtol"),
    [
        (Hook.FP16, Hook.NO, ("AllReduce", torch.float16), 1e-3),
        (Hook.POWER_SGD, Hook.NO, ("PowerSGD", None), 1e-5),
        # Torch's wrapper casts P and Q once more than needed, and so is the one that is off.
        (Hook.POWER_SGD, Hook.FP16, ("PowerSGD", torch.float16), 0.1),
    ],
)
def test_communication_hooks(
    ranks: RankPool, hook: Hook, wrapper: Hook, exchange: tuple[str, torch.dtype], rtol: float
) -> None:
    for ours in same_training(ranks, hooked, hook, wrapper, rtol=rtol):
        assert ours.exchange == exchange


def halves(rank: int, folder: Path, which: tuple[int, ...]) -> Trained:
    with accelerator() as here:
        model, *others = prepared(here, Network(), data())
        if which == (2,):
            here.load_state(str(folder))
        for _ in which:
            epoch(here, model, *others)
        if which == (1,):
            assert here.unwrap_model(model) is model.module
            assert list(here.get_state_dict(model)) == list(model.module.state_dict())
            here.save_state(str(folder))
        return Trained.of(model)


@RESUMED
def test_a_saved_state_goes_on_under_either_ddp(ranks: RankPool, save_under: str, load_under: str) -> None:
    assert ranks.run(resumed_elsewhere, 2, halves, save_under, load_under) == [[], []]
