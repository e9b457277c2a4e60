"""Trains with Transformers' Trainer and saves rank 0's parameters: with_transformers.py FILE."""

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=12, n_embd=16, n_layer=2, n_head=2))
tokens = torch.randint(50, (32, 12))
arguments = TrainingArguments(
    tempfile.mkdtemp(),
    use_cpu=True,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_train_epochs=1,
    ddp_find_unused_parameters=False,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in tokens])
trainer.train()

wrapper = type(trainer.model_wrapped).__module__
if trainer.is_world_process_zero():
    parameters = dict(model.named_parameters())
    torch.save({"wrapper": wrapper, "ranks": arguments.world_size, "parameters": parameters}, sys.argv[1])
torch.distributed.destroy_process_group()
