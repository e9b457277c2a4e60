"""8 bits between nodes, full precision inside each node, on two nodes of two ranks.

    torchrun --nnodes=2 --node-rank=0 --nproc-per-node=2 --master-addr=HOST --master-port=29500 two_nodes.py

and the same with ``--node-rank=1`` on the other node.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import fastddp
from fastddp import comm_hooks


def main() -> None:
    """Train, and say what travels."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(dist.get_rank())
    module = nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 4)).to(device)
    # torchrun says which ranks share a node. They add up their gradients first, so each gradient crosses the network
    # once. The hook says how.
    model = fastddp.DistributedDataParallel(module, hierarchy="node")
    model.register_comm_hook(comm_hooks.BlockState(None), comm_hooks.int8_compress_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(50):
        inputs = torch.randn(64, 16, device=device)
        loss = nn.functional.mse_loss(model(inputs), inputs[:, :4].sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
