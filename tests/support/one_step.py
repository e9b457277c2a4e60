"""One training step on each rank: gradients must be those of torch's DDP, bit for bit.

    torchrun --standalone --nproc-per-node=2 tests/support/one_step.py VERSION

VERSION is the one that fastddp must have. It must come from the environment that runs this.
"""

from __future__ import annotations

import copy
import importlib.metadata
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fastddp


def gradients(model: nn.Module, wrapper: type[nn.Module], rank: int) -> list[bytes]:
    torch.manual_seed(rank)
    model = wrapper(copy.deepcopy(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(16, 33)).square().mean().backward()
    found = [bytes(parameter.grad.view(torch.uint8).flatten().tolist()) for parameter in model.parameters()]
    optimizer.step()
    return found


def main() -> None:
    folder = Path(fastddp.__file__).resolve().parent
    assert folder.is_relative_to(Path(sys.prefix).resolve()), f"fastddp comes from {folder}, not from {sys.prefix}"
    versions = {fastddp.__version__, importlib.metadata.version("fastddp")}
    assert versions == {sys.argv[1]}, f"fastddp says that it is {versions}, not {sys.argv[1]}"
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 65), nn.GELU(), nn.Linear(65, 7))
    theirs = gradients(model, TorchDDP, rank)
    ours = gradients(model, fastddp.DistributedDataParallel, rank)
    assert ours == theirs, f"rank {rank}: gradients differ from those of torch's DDP"
    dist.barrier()  # gloo's threads let go of what torch's DDP has sent: they may not while the interpreter ends
    dist.destroy_process_group()
    print(f"rank {rank}: the gradients of {len(ours)} parameters are those of torch's DDP", flush=True)


if __name__ == "__main__":
    main()
