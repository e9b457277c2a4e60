"""Where one of several collectives cannot be started, those before it are not sent again; the next window is right."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastddp
from fastddp import _C, comm_hooks
from fastddp.comm_hooks import PowerSGDState
from on_ranks import of_ranks, on_ranks
from parts import Parts, local_input, wrapped
from ranks import RankPool
from releases import BACKWARD_HAS_CONTEXT


class Faulty(dist.ProcessGroup):
    """A process group one of whose calls raises, once. ``calls``: those that went through."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        world = dist.distributed_c10d._world
        world.pg_map[self] = world.pg_map[group]  # torch.distributed asks whether it knows the group
        self.calls, self.raises_in = 0, -1  # calls from now
        self.sees_python_objects: list[bool] = []  # in each call, whether torch had left one in the thread's state
        self.allreduce, self.send, self.recv = map(self._faulty, (group.allreduce, group.send, group.recv))
        self.group = group

    def _faulty(self, call: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
        def faulty(*arguments: Any) -> dist.Work:
            self.sees_python_objects.append(torch._C._is_key_in_tls("context"))
            self.raises_in -= 1
            if self.raises_in == -1:
                raise RuntimeError("no way to the other ranks, for once")
            self.calls += 1
            return call(*arguments)

        return faulty

    def allgather(self, *arguments: Any) -> dist.Work:
        self.sees_python_objects.append(torch._C._is_key_in_tls("context"))
        return self.group.allgather(*arguments)


def backward(loss: Tensor, fails: bool) -> None:
    words = r"for once|not a tensor|failed on rank 0"
    with pytest.raises((RuntimeError, TypeError), match=words) if fails else contextlib.nullcontext():
        loss.backward()


def in_pieces(rank: int, wire: torch.dtype | None, elements: int, raises_in: int) -> tuple[int, list[list[float]]]:
    """Calls of the second lane, and first and last element of each gradient; rank 0's third window fails there."""
    faulty = Faulty(dist.new_group([0, 1]))
    model = fastddp.DistributedDataParallel(Parts("a", sizes=[elements]))
    model.register_comm_hook(None, comm_hooks.fp16_compress_hook if wire else comm_hooks.allreduce_hook)
    seen = []
    for step in range(5):
        model.zero_grad()
        if step == 2:
            lanes = [model.process_group, faulty]
            model.reducer.set_way(_C.Way(_C.Codec.cast(wire), lanes, nodes=[0, 0] if wire else []))
            faulty.raises_in = raises_in if rank == 0 else -1
        backward(model(torch.tensor((rank + 1.0) * 2**step)), fails=step == 2)
        if step != 2:
            seen.append(model.module.a.grad[[0, -1]].tolist())
    return faulty.calls, seen


@pytest.mark.tier("slow", but_one_in=3)
@pytest.mark.parametrize(
    ("wire", "elements", "raises_in"),
    [(None, 13_200_000, 0), *((torch.float16, 16_800_000, raises_in) for raises_in in range(4))],
    ids=["allreduce", "scatter: receive", "scatter: send", "gather: receive", "gather: send"],
)
def test_the_first_piece_is_not_sent_twice_where_the_second_cannot_be_sent(
    ranks: RankPool, wire: torch.dtype | None, elements: int, raises_in: int
) -> None:
    """Else the next window would get what the failed one has sent again."""
    (calls, first), (other_calls, second) = ranks.run(in_pieces, 2, wire, elements, raises_in)
    assert calls == other_calls > 0
    assert first == second == [[1.5 * 2**step] * 2 for step in (0, 1, 3, 4)]


class TwoDtypes(nn.Module):
    """P of one parameter and Q of the other cannot share a collective."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.single = nn.Parameter(torch.randn(12, 9))
        self.fp64 = nn.Parameter(torch.randn(12, 9, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.single * x).sum() + (self.fp64 * x.double()).sum()


@pytest.mark.parametrize("raises_in", [0, 1, 2, 3])
@on_ranks(2)
def test_factors_stay_equal_where_a_tick_cannot_send_all_it_has(rank: int, raises_in: int) -> None:
    """Rank 0's fourth window, the second compressed one, fails."""
    faulty = Faulty(dist.group.WORLD)
    model = fastddp.DistributedDataParallel(TwoDtypes(), bucket_cap_mb=0)
    state = PowerSGDState(faulty, start_powerSGD_iter=2, min_compression_rate=0.1)
    model.register_comm_hook(state, comm_hooks.powerSGD_hook)
    for step in range(6):
        model.zero_grad()
        loss = model(torch.randn(12, 9, generator=torch.Generator().manual_seed(10 * step + rank)))
        if step == 3 and rank == 0:
            faulty.raises_in = raises_in
        backward(loss, fails=step == 3)
    tensors = [*(parameter.grad for parameter in model.parameters()), *state.qs.values()]
    found = torch.cat([tensor.flatten().double() for tensor in tensors])
    assert found.isfinite().all()
    assert len(set(of_ranks((faulty.calls, *found.tolist())))) == 1


class FailsAfterSending:
    """The mean; what it returns for one of its calls holds no gradients, though these have been sent."""

    calls, raises_in = 0, -1  # calls from now

    def __call__(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor | None]:
        fails = self.raises_in == 0
        self.calls, self.raises_in = self.calls + 1, self.raises_in - 1
        future = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True).get_future()
        return future.then(lambda done: None if fails else done.value()[0])


