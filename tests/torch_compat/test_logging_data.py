"""_get_ddp_logging_data(): torch's keys, and torch's values where both classes do the same."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import fastddp
from on_ranks import Wrap, on_ranks, same_under_both
from releases import FORWARD_SYNC_BUFFERS, torch_takes

# What depends on the engine.
OWN = {
    *("iteration", "bucket_sizes", "num_buckets_reduced", "rebuilt_bucket_sizes"),
    *("rebuilt_per_bucket_param_indices", "prev_iteration_grad_ready_order_indices"),
}


def train(model: nn.Module, steps: int = 1) -> None:
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def mixed_dtypes() -> nn.Module:
    dtypes = (torch.float64, torch.bfloat16, torch.float16, torch.float32)
    return nn.Sequential(*(nn.Linear(2, 2, dtype=dtype) for dtype in dtypes))


def idle() -> nn.Module:
    """The second layer, of 40 bytes, is used by no forward."""
    layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 2)])
    layers.forward = lambda x: layers[0](x)  # type: ignore[method-assign]
    return layers


@pytest.mark.parametrize(
    ("make", "options", "hook", "steps"),
    [
        (module, {}, None, 0),
        (mixed_dtypes, {}, dist.BuiltinCommHookType.FP16_COMPRESS, 0),
        (module, {}, dist.BuiltinCommHookType.ALLREDUCE, 5),
        (module, {"bucket_cap_mb": 1, "gradient_as_bucket_view": True, FORWARD_SYNC_BUFFERS: False}, None, 5),
        (module, {"bucket_cap_mb_list": [1, 3]}, allreduce_hook, 5),
        (idle, {"find_unused_parameters": True}, None, 0),
        (idle, {"static_graph": True}, None, 5),
    ],
)
@same_under_both()
def test_keys_and_types_are_torchs_and_values_that_do_not_depend_on_the_engine(
    wrap: Wrap, rank: int, make: Any, options: dict[str, Any], hook: Any, steps: int
) -> Any:
    model = wrap(make(), **options)
    if isinstance(hook, dist.BuiltinCommHookType):
        model._register_builtin_comm_hook(hook)
    elif hook is not None:
        model.register_comm_hook(None, hook)
    train(model, steps)
    data = model._get_ddp_logging_data()
    parts = model.logger._get_ddp_logging_data()
    assert {**parts.strs_map, **parts.ints_map} == data
    assert all(isinstance(value, str) for value in parts.strs_map.values())
    of_both = {key: data[key] for key in sorted(data) if key not in OWN and "_time" not in key}
    return [of_both, {key: type(data[key]) for key in sorted(data) if "_time" not in key}]


@same_under_both()
def test_a_sample_rate_below_1_is_refused(wrap: Wrap, rank: int) -> None:
    model = wrap(nn.Linear(4, 4))
    model._set_ddp_runtime_logging_sample_rate(5)
    model._set_ddp_sink_clone(False)
    with pytest.raises(ValueError, match=r"sample rate.*1"):
        model._set_ddp_runtime_logging_sample_rate(0)


@on_ranks(2)
def test_missing_gradients_are_noted(rank: int) -> None:
    model = fastddp.DistributedDataParallel(idle())
    train(model)
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 4))
    data = model._get_ddp_logging_data()
    assert data["has_error"] == 1
    assert "1.weight (number 2" in data["error"]


@pytest.mark.skipif(not torch_takes(["forward_sync_buffers"]), reason="this torch does not warn")
@same_under_both(1)
def test_warnings_are_torchs_at_the_callers_line(wrap: Wrap, rank: int) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrap(module(), forward_sync_buffers=False)
        wrap(module(), broadcast_buffers=True)
        wrap(module(), broadcast_buffers=False, forward_sync_buffers=True)
        wrap(module(), find_unused_parameters=True)._set_static_graph()
    said = [(each.category.__name__, Path(each.filename).name) for each in caught]
    assert [category for category, _ in said] == ["FutureWarning", "FutureWarning", "UserWarning"]
    return said


@on_ranks(1)
def test_buckets_are_described_before_and_after_they_are_rebuilt(rank: int) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model = fastddp.DistributedDataParallel(layers, bucket_cap_mb_list=[0, 1])
    data = [model._get_ddp_logging_data()]
    for _ in range(3):
        train(model)
        data.append(model._get_ddp_logging_data())
    assert [entry["iteration"] for entry in data] == [0, 1, 2, 3]
    assert data[0]["bucket_sizes"] == data[3]["bucket_sizes"] == data[3]["rebuilt_bucket_sizes"] == "8, 112"
    assert "num_buckets_reduced" not in data[0]
    assert data[2]["prev_iteration_grad_ready_order_indices"] == "3, 2, 1, 0"
    assert data[3]["has_rebuilt_buckets"] == 1
    assert data[3]["rebuilt_per_bucket_param_indices"] == "3, 2 1 0"
    assert data[3]["num_buckets_reduced"] == 2
