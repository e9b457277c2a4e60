"""The simulated device is as strict as a GPU: what is not ordered goes wrong, and what CUDA refuses raises."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fastddp.kernels.ahead_of_time import compile_pack

import fake_cuda
from fastddp import _C
from ranks import RankPool

DEVICE = torch.device("privateuseone", 0)  # named before it is renamed


def read_on_another_stream(wait: bool = False) -> float:
    tensor = torch.ones(10, device=DEVICE)
    torch.accelerator.synchronize()
    other = torch.Stream(device=DEVICE)
    with other:
        tensor.fill_(2.0)
    if wait:
        torch.accelerator.current_stream().wait_stream(other)
    return tensor.sum().item() / 10


def freed_while_another_stream_reads(record: bool = False) -> float:
    other = torch.Stream(device=DEVICE)
    tensor = torch.ones(10, device=DEVICE)
    other.wait_stream(torch.accelerator.current_stream())
    with other:
        copy = tensor * 3
        if record:
            tensor.record_stream(other)
        del tensor
    torch.full((10,), 7.0, device=DEVICE)
    torch.accelerator.synchronize()
    return copy.cpu().nan_to_num(-1.0)[0].item()


def staging_overwritten_before_its_copy() -> float:
    staging = torch.ones(10).pin_memory()
    on_device = staging.to(DEVICE, non_blocking=True)
    staging.fill_(4.0)
    return on_device.sum().item() / 10


def what_can_happen(rank: int) -> list[set[float]]:
    def results(situation: Callable[..., float], order: str, **options: bool) -> set[float]:
        found = set()
        for seed in range(20 if order == "random" else 1):
            fake_cuda.schedule(order, seed)
            found.add(situation(**options))
        return found

    assert results(freed_while_another_stream_reads, "random") - {3.0}, "nobody noticed"
    return [
        results(read_on_another_stream, "lazy"),
        results(read_on_another_stream, "others_first"),
        results(read_on_another_stream, "random", wait=True),
        results(freed_while_another_stream_reads, "random", record=True),
        results(staging_overwritten_before_its_copy, "lazy"),
    ]


def test_what_is_not_ordered_goes_wrong(simulated_ranks: RankPool) -> None:
    assert simulated_ranks.run(what_can_happen, 1) == [[{1.0}, {2.0}, {2.0}, {3.0}, {4.0}]]


def refused(rank: int) -> list[str]:
    """What is said of a wait that is forbidden, of captures that break CUDA's rules, and of one that does not."""
    fake_cuda.schedule()
    tensor, outside, side = torch.ones(3, device=DEVICE), torch.Event(DEVICE), torch.Stream(device=DEVICE)
    outside.record(torch.accelerator.current_stream())
    with fake_cuda.without_waits(), pytest.raises(RuntimeError, match="the host waits"):
        tensor.cpu()

    def fork(origin: torch.Stream) -> None:
        side.wait_stream(origin)
        with side:
            tensor.add_(1)

    actions: list[Callable[[torch.Stream], object]] = [
        lambda origin: tensor.sum().item(),
        lambda origin: origin.wait_event(outside),
        lambda origin: torch.ones(1).to(DEVICE, non_blocking=True),
        fork,
        lambda origin: tensor.add_(1),
    ]
    said = []
    for action in actions:
        with torch.Stream(device=DEVICE) as origin:
            fake_cuda.begin_capture()
            try:
                action(origin)
                fake_cuda.end_capture()
                said.append("")
            except RuntimeError as error:
                said.append(str(error).split(":")[0])
    return said


def test_it_refuses_what_cuda_refuses(simulated_ranks: RankPool) -> None:
    kinds = ("Unsupported", "Isolation", "Unsupported", "Unjoined")
    assert simulated_ranks.run(refused, 1) == [[*(f"cudaErrorStreamCapture{kind}" for kind in kinds), ""]]


def load_for(rank: int, built_for: int, name: str | None, scratch: int) -> None:
    kernel = compile_pack("unpack", torch.float16, torch.bfloat16, built_for)
    _C.load_kernel(DEVICE, name or kernel.name, kernel.cubin, 8, 0, kernel.parameters, scratch, kernel.tile)


@pytest.mark.parametrize(
    ("built_for", "name", "scratch", "message"),
    [
        (80, None, 2, "no kernel image is available"),
        (90, "another", 2, "CUDA error 500: named symbol not found"),
        (90, None, 1, "does not take the 6 parameters of 8 bytes"),
        (90, None, 3, "takes 3 scratch pointers; the launcher passes at most 2"),
    ],
)
def test_kernels_that_do_not_fit_are_refused(
    simulated_ranks: RankPool, built_for: int, name: str | None, scratch: int, message: str
) -> None:
    (error,) = simulated_ranks.errors(load_for, 1, built_for, name, scratch)
    assert message in error.message
