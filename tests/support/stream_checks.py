"""Whether the order of work on streams is right: closed-form results under unkind orders, on the simulated device.

`python stream_checks.py` runs every check under every order and prints what fails; with `--first` it ends at the first.
tests/device/test_streams.py runs it as it is, and with each wait of csrc/ taken out.

Every check builds its situation anew: `sum over ranks of gradient / ranks` over ranks that all hold what this one holds
is the gradient itself, so whatever the exchange does too early or too late shows as half of it, twice of it, NaN (freed
memory), or somebody else's values.
"""

from __future__ import annotations

import inspect
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from repository import TESTS

sys.path.append(str(TESTS))  # where fake_cuda is: this file may be run alone

import fake_cuda
from fastddp import _C
from fastddp.kernel_loading.launching import load_block8_kernels, load_kernels, load_low_rank_kernels

DEVICE = torch.device("privateuseone", 0)  # named before it is renamed
RANKS = 2
ELEMENTS = 300
ORDERS = [("lazy", 0), ("others_first", 0), *(("random", seed) for seed in range(8))]

_order = ""  # the one that is running
_alive: list[Tensor] = []  # as long as the check runs


def stream() -> torch.Stream:
    return torch.Stream(device=DEVICE)


def group(ranks: int = RANKS) -> dist.ProcessGroup:
    result = dist.ProcessGroup(dist.HashStore(), 0, ranks)
    kind = dist.ProcessGroup.BackendType.CUSTOM
    result._set_default_backend(kind)
    result._register_backend(DEVICE, kind, fake_cuda.loopback_backend(ranks))
    return result


def parameters(*shapes: Any) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape, device=DEVICE)) for shape in shapes]


def accumulate_on(streams: Sequence[torch.Stream], of: Sequence[nn.Parameter]) -> None:
    """Make the node that accumulates each parameter's gradient run on its stream."""
    for own, parameter in zip(streams, of, strict=True):
        with own:
            _alive.append(parameter.view_as(parameter))


def with_zeros(of: Sequence[nn.Parameter]) -> None:
    """Give all parameters a gradient, so that accumulating is a kernel on the stream of its node."""
    for parameter in of:
        parameter.grad = torch.zeros_like(parameter)
    torch.accelerator.synchronize()


def without_gradients(of: Sequence[nn.Parameter]) -> None:
    for parameter in of:
        parameter.grad = None


def holding_gradient(parameter: nn.Parameter) -> list[Tensor]:
    """Keep a hand on the gradient from before fastddp's hook runs: it cannot move into the wire."""
    held: list[Tensor] = []
    parameter.register_post_accumulate_grad_hook(lambda parameter: held.append(parameter.grad))
    return held


def reducer(
    of: Sequence[nn.Parameter],
    view: bool = False,
    plan: list[list[int]] | None = None,
    expect: _C.Expect = _C.Expect.all,
    wires: str = "kept",
) -> _C.Reducer:
    """``wires``: kept, lent for a window, or of a slab of registered memory."""
    load_kernels([(DEVICE, torch.float32, torch.float32)])
    names = [f"p{index}" for index in range(len(of))]
    plan = plan or [list(range(len(of)))]
    engine = _C.Reducer(list(of), names, plan, group(), view, expect, lazy_bucket_allocation=wires == "lent")
    if wires == "slab":

        def allocate(_: object, size: int, device: torch.device) -> Tensor:
            return torch.empty(size, dtype=torch.uint8, device=device)

        engine.use_memory(_C.RegisteredMemory(allocate, symmetric=False))
    return engine


def backward(engine: _C.Reducer, losses: Sequence[Callable[[], Tensor]]) -> None:
    """One window: the gradient of the last loss comes first."""
    engine.begin_forward(True)
    loss = torch.stack([loss() for loss in losses]).sum()
    engine.arm()
    loss.backward()


def times(parameter: nn.Parameter, factor: float) -> Callable[[], Tensor]:
    """A loss whose gradient is ``factor`` everywhere."""
    return lambda: (parameter * factor).sum()


def expect(tensor: Tensor, value: float, rtol: float = 0.0) -> None:
    values = tensor.cpu()
    assert torch.allclose(values, torch.full_like(values, value), rtol, atol=0), f"{values.unique()}, not {value}"


