"""fp16 autocast with a GradScaler: ``torchrun --nproc-per-node=2 examples/recipes/grad_scaler.py``."""

import os

import torch
import torch.distributed as dist
from torch import nn

import fastddp
from fastddp import comm_hooks


def main() -> None:
    """Train from a scale that is too large, so that the first steps are skipped."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(dist.get_rank())
    module = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)).to(device)
    model = fastddp.DistributedDataParallel(module)
    # 8 bits remember what rounding took away. They forget it in a step that the scaler skips: nothing is to be done.
    model.register_comm_hook(None, comm_hooks.int8_compress_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**24)
    for step in range(40):
        inputs = torch.randn(64, 16, device=device)
        with torch.autocast(device.type, dtype=torch.float16):
            outputs = model(inputs)
        loss = nn.functional.mse_loss(outputs.float(), inputs[:, :4].sin())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # before clipping: gradients are averages over ranks already, and are still scaled
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)  # skips on all ranks, or on none: all have the same gradients
        scaler.update()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step + 1}: scale {scaler.get_scale():.0f}, loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
