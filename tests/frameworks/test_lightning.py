"""Lightning's Fabric and Trainer over fastddp."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader

import fastddp
from ranks import RankPool
from side_by_side import RESUMED, Network, Trained, data, resumed_elsewhere, same_training, without_buffers

SMALL_BUCKETS = {"bucket_cap_mb": 0.01}
VIEWS, LOCAL_BUFFERS = {"gradient_as_bucket_view": True}, {"broadcast_buffers": False}
UNUSED, STATIC = {"find_unused_parameters": True}, {"static_graph": True}


def fabric(model: nn.Module, sharded: bool = False, **options: Any) -> tuple[Fabric, Any, Any]:
    here = Fabric(accelerator="cpu", devices=2, strategy=FabricDDPStrategy(**options))
    here.launch()
    assert here.world_size == 2
    if not sharded:
        return here, *here.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    wrapped: Any = here.setup_module(model)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    is_ours = isinstance(wrapped._forward_module, fastddp.DistributedDataParallel)
    assert isinstance(optimizer, fastddp.ShardedOptimizer) is is_ours
    return here, wrapped, here.setup_optimizers(optimizer)


def with_fabric(
    rank: int, options: dict[str, Any], accumulate: int, unused_layer: bool = False, sharded: bool = False
) -> Trained:
    here, model, optimizer = fabric(Network(unused_layer), sharded, **options)
    for index, (inputs, targets) in enumerate(here.setup_dataloaders(data(48))):
        accumulating = (index + 1) % accumulate != 0
        with here.no_backward_sync(model, enabled=accumulating):
            here.backward(nn.functional.cross_entropy(model(inputs), targets))
        if not accumulating:
            here.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    return Trained.of(model._forward_module)


@pytest.mark.parametrize(
    ("options", "accumulate", "unused_layer"),
    [
        *((options, accumulate, False) for options in (SMALL_BUCKETS, VIEWS, LOCAL_BUFFERS) for accumulate in (1, 3)),
        (UNUSED, 1, True),
        (UNUSED, 3, True),
        (STATIC, 1, True),  # torch's DDP has no accumulation from the first step on under static_graph
    ],
)
def test_fabric(ranks: RankPool, options: dict[str, Any], accumulate: int, unused_layer: bool) -> None:
    for ours in same_training(ranks, with_fabric, options, accumulate, unused_layer):
        assert ours.windows == 6 // accumulate


def test_fabric_with_a_sharded_optimizer(ranks: RankPool) -> None:
    same_training(ranks, with_fabric, SMALL_BUCKETS, 1, False, True, rtol=1e-5)


class Classifier(LightningModule):
    """Remembers the wrapper, which the Trainer takes away at the end."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers
        self.trained: Trained | None = None

    def training_step(self, batch: list[Tensor], index: int) -> Tensor | None:
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.layers(inputs), targets)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]

    def on_train_end(self) -> None:
        self.trained = Trained.of(self.trainer.strategy.model, loss=self.trainer.callback_metrics["loss"].item())


class Sharded(Classifier):
    """With torch's optimizer that is sharded. The Trainer has wrapped the module when it asks for the optimizer."""

    def configure_optimizers(self) -> Any:
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)

    def on_train_end(self) -> None:
        super().on_train_end()
        is_ours = isinstance(self.trainer.strategy.model, fastddp.DistributedDataParallel)
        assert isinstance(self.trainer.optimizers[0], fastddp.ShardedOptimizer) is is_ours


