"""The Trainer of Transformers, with 8-bit gradients. There is no fastddp in this script: its options are outside.

torchrun --nproc-per-node=2 -m fastddp --hook int8 --on-stall raise examples/recipes/transformers_trainer.py
"""

import tempfile

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Counting(Dataset):
    """Sequences that count up."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = (index + torch.arange(16)) % 64
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    """Train a small GPT-2 with random parameters."""
    torch.manual_seed(0)
    sizes = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(sizes)
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=not torch.cuda.is_available(),
        max_steps=60,
        per_device_train_batch_size=16,
        learning_rate=1e-2,
        ddp_find_unused_parameters=False,  # every parameter is used
        report_to="none",
        save_strategy="no",
        logging_steps=20,
        disable_tqdm=True,
    )
    Trainer(model=model, args=arguments, train_dataset=Counting()).train()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