def expect_about(tensor: Tensor, value: float) -> None:
    expect(tensor, value, rtol=1e-3)


def somebody_elses_memory(own: torch.Stream, sizes: Sequence[int] = (ELEMENTS,) * 4) -> list[Tensor]:
    """What an allocator gives out next on that stream: memory that was freed, if it thinks that nobody uses it."""
    with own:
        return [torch.full((size,), 7.0, device=DEVICE) for size in sizes]


def expect_nobody_writes_to(others: list[Tensor]) -> None:
    torch.accelerator.synchronize()
    for other in others:
        expect(other, 7)


def freed(frees: Callable[[], None]) -> int:
    """Bytes that are given back to the allocator by that."""
    before = fake_cuda.allocated_bytes()
    frees()
    return before - fake_cuda.allocated_bytes()


# ----------------------------------------------------------------------------------------------- pack, unpack, averages


def pack_waits_for_producers_on_other_streams(accumulates: bool) -> None:
    """And the memory of gradients that it frees is read before it is used again."""
    first, second = of = parameters(ELEMENTS, ELEMENTS)
    accumulate_on([stream(), stream()], of)
    engine = reducer(of)
    if accumulates:
        with_zeros(of)
    for step in range(1, 4):
        backward(engine, [times(second, step), times(first, 10 * step)])
        total = sum(range(1, step + 1)) if accumulates else step
        expect(first.grad, 10 * total)
        expect(second.grad, total)
        if not accumulates:
            without_gradients(of)


class _Graph(torch.autograd.Function):
    """One node, which hands gradients over before it ends: ``value``, and ten times that."""

    @staticmethod
    def forward(ctx: Any, value: float, *parameters: Tensor) -> Tensor:
        ctx.value, ctx.parameters = value, parameters
        return sum(parameter.sum() for parameter in parameters)  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        found = [torch.full_like(one, ctx.value * 10**place) for place, one in enumerate(ctx.parameters)]
        identities = torch.ops.fastddp.identities(ctx.parameters)
        for place, one in enumerate(found):
            torch.ops.fastddp.hand_over(one, identities, place)
        return (None, *found)


def pack_waits_for_gradients_that_were_handed_over_on_another_stream(accumulates: bool) -> None:
    first, second = of = parameters(ELEMENTS, ELEMENTS)
    accumulate_on([stream(), stream()], of)
    engine = reducer(of, plan=[[0], [1]])
    for step in range(1, 4):
        if accumulates:
            with_zeros(of)
        engine.begin_forward(True)
        own = stream()
        own.wait_stream(torch.accelerator.current_stream())
        with own:
            loss = _Graph.apply(step, *of)
        engine.arm()
        torch.accelerator.current_stream().wait_stream(own)
        loss.backward()
        expect(first.grad, step)
        expect(second.grad, 10 * step)
        assert engine.handed_over() == [0, 1]
        without_gradients(of)


def gradients_that_somebody_holds_are_averaged_in_place_and_measured(looks: bool) -> None:
    """Each norm before the memory of its parts is used again."""
    (parameter,) = parameters(ELEMENTS)
    held = holding_gradient(parameter)
    engine = reducer([parameter])
    norms = []
    for step in range(1, 5):
        backward(engine, [times(parameter, step)])
        if looks:
            expect(parameter.grad * 1, step)
        norms.append(engine.measure())
        parameter.grad = None
        held.clear()
    for step, norm in enumerate(norms, start=1):
        assert norm.tolist() == [ELEMENTS * step * step, 0], norm.tolist()


def gradients_that_stay_are_measured_after_they_were_made() -> None:
    """Under an exchange that sends nothing, which only measures them."""
    first, second = of = parameters(ELEMENTS, ELEMENTS)
    accumulate_on([stream(), stream()], of)
    engine = reducer(of)
    engine.watch_local_gradients(True)
    engine.set_way(_C.Way.nowhere())
    for step in range(1, 4):
        with_zeros(of)
        backward(engine, [times(second, step), times(first, 10 * step)])
        squares, not_finite = engine.local_sums().unbind(1)
        expect_about(squares / torch.tensor([100, 1]), ELEMENTS * step * step)
        expect(not_finite, 0)


