"""A few steps of small models over one rank, in a process without pytest: what compute-sanitizer looks at.

    python tests/gpu/small_step.py [--device simulated]

Every kernel of fastddp is launched for fp32 gradients: with gradients in their own memory, as bucket views, with a wire
in fp16 and sums in fp32, for PowerSGD, measured, and in 8 bits. Exit status: 0; 1 if a gradient is not what the model
alone gets, or a kernel is not there. A first run, without a sanitizer, leaves all of them in Triton's cache.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastddp
from fastddp import _C, comm_hooks

SIMULATED = "simulated"
STEPS = 3
SAMPLES = 4
LOW_RANK = ("compress_fp32_r4", "project_fp32_r4", "sum_partials", "reconstruct_fp32_r4")
EIGHT_BITS = ("block8_encode_fp32_int8_256", "block8_add_int8_256", "block8_decode_fp32_int8_256")
BASES = ("gram_r4", "orthonormalise_r4", "reorthonormalise_r4")


@dataclass(frozen=True)
class Mode:
    """One way to synchronise, the kernels that it launches, and how far its gradients may be from the model's own."""

    name: str
    kernels: tuple[str, ...]
    tolerance: float
    options: dict[str, Any] = field(default_factory=dict)
    hook: Callable[[], tuple[object, Callable[..., object]]] | None = None
    held: bool = False


def modes() -> list[Mode]:
    # As many samples as PowerSGD's rank: there the gradient is the product of its factors.
    power_sgd = {"matrix_approximation_rank": SAMPLES, "start_powerSGD_iter": 2, "min_compression_rate": 0.5}

    def low_rank() -> tuple[object, Callable[..., object]]:
        return comm_hooks.PowerSGDState(None, **power_sgd), comm_hooks.powerSGD_hook

    def in_fp16(accumulate: Any = None) -> tuple[object, Callable[..., object]]:
        return comm_hooks.CompressState(accumulate=accumulate), comm_hooks.fp16_compress_hook

    in_place, measured = {"gradient_as_bucket_view": True}, {"watch": fastddp.Watch(corruption="report")}
    of_measured = ("pack_measuring_fp32_to_fp32", "measure_gradients_fp32")
    return [
        Mode("own memory", ("pack_fp32_to_fp32", "unpack_fp32_to_fp32"), 1e-6, held=True),
        Mode("bucket views", ("pack_fp32_to_fp32", "measure_fp32"), 1e-6, in_place),
        Mode("fp16 wire", ("pack_fp32_to_fp16", "unpack_fp16_to_fp32"), 1e-3, hook=in_fp16),
        Mode("fp16 wire, sums in fp32", ("sum_shards_fp16",), 1e-3, hook=lambda: in_fp16("fp32")),
        Mode("PowerSGD", (*LOW_RANK, *BASES), 1e-3, hook=low_rank),
        Mode("PowerSGD, measured", of_measured, 1e-3, measured, hook=low_rank),
        # Rounded twice, each time by half of 1/127 of the largest at most; and what the step before has left.
        Mode("8 bits", EIGHT_BITS, 4 * 0.5 / 127, hook=lambda: (None, comm_hooks.int8_compress_hook)),
    ]


def backward(model: nn.Module, device: torch.device, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    model.zero_grad()
    model(torch.randn(SAMPLES, 33, generator=generator).to(device)).square().sum().backward()


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Relative to the largest element."""
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))


def problems_of(mode: Mode, device: torch.device) -> list[str]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(33, 65), nn.GELU(), nn.Linear(65, 7)).to(device)
    alone = copy.deepcopy(module)
    model = fastddp.DistributedDataParallel(module, bucket_cap_mb=0.005, **mode.options)
    if mode.hook is not None:
        model.register_comm_hook(*mode.hook())
    held = []
    if mode.held:  # so that the gradient stays where it is, and unpack runs
        next(module.parameters()).register_post_accumulate_grad_hook(lambda p: held.append(p.grad))
    found = []
    for step in range(STEPS):
        backward(model, device, step)
        backward(alone, device, step)
        model.last_grad_norm()
        for (name, ours), theirs in zip(module.named_parameters(), alone.parameters(), strict=True):
            difference = distance(ours.grad, theirs.grad)
            if not difference <= mode.tolerance:
                found.append(
                    f"{mode.name}, step {step}: the gradient of {name} is off by {difference:.2g} of its largest"
                )
    missing = [name for name in mode.kernels if _C.trust_in_kernel(device, f"fastddp_{name}") != _C.Trust.proven]
    return found + [f"{mode.name}: no kernel fastddp_{name} was loaded" for name in missing]


def problems(device: torch.device) -> list[str]:
    return [problem for mode in modes() for problem in problems_of(mode, device)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", SIMULATED], default="cuda")
    kind = parser.parse_args().device
    if kind == SIMULATED:
        sys.path.append(str(Path(__file__).resolve().parent.parent))
        import fake_cuda

        fake_cuda.install()
    device = torch.device(kind, 0)
    torch.accelerator.set_device_index(0)
    backend = "nccl" if kind == "cuda" else SIMULATED
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    found = problems(device)
    torch.accelerator.synchronize()
    if kind == SIMULATED:
        print("\n".join(fake_cuda.launches()))
    dist.destroy_process_group()
    print("\n".join(found) or f"the gradients of {STEPS} steps in {len(modes())} modes are right", flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
