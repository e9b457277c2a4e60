"""What bad input gets: an error that names the parameter and the remedy, and an object that still works."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel.distributed import _BufferCommHookLocation, _MixedPrecision
from torch.nn.utils.parametrizations import orthogonal

import fastddp
from fastddp import comm_hooks
from fastddp.errors import see
from on_ranks import of_ranks, on_ranks


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


def wrap(module: Any = None, **options: Any) -> Any:
    return fastddp.DistributedDataParallel(Pair() if module is None else module, **options)


def on_several_devices() -> None:
    module = nn.ParameterDict({"here": torch.ones(1), "there": torch.ones(1, device="meta")})
    # No second type of device can be counted on; only the check's view of it is needed.
    with mock.patch.object(nn.Parameter, "is_meta", property(lambda parameter: False), create=True):
        wrap(module)


def without_a_group() -> None:
    dist.destroy_process_group()
    wrap()


def forward_without_its_group(group: Any) -> None:
    model = wrap(process_group=group)
    dist.destroy_process_group(group)
    model(torch.ones(1, 2))


def sparse_gradient() -> None:
    model = wrap(nn.Embedding(4, 2))
    model.module.sparse = True  # construction could not see it
    model(torch.tensor([1])).sum().backward()


def clip(what: Callable[[Any], Any]) -> None:
    model = wrap()
    model(torch.ones(1, 2)).backward()
    fastddp.clip_grad_norm_(what(model), 1.0)


def symmetric(**options: Any) -> None:
    wrap(wire_memory="symmetric", **options)


def low_precision(*dtypes: Any, module: Any = None) -> None:
    wrap(module, mixed_precision=_MixedPrecision(*dtypes))


def buffer_hook(hook: Any, location: Any) -> None:
    wrap()._register_buffer_comm_hook(None, hook, location)


BEFORE = _BufferCommHookLocation.PRE_FORWARD
CAP, CAPS = "bucket_cap_mb must be a number", "bucket_cap_mb_list must be a list of sizes in MiB, got "
PASS_THE_WRAPPER, TOO_EARLY = "Pass the wrapper", "Ask for it after backward() and before the model is called again"

# What one rank does; the error's type; words in it.
MISTAKES: dict[str, tuple[Callable[[], Any], str, str]] = {
    "no module": (lambda: wrap(0), "TypeError", "module must be a torch.nn.Module, got 0"),
    "meta": (lambda: wrap(nn.Linear(2, 2, device="meta")), "RuntimeError", "weight is on the meta device"),
    "lazy": (lambda: wrap(nn.Sequential(nn.LazyLinear(3))), "RuntimeError", "0.weight is uninitialised"),
    "sync batch norm": (lambda: wrap(nn.SyncBatchNorm(2)), "ValueError", "SyncBatchNorm, which torch runs on accel"),
    "two devices": (on_several_devices, "ValueError", "here on cpu, there on meta"),
    "device ids": (lambda: wrap(device_ids=[0]), "ValueError", "Leave both None"),
    "two device ids": (lambda: wrap(device_ids=[0, 1]), "ValueError", "hold one device"),
    "cap -1": (lambda: wrap(bucket_cap_mb=-1), "ValueError", f"{CAP} of MiB >= 0, got -1"),
    "cap a word": (lambda: wrap(bucket_cap_mb="many"), "ValueError", CAP),
    "no caps": (lambda: wrap(bucket_cap_mb_list=[]), "ValueError", "bucket_cap_mb_list is empty"),
    "caps a number": (lambda: wrap(bucket_cap_mb_list=5), "ValueError", f"{CAPS}5"),
    "plan": (lambda: wrap(buckets=3), "TypeError", "is what bucket_plan() returned, or the path of its file"),
    "wire memory": (lambda: wrap(wire_memory="fast"), "ValueError", 'must be "registered", "symmetric" or None'),
    "symmetric views": (lambda: symmetric(gradient_as_bucket_view=True), "ValueError", "out gradient_as_bucket_view"),
    "no group": (without_a_group, "", "init_process_group"),
    "group a list": (lambda: wrap(process_group=[0]), "TypeError", "must be a torch.distributed.ProcessGroup"),
    "group gone": (lambda: forward_without_its_group(None), "", "process group"),
    "subgroup gone": (lambda: forward_without_its_group(dist.new_group([0])), "", "has been destroyed"),
    "mesh of two": (lambda: wrap(device_mesh=init_device_mesh("cpu", (1, 1))), "RuntimeError", "have one dimension, t"),
    "precision a word": (lambda: wrap(mixed_precision="bf16"), "TypeError", "_MixedPrecision or None"),
    "precision int": (lambda: low_precision(torch.int32), "ValueError", "param_dtype must be a floating-point dtype"),
    "precision of 8 bits": (lambda: low_precision(None, torch.float8_e4m3fn), "ValueError", "Set reduce_dtype to one"),
    "no hook for buffers": (lambda: buffer_hook("hook", BEFORE), "TypeError", "must be callable, got str"),
    "local steps": (lambda: wrap(watch=fastddp.Watch(local_steps="no")), "ValueError", '"raise" or None, not '),  # type: ignore[arg-type]
    "no such argument": (lambda: wrap(bucket_cap=25), "TypeError", "'bucket_cap'. Did you mean 'bucket_cap_mb'? There"),
    "no such hook": (lambda: comm_hooks.int8_hook, "AttributeError", "mean 'int8_compress_hook'? There are"),  # type: ignore[attr-defined]
    "hook a name": (lambda: wrap().register_comm_hook(None, "int8"), "TypeError", "Did you mean 'int8_compress_hook'?"),
    "no place for buffers": (lambda: buffer_hook(print, "before"), "TypeError", "PRE_FORWARD or POST_FORWARD"),
    "fused optimizer": (lambda: wrap()._register_fused_optim(torch.optim.NAdam), "", "does not have a functional"),
    "sparse gradient": (sparse_gradient, "", "parameter weight in bucket 0 got a sparse gradient"),
    "clip parameters": (lambda: clip(lambda model: model.parameters()), "TypeError", f"generator. {PASS_THE_WRAPPER}"),
    "early norm": (lambda: wrap().last_grad_norm(), "RuntimeError", TOO_EARLY),
    "early clipping": (lambda: fastddp.clip_grad_norm_(wrap(), 1.0), "RuntimeError", TOO_EARLY),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@on_ranks(1)
def test_a_mistake_is_named_with_its_remedy(rank: int, mistake: str) -> None:
    make, type_name, words = MISTAKES[mistake]
    with pytest.raises(Exception) as raised:
        make()
    assert type_name in ("", raised.typename)
    assert words in str(raised.value)


# --------------------------------------------------------------------------------------- what differs between ranks


def with_adjacency(sparse: bool) -> Pair:
    module = Pair()
    module.first.register_buffer("adjacency", torch.eye(2).to_sparse() if sparse else torch.eye(2))
    return module


@pytest.mark.parametrize(
    ("sparse_on", "init_sync", "words"),
    [
        *(([0, 1], init_sync, "'first.adjacency' is a tensor of layout torch.sparse") for init_sync in (True, False)),
        *(([rank], True, f"rank {rank}: 'first.adjacency' of shape (2, 2), torch.sparse_coo") for rank in (0, 1)),
    ],
)
@on_ranks(2)
def test_a_sparse_buffer_is_named_on_all_ranks(rank: int, sparse_on: list[int], init_sync: bool, words: str) -> None:
    with pytest.raises(RuntimeError) as raised:
        wrap(with_adjacency(rank in sparse_on), init_sync=init_sync)(torch.ones(1, 2))
    assert words in str(raised.value)
    assert "_ddp_params_and_buffers_to_ignore" in str(raised.value)


@pytest.mark.parametrize(("ignored", "options"), [(["first.adjacency"], {}), ([], {"broadcast_buffers": False})])
@on_ranks(2)
def test_a_sparse_buffer_that_is_left_to_each_rank_is_none(rank: int, ignored: list[str], options: Any) -> None:
    module = with_adjacency(sparse=True)
    fastddp.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
    wrap(module, **options)(torch.full((1, 2), rank + 1.0)).backward()
    assert module.second.bias.grad.tolist() == [1.0, 1.0]


@on_ranks(2)
def test_frozen_parameters_that_differ_are_an_error_whatever_the_default_device_is(rank: int) -> None:
    module = Pair()
    # As many bytes as on rank 0: only a comparison notices.
    module.frozen = nn.Parameter(torch.ones(3, 1 + rank), requires_grad=False)
    module.register_buffer("more", torch.ones(6 - 3 * rank))
    with torch.device("meta"), pytest.raises(RuntimeError, match=r"rank 1: 'frozen' of shape \(3, 2\)"):
        wrap(module)


# --------------------------------------------------------------------------- gradients that are not as they should be


def assert_usable(model: Any, rank: int) -> None:
    assert model.reducer.state == "failed"
    model.zero_grad()
    model(torch.full((1, 2), rank + 1.0)).backward()
    assert model.module.second.bias.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("detected_by", ["optimizer", "forward"])
@on_ranks(2)
def test_missing_gradients_are_named_before_an_optimizer_steps(rank: int, detected_by: str) -> None:
    model = wrap(bucket_cap_mb=0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = [parameter.clone() for parameter in model.parameters()]
    model(torch.ones(1, 2), "first").backward()
    torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1).step()  # that of other parameters may step meanwhile
    assert model.reducer.state == "partial"
    with pytest.raises(RuntimeError) as caught:
        optimizer.step() if detected_by == "optimizer" else model(torch.ones(1, 2))
    assert all(map(torch.equal, before, model.parameters()))
    said = str(caught.value)
    assert f"on rank {rank} without a gradient for 2 of 4 parameters" in said
    assert "parameter second.weight (number 2, bucket 1)" in said
    assert_usable(model, rank)


@on_ranks(2)
def test_a_gradient_that_comes_twice_is_an_error_that_names_it(rank: int) -> None:
    model = wrap(bucket_cap_mb=0)
    model(torch.ones(1, 2), "first").backward()
    with pytest.raises(RuntimeError, match="parameter first") as caught:
        # The graph of a forward that another wrapper could have run: gradients of the same window once more.
        model.module(torch.ones(1, 2), "first").backward()
    assert f"got a second gradient in one window on rank {rank}" in str(caught.value)
    assert str(caught.value).endswith(see("FD006"))
    assert "no_sync()" in str(caught.value)
    assert_usable(model, rank)


# ------------------------------------------------------- parameters that came to the module after it was wrapped


def three_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3), nn.Linear(3, 3))


def parameter(requires_grad: bool = True) -> nn.Parameter:
    return nn.Parameter(torch.ones(3), requires_grad=requires_grad)


def assign_state(layers: nn.Module) -> None:
    layers.load_state_dict(copy.deepcopy(layers.state_dict()), assign=True)


# What is done to the module, and what of it is named.
CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "state assigned": (assign_state, "1.weight, 1.bias, 2.weight, 2.bias is not"),
    "layer replaced": (lambda layers: setattr(layers, "2", nn.Linear(3, 3)), "2.weight, 2.bias is not"),
    "module where there was none": (lambda layers: setattr(layers[1], "new", nn.Linear(3, 3)), "1.new.weight, 1.new.b"),
    "parameter replaced": (lambda layers: setattr(layers[1], "bias", parameter()), "1.bias is not"),
    "unfrozen": (lambda layers: layers[0].requires_grad_(True), "0.weight, 0.bias is not"),
    "cast": (lambda layers: layers.double(), "1.weight, 1.bias, 2.weight, 2.bias has lost"),
    "parametrized": (lambda layers: orthogonal(layers[2]), "2.weight has lost"),
}


@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2)
def test_what_would_train_on_one_rank_alone_is_named(rank: int, change: str) -> None:
    model = wrap(three_layers(), find_unused_parameters=True)
    model.module.late = parameter(requires_grad=False)
    model(torch.ones(1, 3)).sum().backward()
    apply, words = CHANGES[change]
    apply(model.module)
    inputs = torch.ones(1, 3, dtype=model.module[0].weight.dtype)
    with torch.no_grad():
        model(inputs)  # trains nothing
    with pytest.raises(RuntimeError) as caught:
        model(inputs)
    assert f"wrapped or replicated: {words}" in str(caught.value)


@on_ranks(2)
def test_changes_that_leave_the_trained_parameters_are_no_error(rank: int) -> None:
    model = wrap(three_layers(), find_unused_parameters=True)
    layers = model.module
    changes: list[Callable[[], Any]] = [
        lambda: None,
        lambda: layers.load_state_dict(copy.deepcopy(layers.state_dict())),
        lambda: [layers[1].weight.requires_grad_(requires_grad) for requires_grad in (False, True)],
        lambda: setattr(layers, "1", layers[2]),
        lambda: setattr(layers, "0", nn.Identity()),
    ]
    sums = []
    for change in changes:
        change()
        model.zero_grad()
        model(torch.full((1, 3), rank + 1.0)).sum().backward()
        sums.append(float(sum(p.grad.sum() for p in layers.parameters() if p.grad is not None)))
    assert of_ranks(sums) == [sums, sums]
    assert sums[0] == sums[1] == sums[2]
