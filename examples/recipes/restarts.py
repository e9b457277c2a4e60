"""Survives `kill -9` of any rank: torchrun starts all ranks again, from the last checkpoint, bit for bit.

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
torchrun --nproc-per-node=2 --max-restarts=10 examples/recipes/restarts.py checkpoints
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fastddp
from fastddp.comm_hooks import BlockState, int8_compress_hook

folder = Path(sys.argv[1])
folder.mkdir(exist_ok=True)
dist.init_process_group("gloo", timeout=timedelta(minutes=2))
rank = dist.get_rank()
torch.manual_seed(0)
module = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
data = TensorDataset(torch.randn(256, 32), torch.randn(256, 1))
sampler: DistributedSampler[object] = DistributedSampler(data)
model = fastddp.DistributedDataParallel(module)
compression = BlockState()
model.register_comm_hook(compression, int8_compress_hook)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
step = 0


def save() -> None:
    """Each rank has rounding errors of its own, so each writes a file; the last line makes all of them count."""
    states = [module.state_dict(), optimizer.state_dict(), compression.state_dict()]
    torch.save(states, folder / f"step {step}, rank {rank}.pt")
    dist.barrier()
    if rank == 0:
        (folder / "latest.new").write_text(str(step))
        (folder / "latest.new").replace(folder / "latest")


if (folder / "latest").exists():
    step = int((folder / "latest").read_text())
    of_module, of_optimizer, of_compression = torch.load(folder / f"step {step}, rank {rank}.pt")
    module.load_state_dict(of_module)
    optimizer.load_state_dict(of_optimizer)
    compression.load_state_dict(of_compression)
    print(f"rank {rank} goes on after step {step}", flush=True)

batches = len(sampler) // 16
while step < 5 * batches:
    sampler.set_epoch(step // batches)
    for number, (inputs, targets) in enumerate(DataLoader(data, batch_size=16, sampler=sampler)):
        if number < step % batches:  # it was trained with before
            continue
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        step += 1
        print(f"rank {rank}, step {step}, loss {loss.item():.17g}", flush=True)
        if step % 5 == 0:
            save()

dist.destroy_process_group()
