"""Lightning's Fabric and Trainer over fastddp."""

from __future__ import annotations

from collections.abc import Iterable
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
from torch.distributed.algorithms.join import Join
from torch.utils.data import DataLoader

from ranks import RankPool
from side_by_side import (
    RESUMED,
    Network,
    Trained,
    data,
    resumed_elsewhere,
    same_training,
    without_buffers,
)

OPTIONS = pytest.mark.parametrize(
    "options", [{"bucket_cap_mb": 0.01}, {"gradient_as_bucket_view": True}, {"broadcast_buffers": False}], ids=str
)
# Torch's DDP has no accumulation from the first step on under static_graph.
WITH_AN_UNUSED_LAYER = pytest.mark.parametrize(
    ("option", "accumulate"), [("find_unused_parameters", 1), ("find_unused_parameters", 3), ("static_graph", 1)]
)


# -------------------------------------------------------------------------------------------------------------- Fabric


def fabric(model: nn.Module, **options: Any) -> tuple[Fabric, Any, torch.optim.Optimizer]:
    """Fabric, and what it makes of the model and of an optimizer."""
    here = Fabric(accelerator="cpu", devices=2, strategy=FabricDDPStrategy(**options))
    here.launch()
    assert here.world_size == 2
    return here, *here.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def epoch(here: Fabric, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> None:
    for inputs, targets in batches:
        here.backward(nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()


def with_fabric(rank: int, options: dict[str, Any], accumulate: int = 1, unused_layer: bool = False) -> Trained:
    here, model, optimizer = fabric(Network(unused_layer), **options)
    for index, (inputs, targets) in enumerate(here.setup_dataloaders(data(48))):
        accumulating = (index + 1) % accumulate != 0
        with here.no_backward_sync(model, enabled=accumulating):
            here.backward(nn.functional.cross_entropy(model(inputs), targets))
        if not accumulating:
            here.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    return Trained.of(model._forward_module)


@OPTIONS
def test_fabric(ranks: RankPool, options: dict[str, Any]) -> None:
    for accumulate in (1, 3):
        for ours in same_training(ranks, with_fabric, options, accumulate):
            assert ours.windows == 6 // accumulate


@WITH_AN_UNUSED_LAYER
def test_fabric_with_an_unused_layer(ranks: RankPool, option: str, accumulate: int) -> None:
    same_training(ranks, with_fabric, {option: True}, accumulate, True)


HOOKS = pytest.mark.parametrize(
    ("hook", "exchange", "rtol"),
    [
        ("fp16", ("AllReduce", torch.float16), 1e-3),
        ("PowerSGD", ("PowerSGD", None), 1e-5),
        # Torch's wrapper casts P and Q once more than needed, and so is the one that is off.
        ("PowerSGD in fp16", ("PowerSGD", torch.float16), 0.1),
    ],
)


def torchs_hook(name: str) -> tuple[Any, Any, Any]:
    """State, hook and wrapper, by the names that they have in torch's modules now."""
    if name == "fp16":
        return None, default_hooks.fp16_compress_hook, None
    wrapper = default_hooks.fp16_compress_wrapper if name == "PowerSGD in fp16" else None
    return powerSGD_hook.PowerSGDState(None, 4, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook, wrapper


def fabric_with_hook(rank: int, name: str) -> Trained:
    """Fabric's strategy has no argument for a hook: it is registered with what Fabric has wrapped."""
    here, model, optimizer = fabric(without_buffers())
    state, hook, wrapper = torchs_hook(name)
    model._forward_module.register_comm_hook(state, hook if wrapper is None else wrapper(hook))
    epoch(here, model, optimizer, here.setup_dataloaders(data(24, batch_size=1)))
    return Trained.of(model._forward_module)


@HOOKS
def test_fabric_with_communication_hooks(
    ranks: RankPool, hook: str, exchange: tuple[str, torch.dtype], rtol: float
) -> None:
    for ours in same_training(ranks, fabric_with_hook, hook, rtol=rtol):
        assert ours.exchange == exchange


def fabric_with_uneven_inputs(rank: int, batches: tuple[int, int], join: dict[str, Any]) -> Trained:
    """Lightning has nothing for uneven inputs: torch's Join goes around what Fabric has wrapped."""
    here, model, optimizer = fabric(Network(), bucket_cap_mb=0.01)
    for _ in range(2):
        with Join([model._forward_module], **join):
            epoch(here, model, optimizer, list(here.setup_dataloaders(data(48)))[: batches[rank]])
    return Trained.of(model._forward_module)


@pytest.mark.parametrize(("batches", "join"), [((2, 5), {}), ((5, 2), {"divide_by_initial_world_size": False})])
def test_fabric_with_uneven_inputs(ranks: RankPool, batches: tuple[int, int], join: dict[str, Any]) -> None:
    for ours in same_training(ranks, fabric_with_uneven_inputs, batches, join):
        assert ours.windows == 10


def fabric_halves(rank: int, folder: Path, which: tuple[int, ...]) -> Trained:
    here, model, optimizer = fabric(Network())
    if which == (2,):
        here.load(folder / "state.pt", {"model": model, "optimizer": optimizer})
    for _ in which:
        epoch(here, model, optimizer, here.setup_dataloaders(data(16)))
    if which == (1,):
        here.save(folder / "state.pt", {"model": model, "optimizer": optimizer})
    return Trained.of(model._forward_module)


@RESUMED
def test_a_fabric_state_goes_on_under_either_ddp(ranks: RankPool, save_under: str, load_under: str) -> None:
    assert ranks.run(resumed_elsewhere, 2, fabric_halves, save_under, load_under) == [[], []]


# ------------------------------------------------------------------------------------------------------------- Trainer


class Classifier(LightningModule):
    """Remembers the wrapper, which the Trainer takes away at the end."""

    def __init__(self, layers: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = Network() if layers is None else layers
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


class ByHand(Classifier):
    """Manual optimisation: two backward passes a step, each of which synchronises."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

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
    **arguments: Any,
) -> Trained:
    given: dict[str, Any] = {
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **arguments,
    }
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, plugins=[LightningEnvironment()], **given)
    assert trainer.world_size == 2
    trainer.fit(model, loader or data(48), ckpt_path=resume_from)
    assert model.trained is not None
    return model.trained


def with_trainer(rank: int, options: dict[str, Any], arguments: dict[str, Any], unused_layer: bool = False) -> Trained:
    return fit(Classifier(Network(unused_layer)), DDPStrategy(**options), **arguments)


@OPTIONS
def test_trainer(ranks: RankPool, options: dict[str, Any]) -> None:
    same_training(ranks, with_trainer, options, {})


@pytest.mark.parametrize(
    ("arguments", "windows"),
    [
        ({"accumulate_grad_batches": 2}, 6),  # two epochs of six batches
        ({"accumulate_grad_batches": 4, "gradient_clip_val": 0.1}, 4),
        ({"precision": "bf16-mixed"}, 12),
        ({"precision": "64-true"}, 12),
    ],
    ids=str,
)
def test_trainer_with(ranks: RankPool, arguments: dict[str, Any], windows: int) -> None:
    for ours in same_training(ranks, with_trainer, {"bucket_cap_mb": 0.01}, arguments):
        assert ours.windows == windows


@WITH_AN_UNUSED_LAYER
def test_trainer_with_an_unused_layer(ranks: RankPool, option: str, accumulate: int) -> None:
    same_training(ranks, with_trainer, {option: True}, {"accumulate_grad_batches": accumulate}, True)


def by_hand(rank: int, options: dict[str, Any]) -> Trained:
    return fit(ByHand(), DDPStrategy(**options))


@pytest.mark.parametrize(
    "options", [{"bucket_cap_mb": 0.01}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str
)
def test_manual_optimisation(ranks: RankPool, options: dict[str, Any]) -> None:
    for ours in same_training(ranks, by_hand, options):
        assert ours.windows == 24 or "bucket_cap_mb" not in options  # two in each of twelve steps


class WithHookOnTheCpu(DDPStrategy):
    """Lightning registers the hooks that it is given on GPUs only."""

    def _register_ddp_hooks(self) -> None:
        _register_ddp_comm_hook(self.model, self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper)


def hooked(rank: int, name: str) -> Trained:
    state, hook, wrapper = torchs_hook(name)
    strategy = WithHookOnTheCpu(ddp_comm_state=state, ddp_comm_hook=hook, ddp_comm_wrapper=wrapper)
    return fit(Classifier(without_buffers()), strategy, data(12, batch_size=1))


@HOOKS
def test_communication_hooks(ranks: RankPool, hook: str, exchange: tuple[str, torch.dtype], rtol: float) -> None:
    for ours in same_training(ranks, hooked, hook, rtol=rtol):
        assert ours.exchange == exchange


class SaveAtTheEnd(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def trainer_halves(rank: int, folder: Path, which: tuple[int, ...]) -> Trained:
    model, last = Classifier(), folder / "last.ckpt"
    callbacks = [SaveAtTheEnd(last)] if which == (1,) else []
    resume_from = last if which == (2,) else None
    return fit(model, DDPStrategy(), resume_from=resume_from, max_epochs=max(which), callbacks=callbacks)


@RESUMED
def test_a_checkpoint_of_the_trainer_goes_on_under_either_ddp(
    ranks: RankPool, save_under: str, load_under: str
) -> None:
    assert ranks.run(resumed_elsewhere, 2, trainer_halves, save_under, load_under) == [[], []]
