"""The whole GPU path without a GPU: from `DistributedDataParallel(...)` to `parameter.grad` on the simulated device."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _MixedPrecision

import fake_cuda
import fastddp
from fastddp import _C
from fastddp.kernel_loading import kernel_cases
from fastddp.kernel_loading.launching import load_kernels
from hooks_by_name import register
from on_device import DEVICE, ORDERS, VIEWS, Case, batch
from on_ranks import on_ranks
from program_execution import differences
from programs import Program, programs
from ranks import RankPool

SLOW = pytest.mark.tier("nightly")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def under_order(rank: int, order: str, seed: int, program: Program) -> list[str]:
    fake_cuda.schedule(order, seed)
    return differences(rank, program, device=DEVICE)


@pytest.mark.timeout(0)  # a rank that hangs is reported by the ranks' own limit
@pytest.mark.parametrize(
    ("order", "number"),
    [("others_first", 3), *(pytest.param(order, 40, marks=SLOW) for order in ("lazy", "others_first", "random"))],
)
def test_gradients_are_those_of_the_reference(simulated_ranks: RankPool, order: str, number: int) -> None:
    seeds = iter(range(1_000_000))

    @settings(max_examples=number, phases=[Phase.generate])
    @given(program=programs(2, sparse=False))  # the simulated device has no sparse tensors
    def check(program: Program) -> None:
        assert simulated_ranks.run(under_order, 2, order, next(seeds), program) == [[], []]

    check()


CASES = [
    Case(),
    Case(set_to_none=False),
    *(Case(f"{dtype}, sums in {where}") for dtype in ("fp16", "bf16") for where in ("fp32", "the wire")),
    *map(Case, ("int8", "e4m3, drawn", "e5m2, no errors")),
    Case("int8", BF16),
    Case("PowerSGD", tolerance=1e-5),
    # Gloo's messages between two ranks read and write host memory only; its collectives stage a GPU's.
    *(Case(hook, backend=f"{DEVICE}_gloo") for hook in ("fp16, sums in fp32", "bf16, sums in fp32")),
    *(Case(options={"mixed_precision": _MixedPrecision(BF16, reduced_in)}) for reduced_in in (BF16, FP32)),
    *(Case(dtype=BF16, options={"main_grads": name}, microbatches=3) for name in ("grad", "main_grad")),
    Case(dtype=BF16, options={"main_grads": "grad", "find_unused_parameters": True}, microbatches=3),
    Case("bf16, sums in fp32", BF16, {"main_grads": "main_grad"}, microbatches=3),
    *(Case(hook, options={"hierarchy": "node"}, ranks=4) for hook in ("none", "fp16, sums in the wire", "int8")),
    Case("PowerSGD", options={"hierarchy": "node"}, ranks=4, tolerance=1e-4),
    *(Case(hook, by_method=True) for hook in ("none", "bf16, sums in the wire", "int8")),
    Case(dtype=BF16, options={"main_grads": "grad", "find_unused_parameters": True}, microbatches=3, by_method=True),
]


def train(rank: int, device: str, case: Case, view: bool, order: str = "lazy") -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of five steps and the parameters after them, and norms."""
    if device == DEVICE:
        fake_cuda.schedule(order, 1)
    model = case.wrapped(rank, device, gradient_as_bucket_view=view and "main_grad" not in case.options.values())
    found, norms = [], []
    for step in range(5):
        model.zero_grad(case.set_to_none)
        case.backward(model, batch(rank, step).to(device))
        gradients = case.gradients(model)
        found += [gradient.cpu().clone() for gradient in gradients]
        norms.append(model.last_grad_norm().cpu())
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(gradient, alpha=0.01)
    return [*found, *(parameter.detach().cpu() for parameter in model.parameters())], norms