def late_gradients(rank: int, cannot: str, raises_in: int) -> tuple[int, list[list[float]]]:
    """Calls, and gradients of each step. In the third b and c come after their buckets, in one more each."""
    faulty = Faulty(dist.group.WORLD) if cannot == "be sent" else FailsAfterSending()
    module = Parts()
    module.c.data = module.c.data.double()  # so that it is in no collective with b
    model = wrapped(module, find_unused_parameters=True)
    model.register_comm_hook(*((faulty, comm_hooks.allreduce_hook) if cannot == "be sent" else (None, faulty)))
    seen = []
    for step in range(4):
        model.zero_grad()
        loss = model(local_input(rank), "bca" if step >= 2 else "a")
        fails = step == 2 and rank == 0
        if fails:
            faulty.raises_in = raises_in
        backward(loss, fails)
        if not fails:
            seen.append([0.0 if p.grad is None else p.grad[0].item() for p in model.parameters()])
    return faulty.calls, seen


NAN = float("nan")


@pytest.mark.parametrize(
    ("cannot", "raises_in", "third"),
    [
        # Behind the buckets' three, and the status of the window: rank 0 has said that its window is well, so NaN has
        # to say that it is not.
        ("be sent", 3 + 1, [1.5, NAN, NAN]),
        ("be sent", 3 + 1 + 1, [1.5, 1.5, NAN]),
        ("be used", 3, [1.5, 1.5, NAN]),
        ("be used", 3 + 1, [1.5, 1.5, 1.5]),
    ],
)
def test_late_gradients_that_were_not_sent_are_and_others_not_twice(
    ranks: RankPool, cannot: str, raises_in: int, third: list[float]
) -> None:
    """Of two collectives for late gradients the first or the second fails. ``third``: what the other rank gets then."""
    (calls, failed), (other_calls, healthy) = ranks.run(late_gradients, 2, cannot, raises_in)
    assert calls == other_calls
    assert healthy.pop(2) == pytest.approx(third, nan_ok=True)
    assert failed == healthy == [[1.5, 0.0, 0.0], [1.5, 0.0, 0.0], [1.5, 1.5, 1.5]]


class DenseAndSparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(4, 3, sparse=True)
        self.dense = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(self.rows(x)).sum()


def users_allreduce(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    work = group.allreduce([bucket.buffer()])
    return work.get_future().then(lambda future: future.value()[0])


@on_ranks(2)
def test_an_exchange_of_another_reducer_is_refused(rank: int) -> None:
    noop = _C.Way.nowhere()
    first, second = wrapped(), wrapped()
    first.reducer.set_way(noop)
    with pytest.raises(ValueError, match=r"(?s)belongs to one reducer.*Make another one"):
        second.reducer.set_way(noop)
    second(local_input(rank)).backward()  # its own is still there


@pytest.mark.parametrize("hook", [None, users_allreduce])
@on_ranks(2)
def test_collectives_hold_no_python_objects_but_a_users_hook_runs_as_torch_runs_it(rank: int, hook: Any) -> None:
    """Else gloo's thread, which needs the GIL to let go of them, aborts a process that ends right after a step.

    Collectives of a dense gradient, of a sparse one, and of the ranks' agreement.
    """
    group = Faulty(dist.group.WORLD)
    model = fastddp.DistributedDataParallel(DenseAndSparse(), find_unused_parameters=True)
    if hook is not None:
        model.register_comm_hook(group, hook)
    else:
        model.reducer.set_way(_C.Way(_C.Codec.cast(None), [group]))
    model(torch.tensor([rank])).backward()
    assert len(group.sees_python_objects) >= (3 if hook is None else 1)
    assert any(group.sees_python_objects) == (hook is not None and BACKWARD_HAS_CONTEXT)