class ByHand(Classifier):
    """Manual optimisation: two backward passes a step, each of which synchronises."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer = self.optimizers()
        inputs, targets = batch
        optimizer.zero_grad()
        outputs = self.layers(inputs)
        first = nn.functional.cross_entropy(outputs, targets)
        self.manual_backward(first, retain_graph=True)
        self.manual_backward(outputs.square().mean())
        optimizer.step()
        self.log("loss", first, sync_dist=True)


def fit(
    model: Classifier,
    strategy: DDPStrategy,
    loader: DataLoader | None = None,
    resume_from: Path | None = None,
    **more: Any,
) -> Trained:
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    given: dict[str, Any] = {"max_epochs": 2, **dict.fromkeys(quiet, False), **more}
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, plugins=[LightningEnvironment()], **given)
    assert trainer.world_size == 2
    trainer.fit(model, loader or data(48), ckpt_path=resume_from)
    assert model.trained is not None
    return model.trained


def with_trainer(
    rank: int, kind: type[Classifier], options: dict[str, Any], arguments: dict[str, Any], unused_layer: bool
) -> Trained:
    return fit(kind(Network(unused_layer)), DDPStrategy(**options), **arguments)


@pytest.mark.parametrize(
    ("kind", "options", "arguments", "windows"),
    [
        (Classifier, SMALL_BUCKETS, {}, 12),  # two epochs of six batches
        (Classifier, VIEWS, {}, 12),
        (Classifier, LOCAL_BUFFERS, {}, 12),
        (Classifier, SMALL_BUCKETS, {"accumulate_grad_batches": 2}, 6),
        (Classifier, SMALL_BUCKETS, {"accumulate_grad_batches": 4, "gradient_clip_val": 0.1}, 4),
        (Classifier, SMALL_BUCKETS, {"precision": "bf16-mixed"}, 12),
        (Classifier, SMALL_BUCKETS, {"precision": "64-true"}, 12),
        (Classifier, UNUSED, {}, 12),
        (Classifier, UNUSED, {"accumulate_grad_batches": 3}, 4),
        (Classifier, STATIC, {}, 12),
        (Sharded, SMALL_BUCKETS, {}, 12),
        (Sharded, SMALL_BUCKETS, {"accumulate_grad_batches": 4}, 4),
        (Sharded, SMALL_BUCKETS, {"gradient_clip_val": 0.1}, 12),
        (Sharded, SMALL_BUCKETS, {"precision": "bf16-mixed"}, 12),
        (ByHand, SMALL_BUCKETS, {}, 24),  # two in each of twelve steps
        (ByHand, UNUSED, {}, None),
        (ByHand, STATIC, {}, None),
    ],
    ids=str,
)
def test_trainer(
    ranks: RankPool, kind: Any, options: dict[str, Any], arguments: dict[str, Any], windows: int | None
) -> None:
    unused_layer = kind is Classifier and options in (UNUSED, STATIC)
    rtol = 1e-5 if kind is Sharded and "gradient_clip_val" in arguments else 0.0  # a norm has another order
    for ours in same_training(ranks, with_trainer, kind, options, arguments, unused_layer, rtol=rtol):
        assert windows in (None, ours.windows)


class WithHookOnTheCpu(DDPStrategy):
    """Lightning registers the hooks that it is given on GPUs only."""

    def _register_ddp_hooks(self) -> None:
        _register_ddp_comm_hook(self.model, self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper)


def hooked(rank: int, name: str) -> Trained:
    if name == "fp16":
        strategy = WithHookOnTheCpu(ddp_comm_hook=default_hooks.fp16_compress_hook)
    else:  # by the names that they have in torch's modules now
        strategy = WithHookOnTheCpu(
            ddp_comm_state=powerSGD_hook.PowerSGDState(None, 4, start_powerSGD_iter=2),
            ddp_comm_hook=powerSGD_hook.powerSGD_hook,
            ddp_comm_wrapper=default_hooks.fp16_compress_wrapper if name == "PowerSGD in fp16" else None,
        )
    return fit(Classifier(without_buffers()), strategy, data(12, batch_size=1))


@pytest.mark.parametrize(
    ("hook", "exchange", "rtol"),
    [
        ("fp16", ("AllReduce", torch.float16), 1e-3),
        ("PowerSGD", ("PowerSGD", None), 1e-5),
        # Torch's wrapper casts P and Q once more than needed, and so is the one that is off.
        ("PowerSGD in fp16", ("PowerSGD", torch.float16), 0.1),
    ],
)
def test_communication_hooks(ranks: RankPool, hook: str, exchange: tuple[str, torch.dtype], rtol: float) -> None:
    for ours in same_training(ranks, hooked, hook, rtol=rtol):
        assert ours.exchange == exchange


def fabric_halves(rank: int, folder: Path, which: tuple[int, ...]) -> Trained:
    here, model, optimizer = fabric(Network())
    if which == (2,):
        here.load(folder / "state.pt", {"model": model, "optimizer": optimizer})
    for _ in which:
        for inputs, targets in here.setup_dataloaders(data(16)):
            here.backward(nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    if which == (1,):
        here.save(folder / "state.pt", {"model": model, "optimizer": optimizer})
    return Trained.of(model._forward_module)


class SaveAtTheEnd(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def trainer_halves(rank: int, folder: Path, which: tuple[int, ...], kind: type[Classifier] = Classifier) -> Trained:
    last = folder / "last.ckpt"
    callbacks = [SaveAtTheEnd(last)] if which == (1,) else []
    resume_from = last if which == (2,) else None
    return fit(kind(Network()), DDPStrategy(), resume_from=resume_from, max_epochs=max(which), callbacks=callbacks)


@RESUMED
@pytest.mark.parametrize("halves", [fabric_halves, trainer_halves, partial(trainer_halves, kind=Sharded)])
def test_a_checkpoint_goes_on_under_either_ddp(ranks: RankPool, halves: Any, save_under: str, load_under: str) -> None:
    assert ranks.run(resumed_elsewhere, 2, halves, save_under, load_under) == [[], []]
