"""What fastddp finds out about a process group, whatever its name: who waits for a collective, what an average is."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fake_cuda
import fastddp
from fastddp import comm_hooks
from fastddp.exchange.averages import divides_first
from ranks import RankPool

DEVICE = fake_cuda.DEVICE
LAYERS = 4
HOOKS = ["", "wide sum", "PowerSGD"]


def register(model: fastddp.DistributedDataParallel, hook: str) -> None:
    if hook == "wide sum":
        model.register_comm_hook(comm_hooks.CompressState(accumulate="fp32"), comm_hooks.bf16_compress_hook)
    if hook == "PowerSGD":
        state = comm_hooks.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=1)
        model.register_comm_hook(state, comm_hooks.powerSGD_hook)


class Held:
    """A model of a bucket for each parameter, whose gradients are held, so that each bucket is unpacked."""

    def __init__(self, hook: str = "", **options: bool) -> None:
        module = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(LAYERS))).to(DEVICE)
        self.model = fastddp.DistributedDataParallel(module, bucket_cap_mb=0, **options)
        register(self.model, hook)
        self.held: dict[nn.Parameter, Tensor] = {}
        self.waits_of_the_host: list[int] = []
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self._hold)

    def _hold(self, parameter: nn.Parameter) -> None:
        self.held[parameter] = parameter.grad
        self.waits_of_the_host.append(len(fake_cuda.host_waits()))

    def step(self, set_to_none: bool = True) -> None:
        self.model.zero_grad(set_to_none)
        loss = self.model(torch.ones(2, 8, device=DEVICE)).sum()
        fake_cuda.synchronize()
        fake_cuda.reset_records()
        self.waits_of_the_host.clear()
        loss.backward()


def order_of_launches(rank: int) -> list[str]:
    fake_cuda.schedule("lazy")
    held = Held()
    for _ in range(4):
        held.step()
    return [name.split("_")[1] for name in fake_cuda.launches()]


def test_where_a_stream_waits_unpack_follows_its_collective_at_once(simulated_ranks: RankPool) -> None:
    # The backend's name is not that of any that torch knows.
    assert simulated_ranks.run(order_of_launches, 2) == [["pack", "unpack"] * LAYERS] * 2


def waits_during_backward(rank: int, hook: str) -> list[int]:
    """How often the host has waited when the last gradient comes, in each of some steps."""
    fake_cuda.schedule("lazy")
    assert dist.get_backend() == fake_cuda.BLOCKING
    held = Held(hook)
    waits = []
    for _ in range(5):
        held.step()
        waits.append(held.waits_of_the_host[-1])
    return waits


def test_where_the_host_waits_it_does_so_when_backward_has_ended(simulated_ranks: RankPool) -> None:
    # The backend has NCCL's name: the class that has it differs between releases, and what it does between settings.
    assert simulated_ranks.run(waits_during_backward, 2, "", backend=fake_cuda.BLOCKING) == [[0] * 5] * 2


def gradients(rank: int, hook: str, view: bool) -> list[Tensor]:
    fake_cuda.schedule("random", 3)
    torch.manual_seed(0)
    held = Held(hook, gradient_as_bucket_view=view)
    for step in range(4):
        held.model.zero_grad(set_to_none=step % 2 == 0)
        held.model(torch.full((2, 8), rank + step + 1.0, device=DEVICE)).square().sum().backward()
    return [parameter.grad.cpu() for parameter in held.model.parameters()]


@pytest.mark.parametrize("view", [False, True], ids=["default", "view"])
@pytest.mark.parametrize("hook", HOOKS)
def test_gradients_are_the_same_whoever_waits(simulated_ranks: RankPool, hook: str, view: bool) -> None:
    stream = simulated_ranks.run(gradients, 2, hook, view)
    host = simulated_ranks.run(gradients, 2, hook, view, backend=fake_cuda.BLOCKING)
    for ours, theirs in zip(stream[0] + stream[1], host[0] + host[1], strict=True):
        assert torch.equal(ours, theirs)


# ------------------------------------------------------------------------------------------------------- the average


def asked(rank: int, device: str) -> bool:
    return divides_first(dist.group.WORLD, torch.device(device))


def test_an_average_that_adds_first_is_not_taken(ranks: RankPool, simulated_ranks: RankPool) -> None:
    assert ranks.run(asked, 2, "cpu") == [False, False]  # gloo's
    assert simulated_ranks.run(asked, 2, DEVICE) == [True, True]
    assert simulated_ranks.run(asked, 2, DEVICE, backend=fake_cuda.BLOCKING) == [True, True]


def without_an_average(rank: int) -> bool:
    def refuse(*arguments: object, **options: object) -> None:
        raise RuntimeError("no such operation")

    original, dist.all_reduce = dist.all_reduce, refuse
    try:
        return asked(rank, "cpu")
    finally:
        dist.all_reduce = original


def test_a_backend_may_have_none(ranks: RankPool) -> None:
    assert ranks.run(without_an_average, 2) == [False, False]


def collectives_of_a_step(rank: int, view: bool) -> set[str]:
    fake_cuda.schedule("lazy")
    held = Held(gradient_as_bucket_view=view)
    for _ in range(4):
        held.step(set_to_none=False)
    fake_cuda.synchronize()
    # Of more than one rank the last collective is the status of the window, the greatest of some bytes.
    named = [name for name in fake_cuda.history() if name in ("ALLREDUCE", "AVERAGE")]
    return set(named[: -1 if dist.get_world_size() > 1 else None])


@pytest.mark.parametrize(("ranks_in_all", "collective"), [(1, "ALLREDUCE"), (2, "AVERAGE")])
def test_one_rank_has_nothing_to_divide(simulated_ranks: RankPool, ranks_in_all: int, collective: str) -> None:
    # NCCL launches a kernel for the average over one rank, and none for the sum.
    assert simulated_ranks.run(collectives_of_a_step, ranks_in_all, True) == [{collective}] * ranks_in_all
