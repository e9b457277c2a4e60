"""The simulated device is as strict as a GPU: what is not ordered goes wrong, what is ordered never does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from fastddp.kernels.ahead_of_time import compile_pack
from torch import nn

import fake_cuda
from fastddp import _C
from ranks import RankPool

DEVICE = torch.device("privateuseone", 0)  # named before it is renamed
FLOAT = torch.float32


def under(order: str, seed: int, situation: Callable[[], float]) -> float:
    fake_cuda.build().drain()
    fake_cuda.schedule(order, seed)
    return situation()


def values(rank: int, situation: Callable[[], float], order: str) -> set[float]:
    """What a situation gives under an order; under "random", with many seeds."""
    return {under(order, seed, situation) for seed in range(20 if order == "random" else 1)}


def written_on_another_stream(wait: bool) -> float:
    tensor = torch.ones(10, device=DEVICE)
    torch.accelerator.synchronize()
    other = torch.Stream(device=DEVICE)
    with other:
        tensor.fill_(2.0)
    if wait:
        torch.accelerator.current_stream().wait_stream(other)
    return tensor.sum().item() / 10


def read_without_a_wait() -> float:
    return written_on_another_stream(wait=False)


def read_after_a_wait() -> float:
    return written_on_another_stream(wait=True)


def freed_while_another_stream_reads(record: bool) -> float:
    other = torch.Stream(device=DEVICE)
    tensor = torch.ones(10, device=DEVICE)
    other.wait_stream(torch.accelerator.current_stream())
    with other:
        copy = tensor * 3
        if record:
            tensor.record_stream(other)
        del tensor
        torch.full((10,), 5.0, device=torch.device("cpu"))
    with torch.accelerator.current_stream():
        torch.full((10,), 7.0, device=DEVICE)
    torch.accelerator.synchronize()
    return copy.cpu().nan_to_num(-1.0)[0].item()


def freed_unrecorded() -> float:
    return freed_while_another_stream_reads(record=False)


def freed_recorded() -> float:
    return freed_while_another_stream_reads(record=True)


def staging_overwritten_before_its_copy() -> float:
    staging = torch.ones(10).pin_memory()
    on_device = staging.to(DEVICE, non_blocking=True)
    staging.fill_(4.0)
    return on_device.sum().item() / 10


def staging_freed_before_its_copy() -> float:
    on_device = torch.ones(10).pin_memory().to(DEVICE, non_blocking=True)
    torch.zeros(10).pin_memory()
    return on_device.sum().item() / 10


@pytest.mark.parametrize(
    ("situation", "order", "expected"),
    [
        (read_without_a_wait, "lazy", {1.0}),
        (read_without_a_wait, "others_first", {2.0}),
        (read_without_a_wait, "random", {1.0, 2.0}),
        (read_after_a_wait, "lazy", {2.0}),
        (read_after_a_wait, "others_first", {2.0}),
        (read_after_a_wait, "random", {2.0}),
        (freed_unrecorded, "random", {-1.0, 3.0, 21.0}),
        (freed_recorded, "lazy", {3.0}),
        (freed_recorded, "random", {3.0}),
        (staging_overwritten_before_its_copy, "lazy", {4.0}),
        (staging_freed_before_its_copy, "random", {1.0}),
    ],
)
def test_what_can_happen(
    simulated_ranks: RankPool, situation: Callable[[], float], order: str, expected: set[float]
) -> None:
    (found,) = simulated_ranks.run(values, 1, situation, order)
    if situation is freed_unrecorded:
        assert found <= expected
        assert found - {3.0}, "nobody noticed"
    else:
        assert found == expected


def train(rank: int, device: str) -> list[float]:
    if device != "cpu":
        fake_cuda.schedule("random", 1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    losses = []
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        inputs, targets = torch.randint(16, (6,), generator=generator), torch.randint(4, (6,), generator=generator)
        loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_model_trains_as_on_the_cpu(simulated_ranks: RankPool) -> None:
    assert simulated_ranks.run(train, 1, fake_cuda.DEVICE) == [train(0, "cpu")]


def counted_waits(rank: int) -> tuple[int, str]:
    tensor = torch.ones(3, device=DEVICE)
    before = fake_cuda.build().waits()
    tensor.cpu()
    tensor.sum().item()
    torch.accelerator.synchronize()
    with fake_cuda.without_waits(), pytest.raises(RuntimeError) as error:
        tensor.cpu()
    return fake_cuda.build().waits() - before, str(error.value).splitlines()[0]


def test_waits_of_the_host_are_counted_and_can_be_forbidden(simulated_ranks: RankPool) -> None:
    assert simulated_ranks.run(counted_waits, 1) == [
        (3, "the host waits for the device (a copy to the host) where it must not")
    ]


# ------------------------------------------------------------------------------------------- collectives and graphs


def meet(where: str) -> None:
    """No rank goes on before both are here: what one rank needs, the other's device does too."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{where}, {dist.get_rank()}", "")
    store.wait([f"{where}, {rank}" for rank in range(2)])


