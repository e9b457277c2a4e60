"""bf16 parameters with fp32 gradients: ``torchrun --nproc-per-node=2 examples/recipes/bf16.py checkpoint.pt``.

With accumulation, clipping and checkpoints. A second run goes on from the file, with the same losses.
"""

import contextlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastddp

STEPS, SAVE_EVERY, MICROBATCHES = 25, 10, 4


def batch(number: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """This rank's microbatch. A data loader has to go on where the checkpoint was made, as this does."""
    generator = torch.Generator().manual_seed(number * dist.get_world_size() + dist.get_rank())
    inputs = torch.randn(32, 16, generator=generator)
    return inputs.to(device, torch.bfloat16), inputs[:, :4].sin().to(device)


def main(file: Path) -> None:
    """Train, and save every ten steps."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)).to(device, torch.bfloat16)
    model = fastddp.DistributedDataParallel(module, main_grads="grad")  # microbatches and ranks add up in fp32
    copies = [parameter.detach().float() for parameter in model.parameters()]  # AdamW's steps are too small for bf16
    optimizer = torch.optim.AdamW(copies, lr=1e-2)
    first = 0
    if file.exists():
        saved = torch.load(file, map_location=device)
        module.load_state_dict(saved["module"])
        torch._foreach_copy_(copies, saved["copies"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    for step in range(first, STEPS):
        for microbatch in range(MICROBATCHES):
            inputs, targets = batch(step * MICROBATCHES + microbatch, device)
            is_last = microbatch == MICROBATCHES - 1
            with contextlib.nullcontext() if is_last else model.no_sync():  # forward and backward inside
                loss = nn.functional.mse_loss(model(inputs).float(), targets) / MICROBATCHES
                loss.backward()
        norm = fastddp.clip_grad_norm_(model, 1.0)
        for copy, parameter in zip(copies, model.parameters(), strict=True):
            copy.grad = parameter.grad
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), copies)
        if dist.get_rank() == 0:
            print(f"step {step + 1}: norm {norm.item():.9g}, loss {MICROBATCHES * loss.item():.9g}")
            if (step + 1) % SAVE_EVERY == 0:
                state = {"module": module.state_dict(), "copies": copies, "optimizer": optimizer.state_dict()}
                torch.save({**state, "step": step + 1}, file.with_suffix(".new"))
                file.with_suffix(".new").replace(file)  # a job that is killed while it saves leaves the last file
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
