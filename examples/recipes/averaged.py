"""A moving average of the parameters (EMA): ``torchrun --nproc-per-node=2 examples/recipes/averaged.py``."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fastddp


def main() -> None:
    """Train, and evaluate the average."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    held_out = torch.randn(256, 16, device=device)  # the same on all ranks
    module = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)).to(device)
    model = fastddp.DistributedDataParallel(module)
    # Of the module, and after wrapping it, because only then all ranks have rank 0's parameters. Each rank keeps an
    # average of its own: parameters are equal on all ranks, so averages are too, and nothing travels.
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(100):
        inputs = torch.randn(32, 16, device=device)
        targets = inputs[:, :4].sin() + torch.randn(32, 4, device=device)  # noise, which the average takes out
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(module)
        if step % 20 == 19:
            with torch.no_grad():  # the module, not the wrapper: no rank waits for others
                last, averaged = (
                    nn.functional.mse_loss(evaluated(held_out), held_out[:, :4].sin()).item()
                    for evaluated in (module, average)
                )
            print(f"step {step + 1}, rank {dist.get_rank()}: last {last:.6f}, averaged {averaged:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