@pytest.mark.tier("slow", but_one_in=10)
@pytest.mark.parametrize("case", CASES, ids=str)
@VIEWS
@ORDERS
def test_training_is_that_on_the_cpu(
    ranks: RankPool, simulated_ranks: RankPool, case: Case, view: bool, order: str
) -> None:
    expected = ranks.run(train, case.ranks, "cpu", case, view)
    actual = simulated_ranks.run(train, case.ranks, DEVICE, case, view, order, backend=case.backend)
    for (found, norms), (on_the_cpu, expected_norms) in zip(actual, expected, strict=True):
        case.compare(found, on_the_cpu)
        torch.testing.assert_close(norms, expected_norms, rtol=max(case.tolerance, 1e-5), atol=0)


BUCKETS = 2
ORTHOGONALISE = ["gram", "orthonormalise", "reorthonormalise"]
# Of a bucket in a steady step.
LAUNCHES: dict[str, list[str]] = {
    "none": ["pack", "unpack"],
    "fp16, sums in fp32": ["pack", "sum", "unpack"],
    "bf16, sums in the wire": ["pack", "unpack"],
    "int8": ["encode", "add", "decode"],
    "e4m3, drawn": ["encode", "add", "decode"],
    "python, elsewhere": ["pack", "unpack"],
    "PowerSGD": [
        *("compress", "project", "sum", "reconstruct"),
        # What is not compressed; on the way back with Q, which leaves the message in which factors are computed.
        *("pack", "unpack"),
        *ORTHOGONALISE,  # P
    ],
}
OF_A_WINDOW = {"PowerSGD": ORTHOGONALISE}  # the next Q of all buckets
NARROW_FACTORS = ["pack", "pack", "unpack", "unpack"]  # P and Q travel in another dtype than they are computed in


def launches_of_a_bucket(case: Case, view: bool, ends: str) -> list[str]:
    """Where gradients live in the wire, nothing is packed or unpacked."""
    hook, unneeded = case.hook, []
    if ends == "zeroed" and hook in ("none", "python, elsewhere"):
        unneeded.append("pack")
    if hook == "none" and (view or ends != "held"):
        unneeded.append("unpack")
    narrow = NARROW_FACTORS if hook == "PowerSGD" and case.dtype in (FP16, BF16) else []
    return [name for name in LAUNCHES[hook] + narrow if name not in unneeded]


@pytest.mark.tier("slow", but_one_in=3)
@VIEWS
@pytest.mark.parametrize("ends", ["dropped", "zeroed", "held"])
@pytest.mark.parametrize("case", [*map(Case, LAUNCHES), *(Case("PowerSGD", dtype) for dtype in (FP16, BF16))], ids=str)
@on_ranks(2, pool="simulated_ranks")
def test_a_steady_step_has_these_launches_and_sends_no_table_though_the_device_lags_behind(
    rank: int, case: Case, view: bool, ends: str
) -> None:
    fake_cuda.schedule("random", 1)
    model = case.wrapped(rank, DEVICE, gradient_as_bucket_view=view)
    held: dict[nn.Parameter, Tensor] = {}
    if ends == "held":
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter: held.update({parameter: parameter.grad}))
    inputs = torch.randn(4, 8).to(DEVICE)

    def step() -> None:
        model.zero_grad(ends != "zeroed")
        held.clear()
        case.backward(model, inputs)

    for number in range(14):
        step()
        if number == 5:
            fake_cuda.synchronize()  # which frees memory: addresses change once more
    fake_cuda.reset_records()
    with fake_cuda.without_waits():
        for _ in range(3):
            step()
        launches, uploads, waits = fake_cuda.launches(), fake_cuda.uploads(), fake_cuda.host_waits()
        norm, found = model.last_grad_norm(), model.found_inf()
    names = [name.removeprefix("fastddp_").removeprefix("block8_").split("_")[0] for name in launches]
    assert Counter(names) == Counter(
        3 * (BUCKETS * launches_of_a_bucket(case, view, ends) + OF_A_WINDOW.get(case.hook, []))
    )
    assert (uploads, waits, bool(found.cpu())) == (0, [], False)
    expected = torch.nn.utils.get_total_norm([parameter.grad.cpu().double() for parameter in model.parameters()])
    torch.testing.assert_close(norm.cpu().double(), expected, rtol=1e-5, atol=0)