def parts_of_a_bucket_wait_for_producers_on_other_streams() -> None:
    """Three gradients of 7 MiB, each on a stream of its own: the first two are packed before the bucket is complete."""
    if _order not in ("lazy", "others_first"):
        return  # the others take long with so much memory
    of = parameters(*[7 * 2**18] * 3)
    accumulate_on([stream() for _ in of], of)
    engine = reducer(of, view=True)
    for value in (1, 2):
        with_zeros(of)
        before = len(fake_cuda.launches())
        backward(engine, [times(parameter, value) for parameter in of])
        assert [name.split("_")[1] for name in fake_cuda.launches()[before:]] == ["pack", "pack"]
        for parameter in of:
            expect(parameter.grad * 1, value)


def backward_does_not_wait_for_collectives() -> None:
    if _order != "lazy":
        return
    first, second = of = parameters(ELEMENTS, ELEMENTS)
    engine = reducer(of, plan=[[1], [0]])
    backward(engine, [times(first, 1), times(second, 1)])  # which shows that the stream waits
    without_gradients(of)
    torch.accelerator.synchronize()
    counts = []

    def in_the_middle(gradient: Tensor) -> None:
        torch.accelerator.current_stream().synchronize()
        counts.append(fake_cuda.collectives())

    first.register_hook(in_the_middle)
    before = fake_cuda.collectives()
    backward(engine, [times(first, 1), times(second, 1)])
    assert counts == [before], "a collective ran before backward had to have its result"


def tables_outlive_the_kernels_that_read_them() -> None:
    load_kernels([(DEVICE, torch.float32, torch.float32)])
    a, b = stream(), stream()
    kernels = _C.Kernels(DEVICE)
    gradients = [[torch.full((ELEMENTS,), float(value), device=DEVICE)] for value in (1, 2)]
    longer = [torch.full((2 * ELEMENTS,), 3.0, device=DEVICE)]
    wires = [torch.zeros(ELEMENTS, device=DEVICE) for _ in range(3)]
    long_wire = torch.zeros(2 * ELEMENTS, device=DEVICE)
    torch.accelerator.synchronize()
    with a:
        kernels.pack(gradients[0], wires[:1])
    b.wait_stream(a)
    with b:
        kernels.pack(gradients[0], wires[1:2])  # with the tables that went up on the other stream
        kernels.pack(gradients[1], wires[2:3])
        kernels.pack(longer, [long_wire])
        for wire, value in zip([*wires, long_wire], (1, 1, 2, 3), strict=True):
            expect(wire, value)


# ------------------------------------------------------------------------------------------ memory that is free in time


def memory_of_gradients_can_be_freed_when_backward_has_ended() -> None:
    (parameter,) = parameters(ELEMENTS)
    held = holding_gradient(parameter)
    engine = reducer([parameter])
    for _ in range(2):
        backward(engine, [times(parameter, 1)])
        held.clear()
        assert freed(lambda: without_gradients([parameter])) > 0, "a gradient is held after its backward"


def memory_of_gradients_can_be_freed_when_an_optimizer_has_stepped_in_backward() -> None:
    first, second = of = parameters(ELEMENTS, ELEMENTS)
    engine = reducer(of, plan=[[1], [0]])
    sums_in_fp32(engine, of)  # gradients stay where they are
    allocated = []

    def step(averaged: Sequence[int]) -> None:
        allocated.append(fake_cuda.allocated_bytes())
        without_gradients([of[index] for index in averaged])

    engine.on_averaged(step)
    backward(engine, [times(first, 1), times(second, 1)])
    allocated.append(fake_cuda.allocated_bytes())
    assert allocated[1] - allocated[2] < 2 * 4 * ELEMENTS, "the first gradient is there when the second is averaged"


def memory_of_gradients_can_be_freed_after_a_window_that_failed() -> None:
    first, second = of = parameters(2**16, ELEMENTS)
    held = holding_gradient(first)
    engine = reducer(of, plan=[[0], [1]])
    for _ in range(2):
        backward(engine, [times(second, 1), times(first, 1)])
        without_gradients(of)
        held.clear()
    backward(engine, [times(first, 1)])  # the first bucket is finished as soon as its collective has started
    assert engine.state == "partial"
    first.grad = None
    held.clear()
    engine.give_up()
    assert freed(lambda: engine.begin_forward(True)) >= first.nbytes, "a gradient of a failed window is held"


# ------------------------------------------------------------------------------------------------------- late gradients


