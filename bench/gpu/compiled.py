"""A model under torch.compile, as a whole and block by block: each gradient against torch's DDP, bit for bit.

Without Triton for the device, as on the simulated one, code is made by AOT autograd alone.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from bench.cases import Batch, Gpt
from bench.contestants import Engine, wrapped
from bench.gpu.results import Run
from bench.gpu.step import lonely_group

_STEPS = 4  # in the second one buckets are rebuilt, and then fastddp's model is compiled again
WAYS = ("whole", "by block")


def measure(run: Run) -> None:
    """Adds a row for each way: graphs, and whether gradients are torch's."""
    device = run.device
    width, length = (32, 8) if run.quick else (256, 128)
    torch.manual_seed(0)
    model = Gpt(layers=2, width=width, heads=4, context=length).to(device)
    batches: list[Batch] = [(torch.randint(256, (4, length + 1)).to(device),) for _ in range(_STEPS)]
    with lonely_group(device):
        for way in WAYS:
            expected, _ = trained(model, "torch", way, batches, device)
            for engine in ("plain", "fastddp"):
                found, graphs = trained(model, engine, way, batches, device)
                same = graphs > 0 and all(map(torch.equal, found, expected))
                result = "equal" if same else "WRONG"
                run.results.add("compiled", what=way, contestant=engine, graphs=graphs, result=result)


def trained(
    model: nn.Module, engine: Engine, way: str, batches: list[Batch], device: torch.device
) -> tuple[list[Tensor], int]:
    """Gradients of all steps, and how many graphs AOT autograd got."""
    torch._dynamo.reset()
    counts = torch._dynamo.utils.counters["aot_autograd"]
    before = counts["total"]
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    options = {"bucket_cap_mb": 1} if engine != "plain" else {}
    wrapper: Any = wrapped(model, engine, None, options)
    if way == "whole":
        wrapper.compile(backend=backend)
    else:  # after the wrap: a copy of a compiled module is not compiled
        for block in getattr(wrapper, "module", wrapper).blocks:
            block.compile(backend=backend)
    found: list[Tensor] = []
    # One graph under torch's DDP too: of a graph a bucket, inductor makes other kernels. Fastddp's way into graphs
    # takes the setting for an order to stay out, and says so when gradients come as late as a graph ends.
    with torch._dynamo.config.patch(optimize_ddp=engine == "fastddp"), warnings.catch_warnings():
        warnings.filterwarnings("error", message="(?s).*FD051")
        for batch in batches:
            wrapper.zero_grad()
            wrapper(*batch).backward()
            found += [parameter.grad.cpu() for parameter in wrapper.parameters() if parameter.grad is not None]
    return found, counts["total"] - before
