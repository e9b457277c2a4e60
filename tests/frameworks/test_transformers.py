"""The Trainer of Hugging Face Transformers over fastddp, on a tiny GPT-2 with random parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import fastddp
from ranks import RankPool
from side_by_side import RESUMED, Trained, resumed_elsewhere, same_training, shared_folder

# The Trainer's own default is True.
EVERY_PARAMETER_IS_USED = {"ddp_find_unused_parameters": False}


def samples() -> list[dict[str, Tensor]]:
    tokens = torch.randint(50, (32, 12), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


class StopAfterTwoSteps(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 2


class Sharded(Trainer):
    """Wraps the model first, since the optimizer is made for the wrapper."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        self.model_wrapped = self.accelerator.prepare_model(self.model)
        self.optimizer = (
            fastddp.ShardedOptimizer(self.model_wrapped, torch.optim.AdamW, lr=self.args.learning_rate)
            if isinstance(self.model_wrapped, fastddp.DistributedDataParallel)
            else torch.optim.AdamW(self.model_wrapped.parameters(), lr=self.args.learning_rate)
        )
        return self.optimizer


@contextlib.contextmanager
def trainer(folder: Path, kind: type[Trainer] = Trainer, **arguments: Any) -> Iterator[Trainer]:
    """Two ranks, four samples each: four steps an epoch, with dropout."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=12, n_embd=16, n_layer=2, n_head=2))
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_strategy": "no",
        **arguments,
    }
    try:
        yield kind(model=model, args=TrainingArguments(**given), train_dataset=samples())
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def trained(rank: int, arguments: dict[str, Any], kind: type[Trainer] = Trainer) -> Trained:
    with shared_folder(rank) as folder, trainer(folder, kind, **arguments) as here:
        assert here.args.world_size == 2
        output = here.train()
        return Trained.of(here.model_wrapped, steps=output.global_step, loss=output.training_loss)


@pytest.mark.parametrize(
    ("arguments", "windows"),  # one in each optimizer step
    [
        (EVERY_PARAMETER_IS_USED | {"gradient_accumulation_steps": 2}, 4),
        (EVERY_PARAMETER_IS_USED | {"gradient_checkpointing": True}, 4),
        (EVERY_PARAMETER_IS_USED | {"ddp_bucket_cap_mb": 0.01, "ddp_broadcast_buffers": False}, 4),
        (EVERY_PARAMETER_IS_USED | {"bf16": True}, 4),
        (EVERY_PARAMETER_IS_USED | {"ddp_static_graph": True}, None),
        ({}, None),
        ({"gradient_accumulation_steps": 2}, None),
    ],
    ids=str,
)
def test_training(ranks: RankPool, arguments: dict[str, Any], windows: int | None) -> None:
    for ours in same_training(ranks, trained, arguments):
        assert windows in (None, ours.windows)


@pytest.mark.parametrize("arguments", [{"bf16": True}, {"gradient_accumulation_steps": 2}], ids=str)
def test_training_with_a_sharded_optimizer(ranks: RankPool, arguments: dict[str, Any]) -> None:
    same_training(ranks, trained, EVERY_PARAMETER_IS_USED | arguments, Sharded, rtol=1e-5)  # clipped, as by default


def halves(rank: int, folder: Path, which: tuple[int, ...]) -> Trained:
    steps = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}
    with trainer(folder, **EVERY_PARAMETER_IS_USED, **steps) as here:
        if which == (1,):
            here.add_callback(StopAfterTwoSteps())
        here.train(resume_from_checkpoint=str(folder / "checkpoint-2") if which == (2,) else None)
        assert here.state.global_step == 2 * max(which)
        return Trained.of(here.model_wrapped)


@RESUMED
def test_a_checkpoint_goes_on_under_either_ddp(ranks: RankPool, save_under: str, load_under: str) -> None:
    assert ranks.run(resumed_elsewhere, 2, halves, save_under, load_under) == [[], []]
