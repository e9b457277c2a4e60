"""gradient_dtype=torch.float32: what microbatches and ranks add up, where it lives, and who works with it."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torchs_hooks
from torch.profiler import ProfilerActivity, profile

import fastddp
from fastddp import comm_hooks
from ranks import RankPool

ATTRIBUTES = pytest.mark.parametrize("attribute", ["grad", "main_grad"])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


class Net(nn.Module):
    """Layers of 16 bits, and parameters of fp32 between them."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 24, dtype=dtype)
        self.scale = nn.Parameter(torch.ones(24))
        self.last = nn.Linear(24, 4, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.to(self.first.weight.dtype)).relu() * self.scale
        return self.last(hidden.to(self.last.weight.dtype)).float()


def batch(rank: int, number: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(1000 * rank + number))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def gradients(model: fastddp.DistributedDataParallel, attribute: str) -> list[Tensor]:
    return [getattr(parameter, attribute) for parameter in model.module.parameters()]


def step(model: fastddp.DistributedDataParallel, rank: int, numbers: list[int]) -> None:
    """One window: these microbatches, the last of which synchronises."""
    for number in numbers:
        with model.no_sync() if number != numbers[-1] else contextlib.nullcontext():
            loss_of(model, batch(rank, number)).backward()


def expected(module: nn.Module, rank: int, numbers: list[int]) -> list[Tensor]:
    """In plain torch: each microbatch's gradient as autograd makes it, then everything in fp32."""
    twin = copy.deepcopy(module)
    sums = [torch.zeros(parameter.shape) for parameter in twin.parameters()]
    for number in numbers:
        twin.zero_grad()
        loss_of(twin, batch(rank, number)).backward()
        for total, parameter in zip(sums, twin.parameters(), strict=True):
            total.add_(parameter.grad.float())
    for total in sums:
        total.mul_(1 / dist.get_world_size())
        dist.all_reduce(total)
    return sums


# ------------------------------------------------------------------------------------------------------------- values