def asynchronous(rank: int, wait: bool) -> tuple[bool, list[str]]:
    """Whether the sum was there, and what had run before anybody asked."""
    fake_cuda.schedule("lazy")
    tensor = torch.ones(10, device=DEVICE.type)
    torch.accelerator.synchronize()
    fake_cuda.reset_records()
    with fake_cuda.without_waits():
        work = dist.all_reduce(tensor, async_op=True)
        if wait:
            work.wait()
        copy = tensor + 0
    before = fake_cuda.history()
    meet(f"launched, wait={wait}")
    seen = bool((copy == 2).all())
    meet(f"seen, wait={wait}")
    work.wait()
    torch.accelerator.synchronize()
    return seen, before


@pytest.mark.parametrize("wait", [True, False])
def test_a_collective_is_asynchronous_and_has_to_be_waited_for(simulated_ranks: RankPool, wait: bool) -> None:
    assert simulated_ranks.run(asynchronous, 2, wait) == [(wait, [])] * 2


def broken_captures(rank: int) -> list[str]:
    """What is said of each."""
    fake_cuda.schedule()
    tensor, outside, side = torch.ones(3, device=DEVICE), torch.Event(DEVICE), torch.Stream(device=DEVICE)
    outside.record(torch.accelerator.current_stream())

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
        origin = torch.Stream(device=DEVICE)
        try:
            with fake_cuda.Graph().capture(origin):
                action(origin)
            said.append("")
        except RuntimeError as error:
            said.append(str(error).split(":")[0])
    return said


def test_captures_refuse_what_cuda_refuses(simulated_ranks: RankPool) -> None:
    kinds = ("Unsupported", "Isolation", "Unsupported", "Unjoined")
    expected = [f"cudaErrorStreamCapture{kind}" for kind in kinds]
    assert simulated_ranks.run(broken_captures, 1) == [[*expected, ""]]


# --------------------------------------------------------------------------------------------------------- the driver


def load_for(rank: int, built_for: int, name: str | None, scratch: int) -> None:
    kernel = compile_pack("unpack", torch.float16, torch.bfloat16, built_for)
    _C.load_kernel(DEVICE, name or kernel.name, kernel.cubin, 8, 0, kernel.parameters, scratch, kernel.tile)


@pytest.mark.parametrize(
    ("built_for", "name", "scratch", "message"),
    [
        (80, None, 2, "no kernel image is available for execution on the device"),
        (90, "another", 2, "finding a kernel in its module failed with CUDA error 500: named symbol not found"),
        (90, None, 1, "does not take the 6 parameters of 8 bytes that fastddp launches it with"),
        (90, None, 3, "takes 3 scratch pointers; the launcher passes at most 2"),
    ],
)
def test_kernels_that_do_not_fit_are_refused(
    simulated_ranks: RankPool, built_for: int, name: str | None, scratch: int, message: str
) -> None:
    (error,) = simulated_ranks.errors(load_for, 1, built_for, name, scratch)
    assert message in error.message
