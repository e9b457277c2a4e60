"""Trains with Lightning and saves rank 0's parameters: with_lightning.py FILE."""

import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 3))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(self.layers(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)

    def on_train_end(self) -> None:
        wrapper = type(self.trainer.strategy.model).__module__
        if self.global_rank == 0:
            found = {"wrapper": wrapper, "ranks": self.trainer.world_size, "parameters": dict(self.named_parameters())}
            torch.save(found, sys.argv[1])


torch.manual_seed(0)
model = Classifier()
loader = DataLoader(TensorDataset(torch.randn(48, 6), torch.randint(3, (48,))), batch_size=4, shuffle=True)
trainer = Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    accumulate_grad_batches=2,
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(model, loader)
torch.distributed.destroy_process_group()