def a_stand_in_is_packed_after_its_copy() -> None:
    """The first gradient of backward, on a stream of its own, makes the copy; another stream completes the bucket."""
    late, first, other = of = parameters(ELEMENTS, ELEMENTS, ELEMENTS)
    accumulate_on([stream()], [first])
    engine = reducer(of, plan=[[1], [0, 2]], expect=_C.Expect.as_last)
    for step in range(1, 4):
        backward(engine, [times(other, 1), times(first, 1)])
        late.grad = torch.full_like(late, 5)
        without_gradients([first, other])
        torch.accelerator.synchronize()
        backward(engine, [times(late, 10 * step), times(other, 1), times(first, 1)])
        expect(late.grad, 5 + 10 * step)
        without_gradients([first, other])
        torch.accelerator.synchronize()


def memory_of_a_gradient_is_not_given_out_before_its_average_is_written() -> None:
    """It belongs to another stream than that of backward."""
    made_on = stream()
    late, other = of = parameters(ELEMENTS, ELEMENTS)
    engine = reducer(of, plan=[[1], [0]], expect=_C.Expect.as_last)
    backward(engine, [times(other, 1)])
    with made_on:
        late.grad = torch.full_like(late, 5)
    torch.accelerator.synchronize()
    backward(engine, [times(late, 3), times(other, 1)])
    late.grad = None
    expect_nobody_writes_to(somebody_elses_memory(made_on))


# ------------------------------------------------------------------------------------------------------ memory of wires


def wires_are_not_given_out_before_the_exchange_is_done(unpacks: bool) -> None:
    """Nor while gradients live in them."""
    made_on = stream()
    (parameter,) = parameters(ELEMENTS)
    accumulate_on([stream()], [parameter])
    if unpacks:
        holding_gradient(parameter)
    with made_on:
        engine = reducer([parameter])
    backward(engine, [times(parameter, 3)])
    result = parameter.grad if unpacks else parameter.grad * 2
    parameter.grad = None
    del engine
    others = somebody_elses_memory(made_on, (ELEMENTS,) * 2)
    expect(result, 3 if unpacks else 6)
    expect_nobody_writes_to(others)


def wires_are_not_given_out_before_the_exchange_of_an_unfinished_window_is_done() -> None:
    made_on = stream()
    first, _ = of = parameters(ELEMENTS, ELEMENTS)
    with made_on:
        engine = reducer(of, plan=[[0], [1]])
    backward(engine, [times(first, 3)])  # the other one may still get a gradient; nobody has waited for this one
    assert engine.state == "partial"
    first.grad = None
    del engine
    expect_nobody_writes_to(somebody_elses_memory(made_on, (ELEMENTS,) * 2))