def averages(
    rank: int, dtype: torch.dtype, attribute: str, microbatches: int, options: dict[str, object]
) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Of three windows, what there is and what there should be; buckets are rebuilt behind the first."""
    model = fastddp.DistributedDataParallel(
        Net(dtype), gradient_dtype=torch.float32, gradient_attribute=attribute, **{"bucket_cap_mb": 0.0005, **options}
    )
    found = []
    for window in range(3):
        numbers = [100 * window + microbatch for microbatch in range(microbatches)]
        model.zero_grad()
        step(model, rank, numbers)
        found.append(([g.clone() for g in gradients(model, attribute)], expected(model.module, rank, numbers)))
        assert attribute == "grad" or all(parameter.grad is None for parameter in model.parameters())
    return found


@ATTRIBUTES
@DTYPES
@pytest.mark.parametrize("microbatches", [1, 2, 8])
def test_two_ranks_have_every_bit_of_the_sum_in_fp32(
    ranks: RankPool, dtype: torch.dtype, attribute: str, microbatches: int
) -> None:
    for windows in ranks.run(averages, 2, dtype, attribute, microbatches, {}):
        for actual, reference in windows:
            assert all(gradient.dtype == torch.float32 for gradient in actual)
            assert all(map(torch.equal, actual, reference))


@ATTRIBUTES
@pytest.mark.parametrize("microbatches", [1, 3])
def test_three_ranks_have_the_sum_to_the_rounding_of_fp32(ranks: RankPool, attribute: str, microbatches: int) -> None:
    for windows in ranks.run(averages, 3, torch.bfloat16, attribute, microbatches, {}):
        for actual, reference in windows:
            torch.testing.assert_close(actual, reference, rtol=1e-6, atol=1e-9)


OPTIONS: list[dict[str, object]] = [
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"bucket_cap_mb": None, "bucket_cap_mb_list": [0.0001, 0.001]},
    {"gradient_average": "sum"},
    {"on_corruption": "raise"},
    {"audit_every": 2},
]


@pytest.mark.parametrize(
    ("attribute", "options"),
    [("grad", {"gradient_as_bucket_view": True})] + [(a, o) for a in ("grad", "main_grad") for o in OPTIONS],
    ids=lambda value: value if isinstance(value, str) else list(value)[-1],
)
def test_options_do_not_change_the_sum(ranks: RankPool, attribute: str, options: dict[str, object]) -> None:
    factor = 2 if "gradient_average" in options else 1
    for windows in ranks.run(averages, 2, torch.bfloat16, attribute, 2, options):
        for actual, reference in windows:
            assert all(torch.equal(a, factor * r) for a, r in zip(actual, reference, strict=True))


class Times(nn.Module):
    """Its gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(40, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def large_and_small(rank: int, options: dict[str, object]) -> float:
    model = fastddp.DistributedDataParallel(Times(), gradient_average="sum", **options)
    values = [256.0 if rank == 0 else 0.0, 1.0, 1.0]
    for number, value in enumerate(values):
        with model.no_sync() if number + 1 < len(values) else contextlib.nullcontext():
            model(torch.full((40,), value, dtype=torch.bfloat16)).backward()
    gradient = getattr(model.module.weight, options.get("gradient_attribute", "grad"))
    return gradient[0].item()


def test_fp32_keeps_what_bf16_loses(ranks: RankPool) -> None:
    # 256 + 1 + 1 on rank 0, 0 + 1 + 1 on rank 1.
    assert ranks.run(large_and_small, 2, {}) == [258.0, 258.0]  # bf16 adds 2 to 256, and lost 1 twice before
    for attribute in ("grad", "main_grad"):
        options = {"gradient_dtype": torch.float32, "gradient_attribute": attribute}
        assert ranks.run(large_and_small, 2, options) == [260.0, 260.0]


# ------------------------------------------------------------------------------------------------------ what travels


def hooked(rank: int, attribute: str, hook: str) -> tuple[list[Tensor], list[Tensor], set[torch.dtype], set[bool]]:
    model = fastddp.DistributedDataParallel(
        Net(), gradient_dtype=torch.float32, gradient_attribute=attribute, bucket_cap_mb=0.0005
    )
    hooks = {
        "bf16": (None, comm_hooks.bf16_compress_hook),
        "fp16": (None, comm_hooks.fp16_compress_hook),
        "noop": (None, comm_hooks.noop_hook),
        "int8": (comm_hooks.BlockState(), comm_hooks.int8_compress_hook),
        "torchs": (None, calls_allreduce),
    }
    state, function = hooks[hook]
    model.register_comm_hook(state, function)
    for window in range(4):
        model.zero_grad()
        step(model, rank, [10 * window, 10 * window + 1])
    actual = [g.clone() for g in gradients(model, attribute)]
    wires = {layout.dtype for layout in model.reducer.wire_layouts()}
    return actual, expected(model.module, rank, [30, 31]), wires, {g.dtype == torch.float32 for g in actual}


def calls_allreduce(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    assert bucket.buffer().dtype == torch.float32
    assert all(parameter.untyped_storage().nbytes() > 0 for parameter in bucket.parameters())
    return torchs_hooks.allreduce_hook(None, bucket)


@ATTRIBUTES
@pytest.mark.parametrize(
    ("hook", "wire", "tolerance"), [("bf16", torch.bfloat16, 2**-7), ("fp16", torch.float16, 1e-3)]
)
def test_a_hook_chooses_what_travels_and_gradients_stay_fp32(
    ranks: RankPool, attribute: str, hook: str, wire: torch.dtype, tolerance: float
) -> None:
    for actual, reference, wires, all_fp32 in ranks.run(hooked, 2, attribute, hook):
        assert wires == {wire}
        assert all_fp32 == {True}
        torch.testing.assert_close(actual, reference, rtol=tolerance, atol=1e-4)


@ATTRIBUTES
def test_a_hook_written_for_torch_gets_fp32_and_the_parameters(ranks: RankPool, attribute: str) -> None:
    for actual, reference, wires, all_fp32 in ranks.run(hooked, 2, attribute, "torchs"):
        assert wires == {torch.float32}
        assert all_fp32 == {True}
        assert all(map(torch.equal, actual, reference))


@ATTRIBUTES
def test_without_communication_gradients_are_this_ranks_sum(ranks: RankPool, attribute: str) -> None:
    found = ranks.run(hooked, 2, attribute, "noop")
    mean = [(a + b) / 2 for a, b in zip(found[0][0], found[1][0], strict=True)]
    torch.testing.assert_close(mean, found[0][1], rtol=1e-6, atol=1e-9)
    assert not torch.equal(found[0][0][0], found[1][0][0])


def power_sgd(rank: int, attribute: str | None) -> tuple[list[Tensor], set[torch.dtype]]:
    """Of bf16 parameters, or (None) of the same values in fp32, with the gradients that bf16 parameters have."""
    module = nn.Linear(64, 48, bias=False, dtype=torch.bfloat16 if attribute else torch.float32)
    nn.init.ones_(module.weight)
    options = {"gradient_dtype": torch.float32, "gradient_attribute": attribute} if attribute else {}
    model = fastddp.DistributedDataParallel(module, **options)
    state = comm_hooks.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, comm_hooks.powerSGD_hook)
    for window in range(4):
        model.zero_grad()
        x = torch.randn(48, 64, generator=torch.Generator().manual_seed(10 * rank + window)).bfloat16()
        (model(torch.eye(64, dtype=module.weight.dtype)).t() * x).sum().backward()  # the gradient is x
    return [getattr(module.weight, attribute or "grad")], {error.dtype for error in state.errors.values()}


@ATTRIBUTES
def test_power_sgd_is_what_it_is_for_fp32_parameters(ranks: RankPool, attribute: str) -> None:
    wide = ranks.run(power_sgd, 2, None)
    for (actual, errors), (reference, _) in zip(ranks.run(power_sgd, 2, attribute), wide, strict=True):
        assert errors == {torch.float32}
        assert all(map(torch.equal, actual, reference))


# ------------------------------------------------------------------------------------------------------------ memory

WIDTH, LAYERS = 256, 12


def live_bytes(rank: int, attribute: str, hook: bool, set_to_none: bool) -> tuple[int, int]:
    """Beyond the parameters: the most that lived in the last steps, and what lives behind the last."""
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(LAYERS)))
    inputs = torch.ones(4, WIDTH, dtype=torch.bfloat16)
    live = 0
    model = None
    for number in range(4):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            if model is None:
                model = fastddp.DistributedDataParallel(
                    module,
                    bucket_cap_mb=0.6,
                    init_sync=False,
                    gradient_dtype=torch.float32,
                    gradient_attribute=attribute,
                )
                if hook:
                    model.register_comm_hook(None, comm_hooks.bf16_compress_hook)
            for last in (False, False, True):
                with contextlib.nullcontext() if last else model.no_sync():
                    model(inputs).sum().backward()
            if number < 3:
                model.zero_grad(set_to_none=set_to_none)
        top = live
        for event in recorded.profiler.kineto_results.events():
            if event.name() == "[memory]":
                live += event.nbytes()
                top = max(top, live)
    return top, live


