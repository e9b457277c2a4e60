"""What bad input gets: an error that names the parameter and the remedy, and an object that still works."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fastddp
from ranks import RankPool


class Pair(nn.Module):
    """Two layers; `parts` says which ones the output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)

    def forward(self, x: Tensor, parts: str = "first second") -> Tensor:
        for part in parts.split():
            x = getattr(self, part)(x)
        return x.sum()


def frozen() -> nn.Module:
    return Pair().requires_grad_(False)


def lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))


def sync_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))


def on_meta() -> nn.Module:
    module = Pair()
    module.second.to("meta")
    return module


def wrap(rank: int, make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    fastddp.DistributedDataParallel(make(), **options)


def forward_without_its_group(rank: int, subgroup: bool) -> None:
    group = dist.new_group([0]) if subgroup else None
    model = fastddp.DistributedDataParallel(Pair(), process_group=group)
    dist.destroy_process_group(group)
    model(torch.ones(1, 2))


def wrap_without_a_group(rank: int) -> None:
    dist.destroy_process_group()
    fastddp.DistributedDataParallel(Pair())


def load_torchs_wrapper(rank: int) -> None:
    pickled = pickle.dumps(TorchDDP(Pair()))
    with fastddp.patch():
        pickle.loads(pickled)


def sparse_gradient(rank: int) -> None:
    model = fastddp.DistributedDataParallel(nn.Embedding(4, 2))
    model.module.sparse = True  # construction could not see it
    model(torch.tensor([1])).sum().backward()


def clip(rank: int, parameters: bool) -> None:
    model = fastddp.DistributedDataParallel(Pair())
    model(torch.ones(1, 2)).backward()
    fastddp.clip_grad_norm_(model.parameters() if parameters else model.module, 1.0)


def norm_too_early(rank: int, ask: Callable[[fastddp.DistributedDataParallel], Any]) -> None:
    ask(fastddp.DistributedDataParallel(Pair()))


TOO_EARLY = "Ask for it after backward() and before the model is called again"


@pytest.mark.parametrize(
    ("function", "args", "type_name", "texts"),
    [
        (wrap_without_a_group, (), None, ["init_process_group"]),
        (forward_without_its_group, (False,), None, ["process group", "has been destroyed"]),
        (forward_without_its_group, (True,), None, ["process group", "has been destroyed"]),
        (load_torchs_wrapper, (), "RuntimeError", ["a wrapper of torch's DistributedDataParallel", "state_dict()"]),
        (sparse_gradient, (), None, ["parameter weight in bucket 0 got a sparse gradient"]),
        (clip, (True,), "TypeError", ["got generator. Pass the wrapper"]),
        (clip, (False,), "TypeError", ["got Pair. Pass the wrapper"]),
        (norm_too_early, (fastddp.DistributedDataParallel.last_grad_norm,), "RuntimeError", [TOO_EARLY]),
        (norm_too_early, (fastddp.DistributedDataParallel.found_inf,), "RuntimeError", [TOO_EARLY]),
        (norm_too_early, (functools.partial(fastddp.clip_grad_norm_, max_norm=1.0),), "RuntimeError", [TOO_EARLY]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_mistake_is_named_with_its_remedy(
    ranks: RankPool, function: Callable[..., None], args: tuple[Any, ...], type_name: str | None, texts: list[str]
) -> None:
    (error,) = ranks.errors(function, 1, *args)
    assert type_name in (None, error.type_name)
    assert all(text in error.message for text in texts), error.message


@pytest.mark.parametrize(
    ("make", "options", "type_name", "text"),
    [
        (frozen, {}, "RuntimeError", "no parameter that requires a gradient"),
        (on_meta, {}, "RuntimeError", "second.weight is on the meta device"),
        (lazy, {}, "RuntimeError", "1.weight is uninitialised"),
        (sync_batch_norm, {}, "ValueError", "1 is a SyncBatchNorm, which torch runs on accelerators only"),
        (Pair, {"device_ids": [0]}, "ValueError", "Leave both None"),
        (Pair, {"output_device": 1}, "ValueError", "Leave both None"),
        (Pair, {"device_ids": [0, 1]}, "ValueError", "hold one device"),
        (Pair, {"bucket_cap_mb": -1}, "ValueError", "bucket_cap_mb must be a number of MiB >= 0, got -1"),
        (Pair, {"bucket_cap_mb": float("nan")}, "ValueError", "bucket_cap_mb must be a number"),
        (Pair, {"bucket_cap_mb": "many"}, "ValueError", "bucket_cap_mb must be a number"),
        (Pair, {"bucket_cap_mb": np.float32(-1)}, "ValueError", "bucket_cap_mb must be a number"),
        (Pair, {"bucket_cap_mb_list": []}, "ValueError", "bucket_cap_mb_list is empty"),
        (Pair, {"bucket_cap_mb_list": 5}, "ValueError", "bucket_cap_mb_list must be a list of sizes in MiB, got 5"),
        (Pair, {"bucket_cap_mb_list": "auto"}, "ValueError", "must be a list of sizes in MiB, got 'auto'"),
        (Pair, {"bucket_plan": 3}, "TypeError", "bucket_plan is what bucket_plan() returned, or the path of its file"),
        (Pair, {"wire_memory": "fast"}, "ValueError", 'wire_memory must be "registered", "symmetric" or None'),
        *(
            (Pair, {"wire_memory": "symmetric", option: value}, "ValueError", f"Leave out {option}, or wire_memory")
            for option, value in [
                ("gradient_as_bucket_view", True),
                ("lazy_bucket_allocation", True),
                ("hierarchy", "node"),
            ]
        ),
        (Pair, {"process_group": [0]}, "TypeError", "process_group must be a torch.distributed.ProcessGroup"),
        (int, {}, "TypeError", "module must be a torch.nn.Module, got 0"),
    ],
)
def test_construction_refuses(
    ranks: RankPool, make: Callable[[], nn.Module], options: dict[str, Any], type_name: str, text: str
) -> None:
    (error,) = ranks.errors(wrap, 1, make, options)
    assert error.type_name == type_name
    assert text in error.message


def accepted(rank: int, options: dict[str, Any]) -> list[Any]:
    models = [make(Pair(), **options) for make in (fastddp.DistributedDataParallel, TorchDDP)]
    return [(m.bucket_bytes_cap, m.bucket_bytes_cap_list, m.device_ids, m.output_device) for m in models]


@pytest.mark.parametrize(
    "options",
    [
        {"bucket_cap_mb": np.int64(1)},
        {"bucket_cap_mb": np.float32(0.5)},
        {"bucket_cap_mb_list": [np.int64(2), np.float64(1.0)]},
        {"output_device": 0},
        {"device_ids": [], "output_device": 0},
    ],
    ids=str,
)
def test_construction_takes_what_torch_takes(ranks: RankPool, options: dict[str, Any]) -> None:
    for ours, theirs in ranks.run(accepted, 2, options):
        assert ours == theirs


def caps_of(rank: int, caps: list[Any]) -> list[int]:
    return [fastddp.DistributedDataParallel(Pair(), bucket_cap_mb=cap).bucket_bytes_cap for cap in caps]


def test_sizes_of_buckets_do_not_overflow_in_small_integers(ranks: RankPool) -> None:
    caps = [np.int8(127), np.int32(127), np.uint64(127), float("inf")]
    assert ranks.run(caps_of, 1, caps) == [[*[127 * 2**20] * 3, 2**62]]


def with_sparse_buffer(rank: int, sparse_on: list[int], ignored: bool, options: dict[str, Any]) -> list[float]:
    module = Pair()
    adjacency = torch.eye(2)
    module.first.register_buffer("adjacency", adjacency.to_sparse() if rank in sparse_on else adjacency)
    if ignored:
        fastddp.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["first.adjacency"])
    model = fastddp.DistributedDataParallel(module, **options)
    model(torch.full((1, 2), rank + 1.0)).backward()
    return module.second.bias.grad.tolist()


@pytest.mark.parametrize("init_sync", [True, False])
def test_a_sparse_buffer_is_an_error_that_names_it_and_what_to_do(ranks: RankPool, init_sync: bool) -> None:
    for error in ranks.errors(with_sparse_buffer, 2, [0, 1], False, {"init_sync": init_sync}):
        assert error.type_name == "RuntimeError"
        assert "'first.adjacency' is a tensor of layout torch.sparse_coo" in error.message
        assert "_ddp_params_and_buffers_to_ignore" in error.message


@pytest.mark.parametrize(("ignored", "options"), [(True, {}), (False, {"broadcast_buffers": False})])
def test_a_sparse_buffer_that_is_left_to_each_rank_is_none(
    ranks: RankPool, ignored: bool, options: dict[str, Any]
) -> None:
    assert ranks.run(with_sparse_buffer, 2, [0, 1], ignored, options) == [[1.0, 1.0]] * 2


@pytest.mark.parametrize("sparse_on", [0, 1])
def test_a_buffer_that_is_sparse_on_one_rank_alone_is_an_error_on_both(ranks: RankPool, sparse_on: int) -> None:
    for error in ranks.errors(with_sparse_buffer, 2, [sparse_on], False, {}):
        assert "do not hold the same model" in error.message
        assert f"rank {sparse_on}: 'first.adjacency' of shape (2, 2), torch.sparse_coo" in error.message


class SeveralDevices(nn.Module):
    """One parameter on the CPU and one that says it is elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.here = nn.Parameter(torch.ones(1))
        self.there = nn.Parameter(torch.ones(1, device="meta"))
        # No second type of device can be counted on; only the check's view of it is needed.
        type(self.there).is_meta = property(lambda p: False)  # type: ignore[method-assign]


def wrap_several_devices(rank: int) -> None:
    original = nn.Parameter.is_meta
    try:
        with pytest.raises(ValueError, match="here on cpu, there on meta"):
            fastddp.DistributedDataParallel(SeveralDevices())
    finally:
        nn.Parameter.is_meta = original  # type: ignore[method-assign]


def test_parameters_on_several_types_of_device_are_refused(ranks: RankPool) -> None:
    ranks.run(wrap_several_devices, 1)


def wrap_different_frozen_parameters(rank: int) -> None:
    module = Pair()
    # As many bytes as on rank 0: only a comparison notices.
    module.frozen = nn.Parameter(torch.ones(3, 1 + rank), requires_grad=False)
    module.register_buffer("more", torch.ones(6 - 3 * rank))
    fastddp.DistributedDataParallel(module)


def test_frozen_parameters_that_differ_between_ranks_are_an_error_too(ranks: RankPool) -> None:
    for error in ranks.errors(wrap_different_frozen_parameters, 2):
        assert "frozen" in error.message


class UnlistedRanks(dict[int, int]):
    """What torch knows of the ranks of a group: looking one up is allowed, going through all of them is not."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("somebody went through all ranks of the group")

    keys = values = items = __iter__


def forward_without_a_list_of_ranks(rank: int) -> Tensor:
    model = fastddp.DistributedDataParallel(Pair())
    model(torch.ones(1, 2)).sum().backward()
    model(torch.ones(1, 2)).sum().backward()  # buckets are rebuilt, lanes are made
    of_ranks = dist.distributed_c10d._world.pg_group_ranks
    of_ranks[model.process_group] = UnlistedRanks(of_ranks[model.process_group])
    try:
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
    finally:
        of_ranks[model.process_group] = {number: number for number in range(dist.get_world_size())}
    return model.module.first.weight.grad


def test_a_forward_does_not_go_through_all_ranks_of_the_group(ranks: RankPool) -> None:
    mine, other = ranks.run(forward_without_a_list_of_ranks, 2)
    assert mine.equal(other)


def leave_out(rank: int, detected_by: str, view: bool) -> tuple[str, str, list[float], bool]:
    model = fastddp.DistributedDataParallel(Pair(), bucket_cap_mb=0, gradient_as_bucket_view=view)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = [parameter.clone() for parameter in model.parameters()]
    model(torch.ones(1, 2), "first").backward()
    with pytest.raises(RuntimeError) as caught:
        optimizer.step() if detected_by == "optimizer" else model(torch.ones(1, 2))
    untouched = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    state = model.reducer.state
    optimizer.zero_grad()
    model(torch.full((1, 2), rank + 1.0)).backward()
    optimizer.step()
    return str(caught.value), state, model.module.second.bias.grad.tolist(), untouched


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("detected_by", ["optimizer", "forward"])
def test_missing_gradients_are_named_before_an_optimizer_uses_the_others(
    ranks: RankPool, detected_by: str, view: bool
) -> None:
    for rank, (message, state, gradient, untouched) in enumerate(ranks.run(leave_out, 2, detected_by, view)):
        assert f"on rank {rank} without a gradient for 2 of 4 parameters" in message
        assert "parameter second.weight (number 2, bucket 1)" in message
        assert "parameter second.bias (number 3, bucket 0)" in message
        assert state == "failed"
        assert untouched
        assert gradient == [1.0, 1.0]  # the next step is right


def step_another_optimizer(rank: int) -> str:
    model = fastddp.DistributedDataParallel(Pair(), bucket_cap_mb=0)
    other = nn.Linear(2, 2)
    model(torch.ones(1, 2), "first").backward()
    other(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(other.parameters(), 0.1).step()
    return model.reducer.state


def test_an_optimizer_of_other_parameters_may_step_meanwhile(ranks: RankPool) -> None:
    assert ranks.run(step_another_optimizer, 2) == ["partial", "partial"]


def come_twice(rank: int) -> tuple[str, str, list[float]]:
    model = fastddp.DistributedDataParallel(Pair(), bucket_cap_mb=0)
    model(torch.ones(1, 2), "first").backward()
    with pytest.raises(RuntimeError) as caught:
        # The graph of a forward that another wrapper could have run: gradients of the same window once more.
        model.module(torch.ones(1, 2), "first").backward()
    state = model.reducer.state
    model.zero_grad()
    model(torch.ones(1, 2)).backward()
    return str(caught.value), state, model.module.second.bias.grad.tolist()


def test_a_gradient_that_comes_twice_is_an_error_that_names_it(ranks: RankPool) -> None:
    for rank, (message, state, gradient) in enumerate(ranks.run(come_twice, 2)):
        for text in ("parameter first.", f"got a second gradient in one window on rank {rank}", "no_sync()"):
            assert text in message
        assert (state, gradient) == ("failed", [1.0, 1.0])


def step_after_exception(rank: int) -> None:
    model = fastddp.DistributedDataParallel(Pair())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.module.second.weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(1, 2)).backward()
    with pytest.raises(RuntimeError, match=r"zero_grad\(\)"):
        optimizer.step()


def test_an_optimizer_step_with_what_a_failed_backward_left_is_an_error(ranks: RankPool) -> None:
    ranks.run(step_after_exception, 2)


class SizeInPythonAlone(dist.ProcessGroup):
    """As torchft's: what it says in Python, nobody in C++ hears."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # annotated as with a store

    def size(self) -> int:
        return 2


def test_a_process_group_that_counts_its_ranks_in_python_alone_is_refused() -> None:
    with pytest.raises(ValueError, match=r"SizeInPythonAlone says 2 ranks in Python and 1 in C\+\+"):
        fastddp.DistributedDataParallel(nn.Linear(2, 2), process_group=SizeInPythonAlone())