def wires_of_a_slab_are_written_after_what_was_there() -> None:
    """Its memory is of the stream on which the exchange is installed; buckets are packed on others."""
    first, second = of = parameters(ELEMENTS, ELEMENTS)
    accumulate_on([stream(), stream()], of)
    engine = reducer(of, plan=[[0], [1]], wires="slab")
    with_zeros(of)
    with stream():
        before = torch.full((2**21 // 4,), 7.0, device=DEVICE)
        copies = [before * 1]
        del before
        engine.set_way(_C.Way(_C.Codec.cast(None), [group()]))
    backward(engine, [times(second, 5), times(first, 3)])
    results = first.grad * 1, second.grad * 1
    expect_nobody_writes_to(copies)
    expect(results[0], 3)
    expect(results[1], 5)


# ---------------------------------------------------------------------------------------------- exchanges of two stages

Installs = Callable[[_C.Reducer, Sequence[nn.Parameter]], None]


def sums_in_fp32(engine: _C.Reducer, of: Sequence[nn.Parameter]) -> None:
    engine.set_way(_C.Way(_C.Codec.cast(torch.float16), [group()], nodes=[0] * RANKS))


def factors(engine: _C.Reducer, of: Sequence[nn.Parameter]) -> None:
    """Of matrices; vectors travel as they are."""
    memory = [
        (torch.zeros(20, 16, device=DEVICE), torch.eye(1, 16, device=DEVICE)) if parameter.dim() == 2 else (None, None)
        for parameter in of
    ]
    settings = {"error_feedback": True, "warm_start": True, "epsilon": 0.0, "seed": 0, "first_window": 0, "wire": None}
    load_low_rank_kernels([(DEVICE, torch.float32)], 1)
    codec = _C.Codec.low_rank(memory, [], **settings)
    engine.set_way(_C.Way(codec, [group()]))


def eight_bits(engine: _C.Reducer, of: Sequence[nn.Parameter]) -> None:
    load_block8_kernels([(DEVICE, torch.float32)], "int8", 128, False)
    codec = _C.Codec.block8("int8", 128, _C.Block8Errors(), seed=None, first_window=0, rank=0)
    engine.set_way(_C.Way(codec, [group()], nodes=[0] * RANKS))


def two_levels(engine: _C.Reducer, of: Sequence[nn.Parameter]) -> None:
    """Over as many nodes as ranks on each."""
    load_kernels([(DEVICE, torch.float32, torch.float16)])
    names = [f"p{index}" for index in range(len(of))]
    plan = [[5, 4], [3, 2], [1, 0]] if len(of) == 6 else [[1], [0]]
    shards = _C.Sharding(list(of), names, plan, ranks=RANKS, rank=0, whole=False)
    way = _C.Way(_C.Codec.cast(torch.float16), [group()])
    way.all, way.node, way.sharding = group(RANKS**2), _C.Lanes([group()]), shards
    engine.set_way(way)


def a_matrix_and_a_vector(own: torch.Stream) -> list[nn.Parameter]:
    """Whose gradients accumulate on that stream."""
    of = parameters((20, 16), 16)
    accumulate_on([own, own], of)
    return of


def exchanges_of_two_stages_are_followed_by_averaged_gradients(wires: str, install: Installs) -> None:
    """Each bucket's gradients come on two streams; its second stage follows the first of the next bucket."""
    of = parameters(*[(20, 16), 16] * 3)
    accumulate_on([stream() for _ in of], of)
    engine = reducer(of, plan=[[5, 4], [3, 2], [1, 0]], wires=wires)
    install(engine, of)
    for window in range(1, 4):
        with_zeros(of)
        values = [8.0 * window + index // 2 for index in range(len(of))]  # a bucket's are equal: so are its shards
        backward(engine, [times(parameter, value) for parameter, value in zip(of, values, strict=True)])
        after = [parameter.grad * 1 for parameter in of]  # in the order of the caller's stream
        for gradient, value in zip(after, values, strict=True):
            expect_about(gradient, value)
        squares = math.fsum(float(gradient.double().square().sum()) for gradient in after)
        expect_about(engine.measure()[0], squares)


def exchanges_of_two_stages_give_no_memory_away_that_they_use(dropped: str, install: Installs) -> None:
    """Neither that of gradients, when these are dropped, nor their own, when the reducer is."""
    own = stream()
    with own:
        of = a_matrix_and_a_vector(own)
        engine = reducer(of, plan=[[1], [0]])
        install(engine, of)
        inputs = [torch.full_like(parameter, 3.0) for parameter in of]
        engine.begin_forward(True)
        loss = torch.stack([(a * b).sum() for a, b in zip(of, inputs, strict=True)]).sum()
        engine.arm()
    own.synchronize()
    loss.backward()
    results = [parameter.grad for parameter in of] if dropped == "reducer" else []
    without_gradients(of)
    del loss, inputs
    if dropped == "reducer":
        del engine
    others = somebody_elses_memory(own, (2**21 // 4, *(1024, 320, 16, 640, 90, 30, 20, 2) * 3))
    torch.accelerator.synchronize()
    for result in results:
        expect_about(result, 3)
    expect_nobody_writes_to(others)


def what_an_exchange_remembers_is_not_given_out_before_its_window_is_done(install: Installs) -> None:
    """It belongs to a stream on which no gradient came."""
    made_on = stream()
    of = a_matrix_and_a_vector(stream())
    with made_on:
        engine = reducer(of, plan=[[1], [0]])
        install(engine, of)
    torch.accelerator.synchronize()
    backward(engine, [times(parameter, 3) for parameter in of])
    del engine
    expect_nobody_writes_to(somebody_elses_memory(made_on, (1024, 512, 320, 64, 16) * 4))
    for parameter in of:  # nor was it before it was read
        expect_about(parameter.grad, 3)


# ---------------------------------------------------------------------------------------------------- sharded gradients


def sharded(engine: _C.Reducer, of: Sequence[nn.Parameter], plan: list[list[int]], wire: torch.dtype | None) -> Any:
    """Let this rank keep its part of gradients. Returns who has what, and by bucket what the optimizer steps."""
    load_kernels([(DEVICE, torch.float32, torch.float16)])
    names = [f"p{index}" for index in range(len(of))]
    sharding = _C.Sharding(list(of), names, plan, ranks=RANKS, rank=0, whole=False, for_optimizer=True)
    holders = [
        [
            torch.zeros(of[index].shape if end - begin == of[index].numel() else end - begin, device=DEVICE)
            for index, begin, end, _ in sharding.spans(bucket)
        ]
        for bucket in range(len(plan))
    ]
    way = _C.Way(_C.Codec.cast(wire), [group()])
    way.sharding, way.shards = sharding, sharding.shards(holders, [torch.empty(0) for _ in of])
    engine.set_way(way)
    return sharding, holders


def sharded_gradients_follow_backward_and_parameters_the_step(casts: bool, adds_up: bool) -> None:
    """Each bucket's gradients come on two streams. Windows may add up; then comes a step."""
    of, plan = parameters(*[(40, 32), 32] * 3), [[5, 4], [3, 2], [1, 0]]
    accumulate_on([stream() for _ in of], of)
    engine = reducer(of, plan=plan)
    sharding, holders = sharded(engine, of, plan, torch.float16 if casts else None)
    gather = _C.Gather([group()], sharding, engine.interruption)
    flats = [torch.zeros(sharding.length(bucket), device=DEVICE) for bucket in range(len(plan))]
    total = 0.0
    for window in range(1, 4):
        if not adds_up:
            with_zeros(of)
        backward(engine, [times(parameter, 8.0 * window) for parameter in of])
        total = 8.0 * window + (total if adds_up else 0.0)
        for bucket in range(len(plan)):
            begin, end = sharding.run(bucket)
            gradients = [holder.grad * 1 for holder in holders[bucket] if holder.numel() > 0]
            flats[bucket][begin:end].fill_(total).mul_(2)
            engine.send_parameters(gather, bucket, flats[bucket])
            for gradient in gradients:
                expect_about(gradient, total)
        for bucket in range(len(plan)):
            engine.await_parameters(gather, bucket)
            expect(flats[bucket] * 1, 2 * total)


# ------------------------------------------------------------------------------------------------------------- the runs

VALUES: dict[str, Sequence[Any]] = {
    "install": [sums_in_fp32, factors, eight_bits, two_levels],
    "wires": ["kept", "lent", "slab"],
    "dropped": ["gradients", "reducer"],
}


def checks() -> Iterator[tuple[Callable[..., None], tuple[Any, ...]]]:
    """Every function of this file that returns nothing and whose arguments have values above, or are yes or no."""
    for function in [value for value in globals().values() if inspect.isfunction(value)]:
        signature = inspect.signature(function)
        arguments = signature.parameters.values()
        values = [VALUES.get(one.name, [False, True] if one.annotation == "bool" else []) for one in arguments]
        if signature.return_annotation == "None":
            yield from ((function, row) for row in product(*values))


def failures(breadth_first: bool) -> Iterator[str]:
    """What goes wrong, a line each; breadth first: every check under one order before the next order."""
    global _order
    failed = set()
    runs = [(check, arguments, order) for check, arguments in checks() for order in ORDERS]
    if breadth_first:
        runs.sort(key=lambda run: ORDERS.index(run[2]))
    for check, arguments, (_order, seed) in runs:
        named = ", ".join(getattr(value, "__name__", str(value)) for value in (check, *arguments))
        if named in failed:
            continue
        _alive.clear()
        fake_cuda.schedule(_order, seed)
        try:
            check(*arguments)
        except (AssertionError, RuntimeError) as error:
            failed.add(named)
            yield f"{named} ({_order} {seed}): {str(error).splitlines()[0]}"


if __name__ == "__main__":
    fake_cuda.install()
    one_is_enough = "--first" in sys.argv
    problems = list(islice(failures(one_is_enough), 1 if one_is_enough else None))
    print(*problems, sep="\n", end="", flush=True)
    # Not sys.exit: threads of the simulated peers may still free tensors, for which they take the GIL, and a thread
    # that wants it from an interpreter that is ending ends the process.
    os._exit(1 if problems else 0)
