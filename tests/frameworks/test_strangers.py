"""What others wrote and ship in their wheels, unmodified: the same with fastddp as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate.test_utils
import pytest
import torch
from lightning.pytorch.demos import LightningTransformer
from torch.utils.data import DataLoader, TensorDataset

from ranks import RankPool
from side_by_side import Trained, same_training
from test_lightning import DDPStrategy, fit
from test_scripts import run_under_torchrun

ACCELERATE = Path(accelerate.test_utils.__file__).parent / "scripts"


@pytest.mark.tier("slow")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("script", ["test_script", "test_sync"])
def test_accelerates_own_tests_pass_and_say_the_same(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of trainings they say that losses and parameters are those of one process, or else they end with an error.
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    theirs, ours = (run_under_torchrun([*under, str(ACCELERATE / f"{script}.py")]) for under in ([], ["-m", "fastddp"]))
    assert (theirs.returncode, ours.returncode) == (0, 0), ours.stderr
    assert sorted(ours.stdout) == sorted(theirs.stdout)  # letters, because two ranks write into each other's lines
    assert "in place of torch's DDP: 2 ranks over gloo" in ours.stderr


class Offline(LightningTransformer):
    """Lightning's demonstration, which would fetch its texts."""

    trained: Trained | None = None

    def prepare_data(self) -> None:
        pass

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_end(self) -> None:
        self.trained = Trained.of(self.trainer.strategy.model, loss=self.trainer.callback_metrics["loss"].item())


def transformer(rank: int) -> Trained:
    torch.manual_seed(0)
    texts = torch.randint(100, (8, 17), generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(texts[:, :-1], texts[:, 1:]), batch_size=2)
    return fit(Offline(vocab_size=100), DDPStrategy(), loader, max_epochs=2)


def test_lightnings_transformer_has_the_same_losses_and_parameters(ranks: RankPool) -> None:
    for ours in same_training(ranks, transformer):
        assert ours.windows == 4