@ATTRIBUTES
@pytest.mark.parametrize("set_to_none", [True, False])
def test_there_is_one_fp32_copy_of_all_gradients(ranks: RankPool, attribute: str, set_to_none: bool) -> None:
    elements = LAYERS * (WIDTH + 1) * WIDTH
    a_layer = (WIDTH + 1) * WIDTH * (2 + 4)  # what autograd has made, and its cast
    for top, live in ranks.run(live_bytes, 2, attribute, False, set_to_none):
        assert 4 * elements <= live <= 4 * elements + 32768
        assert top <= 4 * elements + 2 * a_layer + 65536


@ATTRIBUTES
def test_under_a_cast_hook_there_are_gradients_and_a_wire_of_16_bits(ranks: RankPool, attribute: str) -> None:
    elements = LAYERS * (WIDTH + 1) * WIDTH
    for _, live in ranks.run(live_bytes, 2, attribute, True, True):
        # And what sums in fp32 over gloo take: as much as the wire.
        assert (4 + 2) * elements <= live <= (4 + 2 + 2) * elements + 65536


def places(rank: int, attribute: str) -> tuple[list[list[int]], int]:
    """Where gradients are behind each microbatch of two windows, and how many storages that is."""
    model = fastddp.DistributedDataParallel(
        Net(), gradient_dtype=torch.float32, gradient_attribute=attribute, bucket_cap_mb=25
    )
    found = []
    for window in range(3):
        model.zero_grad()
        for number in range(3):
            step(model, rank, [number]) if number == 2 else step_locally(model, rank, number)
            if window > 0:  # before that, buckets have not been rebuilt
                found.append([gradient.data_ptr() for gradient in gradients(model, attribute)])
    return found, len({gradient.untyped_storage().data_ptr() for gradient in gradients(model, attribute)})