def costs_of_the_host(ddp: Any, find_unused: bool, uses: int) -> tuple[int, list[str]]:
    """Collectives of a steady step, and what the host waits for until backward has returned."""
    fake_cuda.schedule("in_order")
    layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)]).to(DEVICE)
    layers.forward = lambda inputs: sum(layer(inputs) for layer in layers[:uses])
    options = {"watch": fastddp.Watch(stall=None)} if ddp is fastddp.DistributedDataParallel else {}
    model = ddp(layers, bucket_cap_mb=0.0001, find_unused_parameters=find_unused, **options)
    for step in range(6):
        if step == 5:
            fake_cuda.synchronize()
            fake_cuda.reset_records()
        model(torch.ones(2, 8, device=DEVICE)).sum().backward()
        waits = fake_cuda.host_waits()
    fake_cuda.synchronize()
    return fake_cuda.collectives(), waits


@pytest.mark.parametrize(
    ("find_unused", "uses", "ours", "theirs"),
    [
        (False, 4, (5, 0), (4, 0)),  # the status is a collective more
        (True, 4, (5, 1), (6, 0)),  # and says who used what: the host waits, since gradients may come late on any rank
        # Torch's has a collective for this and a bucket more, and waits where something is unused.
        (True, 3, (5, 1), (6, 1)),
    ],
)
@on_ranks(2, pool="simulated_ranks")
def test_what_a_step_costs_the_host_beside_torchs(
    rank: int, find_unused: bool, uses: int, ours: tuple[int, int], theirs: tuple[int, int]
) -> None:
    for ddp, expected in ((fastddp.DistributedDataParallel, ours), (TorchDDP, theirs)):
        collectives, waits = costs_of_the_host(ddp, find_unused, uses)
        assert (ddp, collectives, len(waits)) == (ddp, *expected), waits


@on_ranks(2, pool="simulated_ranks")
def test_a_steady_step_makes_no_event_and_writes_no_time(rank: int) -> None:
    """But those of its collectives and of autograd."""
    fake_cuda.schedule("in_order")
    # Its watch keeps two moments a bucket, of the last eight windows.
    model = Case().wrapped(rank, DEVICE, watch=fastddp.Watch(stall="report"))
    alone = copy.deepcopy(model.module)
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
    found = step(model)
    of_a_collective = 3  # when it may begin, that it is done, and in its future
    assert found == (of_a_collective * fake_cuda.collectives() + step(alone)[0], 0)


@on_ranks(1, pool="simulated_ranks")
def test_while_one_part_of_a_long_wire_is_added_up_the_other_travels(rank: int) -> None:
    fake_cuda.schedule("in_order")
    elements = 17 * 2**19  # 17 MiB in the wire: two parts
    module = nn.Linear(elements, 1, bias=False).to(DEVICE)
    model = fastddp.DistributedDataParallel(module, watch=fastddp.Watch(stall=None))
    register(model, "fp16, sums in fp32")
    model(torch.ones(1, elements, device=DEVICE)).sum().backward()
    assert torch.equal(module.weight.grad.cpu(), torch.ones(1, elements))
    there, sums, back = "ALLTOALL_BASE", "fastddp_sum_shards_fp16", "_ALLGATHER_BASE"
    found = [name for name in fake_cuda.history() if name in (there, sums, back)]
    assert Counter(found) == {there: 2, sums: 2, back: 2}
    assert found[:2] == [there, there]


