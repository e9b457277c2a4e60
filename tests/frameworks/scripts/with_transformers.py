"""Trains with the Trainer of Transformers and saves rank 0's parameters: with_transformers.py FILE."""

import sys
import tempfile

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(50, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


torch.manual_seed(0)
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    use_cpu=True,
    max_steps=4,
    per_device_train_batch_size=4,
    report_to="none",
    save_strategy="no",
    logging_strategy="no",
    disable_tqdm=True,
)
model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=12, n_embd=16, n_layer=2, n_head=2))
trainer = Trainer(model=model, args=arguments, train_dataset=Tokens())
trainer.train()
if trainer.is_world_process_zero():
    wrapper = type(trainer.model_wrapped).__module__
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    torch.save({"wrapper": wrapper, "ranks": arguments.world_size, "parameters": parameters}, sys.argv[1])
torch.distributed.destroy_process_group()