def step_locally(model: fastddp.DistributedDataParallel, rank: int, number: int) -> None:
    with model.no_sync():
        loss_of(model, batch(rank, number)).backward()


@ATTRIBUTES
def test_microbatches_add_up_in_the_wire(ranks: RankPool, attribute: str) -> None:
    for found, storages in ranks.run(places, 2, attribute):
        assert storages == 1  # one bucket
        assert all(of_microbatch == found[0] for of_microbatch in found)


# ------------------------------------------------------------------------------------------- optimizers, clipping, AMP


def trained(rank: int, attribute: str, name: str, foreach: bool) -> tuple[list[Tensor], list[Tensor]]:
    """With fp32 copies of the parameters, which take the gradients as their own; and the same in plain torch."""
    model = fastddp.DistributedDataParallel(
        Net(), gradient_dtype=torch.float32, gradient_attribute=attribute, bucket_cap_mb=0.0005
    )
    twin = copy.deepcopy(model.module)
    make = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}[name]
    copies = [[p.detach().float() for p in module.parameters()] for module in (model.module, twin)]
    optimizers = [make(of, lr=0.05, foreach=foreach) for of in copies]
    for window in range(4):
        numbers = [10 * window, 10 * window + 1]
        step(model, rank, numbers)
        for masters, found in zip(copies, (gradients(model, attribute), expected(twin, rank, numbers)), strict=True):
            for master, gradient in zip(masters, found, strict=True):
                master.grad = gradient
        for optimizer, masters, module in zip(optimizers, copies, (model.module, twin), strict=True):
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for parameter, master in zip(module.parameters(), masters, strict=True):
                    parameter.copy_(master)
        model.zero_grad()
    return [p.detach() for p in model.module.parameters()], [p.detach() for p in twin.parameters()]


@ATTRIBUTES
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("foreach", [False, True], ids=["each", "foreach"])
def test_an_optimizer_over_fp32_copies_trains_bit_for_bit(
    ranks: RankPool, attribute: str, name: str, foreach: bool
) -> None:
    for actual, reference in ranks.run(trained, 2, attribute, name, foreach):
        assert all(map(torch.equal, actual, reference))