def peak_of_steps(ddp: Any, view: bool, set_to_none: bool) -> int:
    """The most that was allocated in steady steps over what the model takes."""
    fake_cuda.schedule("in_order")
    module = nn.Sequential(*(nn.Linear(512, 512) for _ in range(14))).to(DEVICE)  # of 1 MiB each
    before = fake_cuda.allocated_bytes()
    model = ddp(module, bucket_cap_mb=25, gradient_as_bucket_view=view)
    inputs = torch.ones(1, 512, device=DEVICE)
    for step in range(5):
        if step == 3:
            fake_cuda.synchronize()
            fake_cuda.reset_peak()
            fake_cuda.reset_records()
        model(inputs).sum().backward()
        model.zero_grad(set_to_none)
    return fake_cuda.peak_bytes() - before


@pytest.mark.tier("slow", but_one_in=3)
@VIEWS
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
@on_ranks(2, pool="simulated_ranks")
def test_no_more_memory_than_torchs_ddp(rank: int, view: bool, set_to_none: bool) -> None:
    ours = peak_of_steps(fastddp.DistributedDataParallel, view, set_to_none)
    assert fake_cuda.uploads() == 0
    if view and set_to_none:  # two steps of one bucket of 14 MiB
        assert [name.split("_")[1] for name in fake_cuda.launches() if "pack" in name] == ["pack"] * 4
    # What has come of a bucket is packed when it is 12 MiB, and the layer that made it so is one that torch holds too.
    assert ours <= peak_of_steps(TorchDDP, view, set_to_none) + 12 * 2**20


@on_ranks(1, pool="simulated_ranks")
def test_tables_go_up_only_when_something_has_changed(rank: int) -> None:
    memory = torch.arange(8.0).to(DEVICE)
    first, second = memory[:4].view(2, 2), memory[4:].view(2, 2)
    wire = torch.zeros(8, device=DEVICE)
    load_kernels([(memory.device, torch.float32, torch.float32)])
    kernels = _C.Kernels(memory.device)

    def pack(*gradients: Tensor | None) -> tuple[int, list[float]]:
        """Tables that these kernels have sent up so far, and what the wire holds."""
        kernels.pack(gradients, list(wire.view(2, 2, 2)))
        return kernels.uploads, wire.tolist()

    assert pack(first, second) == (2, [0, 1, 2, 3, 4, 5, 6, 7])  # that of addresses and that of chunks
    memory.mul_(2)
    assert pack(first, second) == (2, [0, 2, 4, 6, 8, 10, 12, 14])
    same_addresses = memory[:4].view(2, 2), memory[4:].view(2, 2)
    assert pack(*same_addresses) == (2, [0, 2, 4, 6, 8, 10, 12, 14])
    assert pack(second, first) == (3, [8, 10, 12, 14, 0, 2, 4, 6])
    with_other_strides = second.t()
    assert pack(with_other_strides, first) == (4, [8, 12, 10, 14, 0, 2, 4, 6])
    for _ in range(2):
        assert pack(with_other_strides, None) == (5, [8, 12, 10, 14, 0, 0, 0, 0])
    for _ in range(2):  # which has tables of its own
        kernels.unpack([first, second], list(wire.view(2, 2, 2)))
        assert (kernels.uploads, memory.tolist()) == (7, [8, 12, 10, 14, 0, 0, 0, 0])
    assert kernels.launches == 9


@on_ranks(1, pool="simulated_ranks")
def test_tables_that_come_back_within_eight_calls_stay_on_the_device(rank: int) -> None:
    memory, wire = torch.arange(10.0).to(DEVICE), torch.zeros(1, device=DEVICE)
    load_kernels([(memory.device, torch.float32, torch.float32)])
    kernels = _C.Kernels(memory.device)
    for number, places in enumerate([range(8), range(8), [8], range(1, 8), [0]]):
        for place in places:
            kernels.pack([memory[place : place + 1]], [wire])
            assert wire.item() == place
        assert kernels.uploads == 1 + [8, 8, 9, 9, 10][number]  # that of chunks, and those of addresses


