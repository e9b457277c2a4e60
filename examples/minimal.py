"""A script for several ranks: ``torchrun --nproc-per-node=2 examples/minimal.py``."""

import torch
import torch.distributed as dist
from torch import nn

import fastddp


def main() -> None:
    """Fit a line, each rank with data of its own."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if torch.cuda.is_available() else "cpu"
    torch.manual_seed(dist.get_rank())
    model = fastddp.DistributedDataParallel(nn.Linear(3, 1).to(device))  # rank 0's parameters are everybody's
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(50):
        inputs = torch.randn(32, 3, device=device)
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()  # gradients are averaged over ranks
        optimizer.step()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
