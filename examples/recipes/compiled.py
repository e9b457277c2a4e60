"""A model that torch.compile compiles: ``torchrun --nproc-per-node=2 examples/recipes/compiled.py``."""

import os

import torch
import torch.distributed as dist
from torch import nn

import fastddp


def main() -> None:
    """Wrap, compile and train."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(dist.get_rank())
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())]
    module = nn.Sequential(nn.Linear(16, 64), *layers, nn.Linear(64, 4)).to(device)
    # One graph, whatever the size of buckets: they travel while its backward runs.
    wrapper = fastddp.DistributedDataParallel(module, bucket_cap_mb=0.02)
    model = torch.compile(wrapper)
    optimizer = torch.optim.AdamW(wrapper.parameters(), lr=3e-3)
    for step in range(50):
        inputs = torch.randn(64, 16, device=device)
        loss = nn.functional.mse_loss(model(inputs), inputs[:, :4].sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    if dist.get_rank() == 0:
        print(f"{len(wrapper.bucket_plan().buckets)} buckets")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