@on_ranks(1, pool="simulated_ranks")
def test_a_kernel_writes_small_tables_and_large_ones_are_copied(rank: int) -> None:
    count = kernel_cases.WORDS // 2  # gradients, of two words each; a chunk has four
    values, wire = torch.arange(count + 1.0).to(DEVICE), torch.zeros(count + 1, device=DEVICE)
    load_kernels([(values.device, torch.float32, torch.float32)])
    for gradients, copies in ((count // 2, 0), (count, 1), (count + 1, 2)):
        kernels = _C.Kernels(values.device)
        fake_cuda.synchronize()
        fake_cuda.reset_records()
        kernels.pack(list(values[:gradients].split(1)), list(wire[:gradients].split(1)), 2.0)
        assert torch.equal(wire[:gradients].cpu(), 2 * values[:gradients].cpu())
        ran = Counter(fake_cuda.history())
        assert (ran["upload"], ran["fastddp_write_words"]) == (copies, 2 - copies)


class CastOnUse(nn.Sequential):
    """Layers of several sizes in bf16, whose weights are cast for a forward, as under autocast."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(width, width) for width in (96, 32, 96, 200, 96) * 3))

    def forward(self, inputs: Tensor) -> Tensor:
        casts = []
        for layer in self:
            casts.append((layer.weight.to(BF16), layer.bias.to(BF16)))
            width = len(layer.bias)
            inputs = nn.functional.gelu(nn.functional.linear(inputs.to(BF16)[:, :width], *casts[-1])).float()
            inputs = nn.functional.pad(inputs, (0, 200 - width))
        return inputs


@pytest.mark.tier("slow", but_one_in=3)
@pytest.mark.parametrize("hook", ["none", "int8", "PowerSGD"])
@VIEWS
@on_ranks(2, pool="simulated_ranks")
def test_gradients_come_to_lie_where_they_were_though_tables_and_they_share_an_allocator(
    rank: int, hook: str, view: bool
) -> None:
    fake_cuda.schedule("in_order")
    options = {"gradient_as_bucket_view": view, "watch": fastddp.Watch(stall=None)}
    model = fastddp.DistributedDataParallel(CastOnUse().to(DEVICE), bucket_cap_mb=0.2, **options)
    register(model, hook)
    inputs = torch.ones(2, 200, device=DEVICE)
    uploads = []
    for step in range(24):
        fake_cuda.reset_records()
        model(inputs).sum().backward()
        uploads.append(fake_cuda.uploads())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=1e-3)
        model.zero_grad()
        if step % 3 == 0:
            fake_cuda.synchronize()
    assert (max(uploads[:4]) > 0, uploads[-4:]) == (True, [0] * 4), uploads


def train_on_two_devices(rank: int, devices: list[str]) -> list[Tensor]:
    torch.manual_seed(0)
    first, second = nn.Linear(8, 16), nn.Linear(16, 4)
    model = fastddp.DistributedDataParallel(nn.ModuleList([first.to(devices[0]), second.to(devices[1])]).eval())
    model.module.forward = lambda inputs: second(first(inputs).relu().to(devices[1]))
    for step in range(3):
        model.zero_grad()
        model(batch(rank, step).to(devices[0])).square().sum().backward()
    return [parameter.grad.cpu() for parameter in model.parameters()]


def test_a_module_on_two_devices(ranks: RankPool, simulated_ranks: RankPool) -> None:
    expected = ranks.run(train_on_two_devices, 2, ["cpu", "cpu"])
    Case().compare(simulated_ranks.run(train_on_two_devices, 2, [f"{DEVICE}:0", f"{DEVICE}:1"]), expected)


@on_ranks(1, pool="simulated_ranks")  # the simulated device has no kernels for the statistics of several
def test_a_module_with_sync_batch_norm(rank: int) -> None:
    module = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)))
    alone = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    alone.load_state_dict(module.state_dict())
    model = fastddp.DistributedDataParallel(module.to(DEVICE))
    for wrapped_or_not, inputs in ((model, batch(rank, 0).to(DEVICE)), (alone, batch(rank, 0))):
        wrapped_or_not(inputs).square().sum().backward()
    for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), expected.grad)
    assert model._get_ddp_logging_data()["has_sync_bn"] == 1
