"""The simulated device refuses what CUDA refuses, and fastddp the kernels that do not fit a device.

That what is not ordered goes wrong there is what test_streams.py shows.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fastddp.kernels.ahead_of_time import compile_pack

import fake_cuda
from fastddp import _C
from on_ranks import on_ranks

DEVICE = torch.device("privateuseone", 0)  # named before it is renamed


@on_ranks(1, pool="simulated_ranks")
def test_waits_that_are_forbidden_and_captures_that_break_the_rules_raise(rank: int) -> None:
    fake_cuda.schedule()
    tensor, outside, side = torch.ones(3, device=DEVICE), torch.Event(DEVICE), torch.Stream(device=DEVICE)
    outside.record(torch.accelerator.current_stream())
    with fake_cuda.without_waits(), pytest.raises(RuntimeError, match="the host waits"):
        tensor.cpu()

    def fork(origin: torch.Stream) -> None:
        side.wait_stream(origin)
        with side:
            tensor.add_(1)

    actions: list[tuple[str, Callable[[torch.Stream], object]]] = [
        ("Unsupported", lambda origin: tensor.sum().item()),
        ("Isolation", lambda origin: origin.wait_event(outside)),
        ("Unsupported", lambda origin: torch.ones(1).to(DEVICE, non_blocking=True)),
        ("Unjoined", fork),
    ]

    def capture(action: Callable[[torch.Stream], object]) -> None:
        with torch.Stream(device=DEVICE) as origin:
            fake_cuda.begin_capture()
            action(origin)
            fake_cuda.end_capture()

    capture(lambda origin: tensor.add_(1))
    for kind, action in actions:
        with pytest.raises(RuntimeError, match=f"cudaErrorStreamCapture{kind}"):
            capture(action)


@pytest.mark.parametrize(
    ("built_for", "name", "scratch", "message"),
    [
        (80, None, 2, "no kernel image is available"),
        (90, "another", 2, r"CUDA error 500 \(CUDA_ERROR_NOT_FOUND\): named symbol not found"),
        (90, None, 1, "does not take the 6 parameters of 8 bytes"),
        (90, None, 3, "takes 3 scratch pointers; the launcher passes at most 2"),
    ],
)
@on_ranks(1, pool="simulated_ranks")
def test_kernels_that_do_not_fit_are_refused(
    built_for: int, name: str | None, scratch: int, message: str, rank: int
) -> None:
    kernel = compile_pack("unpack", torch.float16, torch.bfloat16, built_for)
    with pytest.raises((RuntimeError, ValueError), match=message):
        _C.load_kernel(DEVICE, name or kernel.name, kernel.cubin, 8, 0, kernel.parameters, scratch, kernel.tile)
