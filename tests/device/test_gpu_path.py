"""The whole GPU path without a GPU: from `DistributedDataParallel(...)` to `parameter.grad` on the simulated device."""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fake_cuda
import fastddp
from fastddp import _C, comm_hooks
from fastddp.exchange.launching import load_kernels
from program_execution import differences
from programs import Program, programs
from ranks import RankPool

ORDERS = ["lazy", "others_first", "random"]
SLOW = pytest.mark.tier("nightly")
DEVICE = fake_cuda.DEVICE


def under_order(rank: int, order: str, seed: int, program: Program) -> list[str]:
    fake_cuda.schedule(order, seed)
    return differences(rank, program, device=DEVICE)


@pytest.mark.timeout(0)  # a rank that hangs is reported by the ranks' own limit
@pytest.mark.parametrize(
    ("order", "number"), [("others_first", 10), *(pytest.param(order, 40, marks=SLOW) for order in ORDERS)]
)
def test_gradients_are_those_of_the_reference(simulated_ranks: RankPool, order: str, number: int) -> None:
    seeds = iter(range(1_000_000))

    @settings(max_examples=number, phases=[Phase.generate])
    @given(program=programs(2, sparse=False))  # the simulated device has no sparse tensors
    def check(program: Program) -> None:
        assert simulated_ranks.run(under_order, 2, order, next(seeds), program) == [[], []]

    check()


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 40), nn.GELU(), nn.Linear(40, 4))


def wrapped(
    device: str, bucket_cap_mb: float = 0.003, dtype: torch.dtype = torch.float32, **options: bool
) -> fastddp.DistributedDataParallel:
    torch.manual_seed(0)
    # On a busy machine a watch would ask the simulated device, which goes on when asked: memory would be free sooner.
    module = Mlp().to(device, dtype)
    return fastddp.DistributedDataParallel(
        module, bucket_cap_mb=bucket_cap_mb, watch=fastddp.Watch(stall=None), **options
    )


def backward(model: nn.Module, rank: int, step: int, device: str) -> None:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    model(torch.randn(4, 8, generator=generator).to(device)).square().sum().backward()


def train(
    rank: int, device: str, hook: str = "", view: bool = False, set_to_none: bool = True, order: str = "lazy"
) -> list[Tensor]:
    """Parameters after five steps, and the last norm."""
    if device == DEVICE:
        fake_cuda.schedule(order)
    model = wrapped(device, gradient_as_bucket_view=view)
    register(model, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9 * (hook == ""), foreach=False)
    for step in range(5):
        backward(model, rank, step, device)
        norm = model.last_grad_norm()
        optimizer.step()
        optimizer.zero_grad(set_to_none)
    return [*(parameter.detach().cpu() for parameter in model.parameters()), norm.cpu()]


def compare(actual: list[list[Tensor]], expected: list[list[Tensor]], atol: float = 0) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        for one, other in zip(ours[:-1], theirs[:-1], strict=True):
            torch.testing.assert_close(one, other, rtol=0 if atol == 0 else 1e-5, atol=atol)
        assert torch.allclose(ours[-1], theirs[-1], atol=max(atol, 1e-8))


CASTS = ["fp16_compress_hook", "bf16_compress_hook"]