def stepped(rank: int, kind: str, foreach: bool) -> list[torch.dtype]:
    """An optimizer over the bf16 parameters themselves."""
    model = fastddp.DistributedDataParallel(Net(), gradient_dtype=torch.float32)
    before = [p.detach().clone() for p in model.parameters()]
    if kind == "SGD":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=foreach)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), 0.1, foreach=foreach)
        for p in model.parameters():
            state = {"exp_avg": torch.zeros(p.shape), "exp_avg_sq": torch.zeros(p.shape)}
            optimizer.state[p] = {"step": torch.tensor(0.0), **state}
    for window in range(2):
        optimizer.zero_grad()
        step(model, rank, [window])
        optimizer.step()
    assert all(p.isfinite().all() and not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    name = "momentum_buffer" if kind == "SGD" else "exp_avg"
    return [optimizer.state[p][name].dtype for p in model.parameters()]


@pytest.mark.parametrize("foreach", [False, True], ids=["each", "foreach"])
@pytest.mark.parametrize("kind", ["SGD", "AdamW with state in fp32"])
def test_torchs_optimizers_take_fp32_gradients_of_bf16_parameters(ranks: RankPool, kind: str, foreach: bool) -> None:
    for dtypes in ranks.run(stepped, 2, kind, foreach):
        assert set(dtypes) == {torch.float32}


def norms(rank: int, attribute: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    model = fastddp.DistributedDataParallel(
        Net(), gradient_dtype=torch.float32, gradient_attribute=attribute, bucket_cap_mb=0.0005
    )
    step(model, rank, [0, 1])
    before = torch.nn.utils.get_total_norm(gradients(model, attribute))
    assert model.found_inf().item() == 0
    last = model.last_grad_norm()
    clipped = fastddp.clip_grad_norm_(model, 0.01)
    return before, last, clipped, torch.nn.utils.get_total_norm(gradients(model, attribute))


@ATTRIBUTES
def test_norm_and_clipping_are_those_of_the_fp32_gradients(ranks: RankPool, attribute: str) -> None:
    for before, last, returned, after in ranks.run(norms, 2, attribute):
        torch.testing.assert_close(last, before)
        torch.testing.assert_close(returned, before)
        assert last.dtype == torch.float32
        assert abs(after.item() - 0.01) < 1e-5


def scaled(rank: int) -> tuple[float, float, bool]:
    """fp16 parameters, whose sum of gradients is beyond what fp16 holds until it is unscaled."""
    model = fastddp.DistributedDataParallel(Net(torch.float16), gradient_dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    for last in (False, True):
        with contextlib.nullcontext() if last else model.no_sync():
            scaler.scale(loss_of(model, batch(rank, 0))).backward()
    largest = max(p.grad.abs().max().item() for p in model.parameters())
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    norm = torch.nn.utils.get_total_norm(gradients(model, "grad")).item()
    before = model.module.first.weight.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    return largest, norm, bool((model.module.first.weight != before).any())


def test_grad_scaler_unscales_fp32_gradients_of_fp16_parameters(ranks: RankPool) -> None:
    for largest, norm, has_stepped in ranks.run(scaled, 2):
        assert largest > 100
        assert norm <= 1.0 + 1e-5
        assert has_stepped


# ------------------------------------------------------------------------------------------------------------ refusals


def refusals(rank: int) -> None:
    wide = {"gradient_dtype": torch.float32}
    apart = {**wide, "gradient_attribute": "main_grad"}
    with pytest.raises(ValueError, match=r"gradient_dtype must be torch\.float32 or None, got torch\.float64"):
        fastddp.DistributedDataParallel(Net(), gradient_dtype=torch.float64)
    with pytest.raises(ValueError, match='gradient_attribute must be "grad" or "main_grad", got \'grads\''):
        fastddp.DistributedDataParallel(Net(), **wide, gradient_attribute="grads")
    with pytest.raises(ValueError, match='gradient_attribute="main_grad" is for gradient_dtype'):
        fastddp.DistributedDataParallel(Net(), gradient_attribute="main_grad")
    with pytest.raises(ValueError, match="gradient_as_bucket_view speaks"):
        fastddp.DistributedDataParallel(Net(), **apart, gradient_as_bucket_view=True)
    mixed = torch.nn.parallel.distributed._MixedPrecision(torch.bfloat16)
    with pytest.raises(ValueError, match="leave out gradient_dtype, and wrap the module with fp32 parameters"):
        fastddp.DistributedDataParallel(Net(), **wide, mixed_precision=mixed)
    embedding = nn.Embedding(4, 2, sparse=True, dtype=torch.bfloat16)
    for options in (wide, apart):
        with pytest.raises(ValueError, match="The gradients of parameter weight are sparse"):
            fastddp.DistributedDataParallel(embedding, **options)
    module = Net()
    loss_of(module, batch(0, 0)).backward()
    with pytest.raises(RuntimeError, match=r"Parameter first.weight has a gradient in torch.bfloat16.*zero_grad"):
        fastddp.DistributedDataParallel(module, **wide)
    assert module.first.weight.grad_dtype == torch.bfloat16  # as it was


def refused_optimizers(rank: int) -> dict[str, str]:
    """What steps with fp32 gradients of bf16 parameters say; empty: nothing."""
    model = fastddp.DistributedDataParallel(Net(), gradient_dtype=torch.float32)
    loss_of(model, batch(0, 0)).backward()
    with_fp32_state = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        averages = {name: torch.zeros_like(parameter, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
        with_fp32_state.state[parameter] = {"step": torch.zeros(()), **averages}
    said = {}
    for name, optimizer in {
        "AdamW": torch.optim.AdamW(model.parameters()),
        "SGD, fused": torch.optim.SGD(model.parameters(), fused=True),
        "AdamW, fp32 state": with_fp32_state,
        **{kind: getattr(torch.optim, kind)(model.parameters()) for kind in TAKES_FP32},
    }.items():
        try:
            optimizer.step()
            said[name] = ""
        except RuntimeError as error:
            said[name] = str(error)
    return said


TAKES_FP32 = ("SGD", "Adagrad", "Adadelta", "Adafactor", "ASGD", "RMSprop", "Rprop")


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch has no gradients of another dtype")
def test_an_optimizer_that_cannot_take_fp32_gradients_is_told_which_can(ranks: RankPool) -> None:
    (said,) = ranks.run(refused_optimizers, 1)
    assert "AdamW cannot step with parameter first.weight, which is torch.bfloat16" in said.pop("AdamW")
    assert "SGD with fused=True cannot step" in said.pop("SGD, fused")
    assert set(said.values()) == {""}


def wrap_again_without(rank: int) -> None:
    module = Net()
    model = fastddp.DistributedDataParallel(module, gradient_dtype=torch.float32)
    loss_of(model, batch(0, 0)).backward()
    del model
    with pytest.raises(RuntimeError, match=r"Parameter first.weight has a gradient in torch.float32.*zero_grad"):
        fastddp.DistributedDataParallel(module)
    module.zero_grad()
    model = fastddp.DistributedDataParallel(module)
    loss_of(model, batch(0, 0)).backward()
    assert module.first.weight.grad_dtype == module.first.weight.grad.dtype == torch.bfloat16


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch has no gradients of another dtype")
def test_a_wrapper_without_gradient_dtype_has_gradients_of_the_parameters_dtype_again(ranks: RankPool) -> None:
    ranks.run(wrap_again_without, 2)


def test_what_cannot_be_is_refused(ranks: RankPool) -> None:
    ranks.run(refusals, 1)


class WithoutGradDtype:
    """What config.py asks of torch, under 2.11."""

    Tensor = object
    float32 = torch.float32
    __version__ = "2.11.0"


def of_an_older_torch(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastddp.config.torch", WithoutGradDtype)
        with pytest.raises(
            ValueError, match=r'2.11.0, does not have. Use a newer one, or gradient_attribute="main_grad"'
        ):
            fastddp.DistributedDataParallel(Net(), gradient_dtype=torch.float32)
        model = fastddp.DistributedDataParallel(Net(), gradient_dtype=torch.float32, gradient_attribute="main_grad")
        loss_of(model, batch(0, 0)).backward()
    assert all(gradient.any() for gradient in gradients(model, "main_grad"))


def test_a_torch_without_grad_dtype_has_main_grad(ranks: RankPool) -> None:
    ranks.run(of_an_older_torch, 1)
