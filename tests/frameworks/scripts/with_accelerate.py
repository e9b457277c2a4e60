"""Trains with Accelerate and saves rank 0's parameters: with_accelerate.py FILE."""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 3))
loader = DataLoader(TensorDataset(torch.randn(48, 6), torch.randint(3, (48,))), batch_size=4, shuffle=True)

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.01), loader)
for inputs, targets in loader:
    with accelerator.accumulate(model):
        accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()

wrapper = type(model).__module__
parameters = dict(accelerator.unwrap_model(model).named_parameters())
accelerator.save({"wrapper": wrapper, "ranks": accelerator.num_processes, "parameters": parameters}, sys.argv[1])
accelerator.end_training()