@pytest.mark.tier("slow", but_one_in=5)
@pytest.mark.parametrize("view", [False, True], ids=["default", "view"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("hook", "set_to_none"),
    [("", True), ("", False), *((f"{cast}, sums in {where}", True) for cast in CASTS for where in ("fp32", "wire"))],
)
def test_training_is_bitwise_that_on_the_cpu(
    ranks: RankPool, simulated_ranks: RankPool, hook: str, set_to_none: bool, view: bool, order: str
) -> None:
    expected = ranks.run(train, 2, "cpu", hook, view, set_to_none)
    compare(simulated_ranks.run(train, 2, DEVICE, hook, view, set_to_none, order), expected)


@pytest.mark.tier("slow", but_one_in=5)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("cast", CASTS)
def test_over_gloo_casts_travel_in_collectives(
    ranks: RankPool, simulated_ranks: RankPool, cast: str, order: str
) -> None:
    """Gloo's messages between two ranks read and write host memory only; its collectives stage a GPU's."""
    hook = f"{cast}, sums in fp32"
    expected = ranks.run(train, 2, "cpu", hook)
    compare(simulated_ranks.run(train, 2, DEVICE, hook, order=order, backend=f"{DEVICE}_gloo"), expected)


@pytest.mark.parametrize("order", ORDERS)
def test_training_under_power_sgd_is_that_on_the_cpu(ranks: RankPool, simulated_ranks: RankPool, order: str) -> None:
    expected = ranks.run(train, 2, "cpu", "powerSGD_hook")
    compare(simulated_ranks.run(train, 2, DEVICE, "powerSGD_hook", order=order), expected, atol=1e-5)


def summed(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """What a user may write: the result is not the bucket's buffer."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0] / 2)


def register(model: fastddp.DistributedDataParallel, name: str) -> None:
    if name == "written in Python":
        model.register_comm_hook(None, summed)
    elif name == "powerSGD_hook":
        model.register_comm_hook(comm_hooks.PowerSGDState(None, 2, start_powerSGD_iter=2), comm_hooks.powerSGD_hook)
    elif name:
        hook, _, sums = name.partition(", sums in ")
        model.register_comm_hook(comm_hooks.CompressState(accumulate=sums or "wire"), getattr(comm_hooks, hook))


def costs_of_a_step(rank: int, view: bool, set_to_none: bool, hold: bool, hook: str = "") -> dict[str, object]:
    """In a steady state, with the device steps behind the host: launches, tables that went up, waits of the host."""
    device_extension = fake_cuda.build()
    fake_cuda.schedule("random", 1)
    model = wrapped(DEVICE, gradient_as_bucket_view=view)
    register(model, hook)
    held: dict[nn.Parameter, Tensor] = {}
    if hold:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter: held.update({parameter: parameter.grad}))
    inputs = torch.randn(4, 8).to(DEVICE)
    for step in range(11):
        if step == 6:
            device_extension.synchronize()  # which frees memory: addresses change once more
        if step == 8:
            launches, waits = len(device_extension.launches()), device_extension.waits()
            copies = device_extension.copies()
        with fake_cuda.without_waits() if step >= 6 else nullcontext():
            model(inputs).square().sum().backward()
            model.zero_grad(set_to_none)
        held.clear()
    return {
        "launches": [name.split("_")[1] for name in device_extension.launches()[launches:]],
        "uploads": device_extension.copies() - copies,
        "waits": device_extension.waits() - waits,
    }


BUCKETS = 2


@pytest.mark.parametrize(
    ("view", "set_to_none", "hold", "launches"),
    [
        (False, True, False, ["pack"]),
        (False, True, True, ["pack", "unpack"]),
        (False, False, False, []),
        (True, True, False, ["pack"]),
        (True, False, False, []),
    ],
    ids=["default", "gradients-held", "zeroed-in-place", "view", "view-zeroed-in-place"],
)
def test_launches_of_a_steady_step(
    simulated_ranks: RankPool, view: bool, set_to_none: bool, hold: bool, launches: list[str]
) -> None:
    for costs in simulated_ranks.run(costs_of_a_step, 2, view, set_to_none, hold):
        assert costs == {"launches": 3 * BUCKETS * launches, "uploads": 0, "waits": 0}


def events_of_a_step(rank: int) -> tuple[int, int, int]:
    """That a step makes: with a wrapper, and what its collectives and autograd make; and those with a time."""
    fake_cuda.schedule("in_order")
    alone = Mlp().to(DEVICE)
    # Its watch keeps two moments a bucket, of the last eight windows.
    model = fastddp.DistributedDataParallel(
        copy.deepcopy(alone), bucket_cap_mb=0.003, watch=fastddp.Watch(stall="report")
    )
    inputs = torch.ones(4, 8, device=DEVICE)

    def step(module: nn.Module) -> tuple[int, int]:
        before = fake_cuda.events()
        module(inputs).square().sum().backward()
        module.zero_grad()
        fake_cuda.synchronize()
        made, timed = map(int.__sub__, fake_cuda.events(), before)
        return made, timed

    for _ in range(11):
        step(model)
    fake_cuda.reset_records()
    made, timed = step(model)
    of_a_collective = 3  # when it may begin, that it is done, and in its future
    return made, of_a_collective * fake_cuda.collectives() + step(alone)[0], timed


def test_a_steady_step_makes_no_event_and_writes_no_time(simulated_ranks: RankPool) -> None:
    for made, by_others, timed in simulated_ranks.run(events_of_a_step, 2):
        assert made == by_others
        assert timed == 0


POWER_SGD = Counter(
    {
        "compress": 1,
        "pack": 1,  # what is not compressed; P and Q are computed in the message
        "unpack": 2,  # that, and Q
        "gram": 2,  # of P and of the next Q
        "orthonormalise": 2,
        "reorthonormalise": 2,
        "project": 1,
        "sum": 1,
        "reconstruct": 1,
    }
)


@pytest.mark.tier("slow", but_one_in=3)
@pytest.mark.parametrize("view", [False, True], ids=["default", "view"])
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
@pytest.mark.parametrize(
    ("hook", "launches"),
    [
        ("bf16_compress_hook", Counter(["pack", "unpack"])),
        ("bf16_compress_hook, sums in fp32", Counter(["pack", "sum", "unpack"])),
        ("powerSGD_hook", POWER_SGD),
    ],
    ids=["bf16", "bf16 in fp32", "powersgd"],
)
def test_a_steady_compressed_step_has_these_launches_and_no_wait_196568(
    simulated_ranks: RankPool, view: bool, set_to_none: bool, hook: str, launches: Counter[str]
) -> None:
    for costs in simulated_ranks.run(costs_of_a_step, 2, view, set_to_none, False, hook):
        assert Counter(costs["launches"]) == {name: 3 * BUCKETS * count for name, count in launches.items()}
        assert (costs["uploads"], costs["waits"]) == (0, 0)


def collectives_of_a_long_wire(rank: int) -> list[str]:
    """The wire has 17 MiB: two parts."""
    fake_cuda.schedule("in_order")
    module = nn.Linear(17 * 2**19, 1, bias=False).to(DEVICE)
    model = fastddp.DistributedDataParallel(module, watch=fastddp.Watch(stall=None))
    register(model, "fp16_compress_hook, sums in fp32")
    model.zero_grad()
    model(torch.ones(1, 17 * 2**19, device=DEVICE)).sum().backward()
    assert torch.equal(module.weight.grad.cpu(), torch.ones(1, 17 * 2**19))
    return [
        name for name in fake_cuda.history() if name in ("ALLTOALL_BASE", "_ALLGATHER_BASE") or "sum_shards" in name
    ]


def test_while_one_part_of_a_long_wire_is_added_up_the_other_travels(simulated_ranks: RankPool) -> None:
    (found,) = simulated_ranks.run(collectives_of_a_long_wire, 1)
    there, sums, back = ["ALLTOALL_BASE"] * 2, ["fastddp_sum_shards_fp16"] * 2, ["_ALLGATHER_BASE"] * 2
    assert sorted(found) == sorted(there + sums + back)
    assert found[:2] == there


@pytest.mark.tier("slow", but_one_in=3)
@pytest.mark.parametrize("hook", ["bf16_compress_hook", "fp16_compress_hook", "written in Python", "powerSGD_hook", ""])
@pytest.mark.parametrize("view", [False, True], ids=["default", "view"])
@pytest.mark.parametrize("hold", [False, True], ids=["", "gradients-held"])
def test_a_steady_step_sends_no_table_though_the_device_lags_behind(
    simulated_ranks: RankPool, hook: str, view: bool, hold: bool
) -> None:
    for costs in simulated_ranks.run(costs_of_a_step, 2, view, True, hold, hook):
        assert (costs["uploads"], costs["waits"]) == (0, 0)


class Stack(nn.Module):
    """Layers of 1 MiB each."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(layers))

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


MIB = 2**20


def peak_of_steps(rank: int, fast: bool, view: bool, set_to_none: bool) -> tuple[int, Counter[str], int]:
    """The most that was allocated in steady steps over what the model takes; launches and uploads of these steps."""
    fake_cuda.schedule("in_order")
    module = Stack(14).to(DEVICE)
    before = fake_cuda.allocated_bytes()
    ddp = fastddp.DistributedDataParallel if fast else TorchDDP
    model = ddp(module, bucket_cap_mb=25, gradient_as_bucket_view=view)
    inputs = torch.ones(1, 512, device=DEVICE)
    for step in range(5):
        if step == 3:
            fake_cuda.synchronize()
            fake_cuda.reset_peak()
            fake_cuda.reset_records()
        model(inputs).sum().backward()
        model.zero_grad(set_to_none)
    launches = Counter(name.split("_")[1] for name in fake_cuda.launches() if "pack" in name)
    return fake_cuda.peak_bytes() - before, launches, fake_cuda.uploads()


@pytest.mark.tier("slow", but_one_in=3)
@pytest.mark.parametrize("view", [False, True], ids=["default", "view"])
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
def test_no_more_memory_than_torchs_ddp(simulated_ranks: RankPool, view: bool, set_to_none: bool) -> None:
    ours, launches, uploads = simulated_ranks.run(peak_of_steps, 2, True, view, set_to_none)[0]
    theirs, _, _ = simulated_ranks.run(peak_of_steps, 2, False, view, set_to_none)[0]
    # What has come of a bucket is packed when it is 4 MiB, and the layer that made it so is one that torch holds too.
    assert ours <= theirs + 4 * MIB
    assert uploads == 0
    if view and set_to_none:  # two steps of 14 MiB: the first layer that comes is a bucket of its own
        assert launches == {"pack": 2 * 4}


def launches_with_narrow_gradients(rank: int, dtype: torch.dtype) -> Counter[str]:
    """Of one compressed step."""
    fake_cuda.schedule("random", 1)
    model = wrapped(DEVICE, dtype=dtype)
    register(model, "powerSGD_hook")
    inputs = torch.randn(4, 8).to(DEVICE, dtype)
    for _ in range(4):
        before = len(fake_cuda.build().launches())
        model.zero_grad()
        model(inputs).square().sum().backward()
    return Counter(name.split("_")[1] for name in fake_cuda.build().launches()[before:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_factors_in_fp32_of_narrow_gradients_have_kernels_too(simulated_ranks: RankPool, dtype: torch.dtype) -> None:
    for launches in simulated_ranks.run(launches_with_narrow_gradients, 2, dtype):
        buckets = launches["compress"]
        assert buckets > 0
        packed_too = POWER_SGD + Counter(pack=2, unpack=1)  # P and Q travel in another dtype than they are computed in
        assert launches == {name: buckets * count for name, count in packed_too.items()}


def norms_without_a_wait(rank: int, hook: str, view: bool) -> bool:
    """The norm while the host waits for nothing, against torch's."""
    fake_cuda.schedule("random", 2)
    model = wrapped(DEVICE, gradient_as_bucket_view=view)
    register(model, hook)
    for step in range(5):
        model.zero_grad()
        backward(model, rank, step, DEVICE)
    with fake_cuda.without_waits():
        norm, found = model.last_grad_norm(), model.found_inf()
    expected = torch.nn.utils.get_total_norm([parameter.grad.cpu() for parameter in model.parameters()])
    return torch.allclose(norm.cpu().float(), expected, rtol=1e-5) and not bool(found.cpu())


@pytest.mark.parametrize("view", [False, True], ids=["default", "view"])
@pytest.mark.parametrize("hook", ["", "bf16_compress_hook", "powerSGD_hook"])
def test_the_norm_is_known_without_a_wait(simulated_ranks: RankPool, hook: str, view: bool) -> None:
    assert simulated_ranks.run(norms_without_a_wait, 2, hook, view) == [True, True]


def launches_on(rank: int, capability: int) -> tuple[int, Tensor]:
    fake_cuda.build().set_capability(capability)
    try:
        # A pair of dtypes that nothing else in this process loads before for this device; on the first one the doctor
        # loads all.
        device = f"{DEVICE}:1"
        gradient = torch.arange(5.0).to(device).to(torch.float16)
        wire = torch.zeros(5, dtype=torch.bfloat16, device=device)
        load_kernels([(gradient.device, gradient.dtype, wire.dtype)])
        kernels = _C.Kernels(gradient.device)
        kernels.pack([gradient], [wire], 0.5)
        return kernels.launches, wire.cpu()
    finally:
        fake_cuda.build().set_capability(90)


@pytest.mark.parametrize(("capability", "launches"), [(75, 0), (90, 1)])
def test_gpus_that_the_kernels_are_not_for_get_operators(
    simulated_ranks: RankPool, capability: int, launches: int
) -> None:
    ((launched, wire),) = simulated_ranks.run(launches_on, 1, capability)
    assert launched == launches
    assert wire.tolist() == [0, 0.5, 1, 1.5, 2]


def uploads_of_changing_gradients(rank: int) -> list[tuple[int, list[float]]]:
    """After each call: tables that this bucket's kernels have sent up, and what the wire holds."""
    memory = torch.arange(8.0).to(DEVICE)
    first, second = memory[:4].view(2, 2), memory[4:].view(2, 2)
    wire = torch.zeros(8, device=DEVICE)
    load_kernels([(memory.device, torch.float32, torch.float32)])
    kernels = _C.Kernels(memory.device)
    found: list[tuple[int, list[float]]] = []

    def pack(*gradients: Tensor | None) -> None:
        kernels.pack(gradients, list(wire.view(2, 2, 2)))
        found.append((kernels.uploads, wire.tolist()))

    pack(first, second)
    memory.mul_(2)
    pack(first, second)
    pack(memory[:4].view(2, 2), memory[4:].view(2, 2))  # new tensor objects at the old addresses
    pack(second, first)
    pack(second.t(), first)  # an old address with other strides
    pack(second.t(), None)
    pack(second.t(), None)
    for _ in range(2):
        kernels.unpack([first, second], list(wire.view(2, 2, 2)))
        found.append((kernels.uploads, memory.tolist()))
    assert kernels.launches == len(found)
    return found


def test_tables_go_up_only_when_something_has_changed(simulated_ranks: RankPool) -> None:
    # At first that of addresses and that of chunks, then the one that has changed. Unpack has tables of its own.
    assert simulated_ranks.run(uploads_of_changing_gradients, 1) == [
        [
            (2, [0, 1, 2, 3, 4, 5, 6, 7]),
            (2, [0, 2, 4, 6, 8, 10, 12, 14]),
            (2, [0, 2, 4, 6, 8, 10, 12, 14]),
            (3, [8, 10, 12, 14, 0, 2, 4, 6]),
            (4, [8, 12, 10, 14, 0, 2, 4, 6]),
            (5, [8, 12, 10, 14, 0, 0, 0, 0]),
            (5, [8, 12, 10, 14, 0, 0, 0, 0]),
            (7, [8, 12, 10, 14, 0, 0, 0, 0]),
            (7, [8, 12, 10, 14, 0, 0, 0, 0]),
        ]
    ]


def train_on_two_devices(rank: int, devices: list[str]) -> list[Tensor]:
    torch.manual_seed(0)
    first, second = nn.Linear(8, 16), nn.Linear(16, 4)
    model = fastddp.DistributedDataParallel(nn.ModuleList([first.to(devices[0]), second.to(devices[1])]).eval())
    model.module.forward = lambda inputs: second(first(inputs).relu().to(devices[1]))
    for step in range(3):
        model.zero_grad()
        backward(model, rank, step, devices[0])
    return [parameter.grad.cpu() for parameter in model.parameters()]


def test_a_module_on_two_devices(ranks: RankPool, simulated_ranks: RankPool) -> None:
    expected = ranks.run(train_on_two_devices, 2, ["cpu", "cpu"])
    actual = simulated_ranks.run(train_on_two_devices, 2, [f"{DEVICE}:0", f"{DEVICE}:1"])
    for ours, theirs in zip(actual[0] + actual[1], expected[0] + expected[1], strict=True):
        assert torch.equal(ours, theirs)


def kernels_of_no_device_in_particular(rank: int) -> None:
    _C.Kernels(torch.device(DEVICE))


def test_a_device_without_an_index_is_refused(simulated_ranks: RankPool) -> None:
    (error,) = simulated_ranks.errors(kernels_of_no_device_in_particular, 1)
    assert error.type_name == "ValueError"
    assert "has no index; name one" in error.message
