"""_get_ddp_logging_data(): torch's keys, and torch's values where both classes do the same."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fastddp
from ranks import RankPool
from releases import FORWARD_SYNC_BUFFERS

# What depends on the engine, or on the moment at which torch takes its sample.
OWN = {
    "iteration",
    "bucket_sizes",
    "num_buckets_reduced",
    "rebuilt_bucket_sizes",
    "rebuilt_per_bucket_param_indices",
    "prev_iteration_grad_ready_order_indices",
}


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def mixed_dtypes() -> nn.Module:
    layers = [nn.Linear(2, 2, dtype=dtype) for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.float32)]
    return nn.Sequential(*layers)


class Idle(nn.Module):
    """Parameters of 40 bytes that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def describe(rank: int, make: Any, options: dict[str, Any], hook: Any, steps: int) -> list[dict[str, Any]]:
    inner = make()
    data = []
    for cls in (fastddp.DistributedDataParallel, TorchDDP):
        model = cls(copy.deepcopy(inner), **options)
        if hook is not None:
            model.register_comm_hook(None, hook)
        for _ in range(steps):
            model(torch.ones(2, 4)).sum().backward()
        data.append(model._get_ddp_logging_data())
    return data


@pytest.mark.parametrize(
    ("make", "options", "hook", "steps"),
    [
        (module, {}, None, 0),
        (mixed_dtypes, {}, None, 0),
        (module, {}, None, 3),
        (module, {"bucket_cap_mb": 1, "gradient_as_bucket_view": True, FORWARD_SYNC_BUFFERS: False}, None, 3),
        (module, {"bucket_cap_mb_list": [1, 3]}, allreduce_hook, 3),
        (module, {"static_graph": True}, None, 5),
        (module, {"find_unused_parameters": True}, None, 0),
    ],
)
def test_keys_are_torchs_and_values_too_where_both_do_the_same(
    ranks: RankPool, make: Any, options: dict[str, Any], hook: Any, steps: int
) -> None:
    for rank, (ours, theirs) in enumerate(ranks.run(describe, 2, make, options, hook, steps)):
        assert set(ours) == set(theirs)
        shared = {key for key in theirs if key not in OWN and "_time" not in key}
        assert {key: ours[key] for key in shared} == {key: theirs[key] for key in shared}
        assert ours["rank"] == rank
        assert [type(value) for value in ours.values()] == [type(theirs[key]) for key in ours]
        assert {ours[key] for key in ours if "_time" in key} <= {0}


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_the_size_of_unused_parameters_is_torchs(ranks: RankPool, option: str) -> None:
    for ours, theirs in ranks.run(describe, 2, Idle, {option: True}, None, 3):
        assert ours["unused_parameter_size"] == theirs["unused_parameter_size"] == 40


def own_values(rank: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = fastddp.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), bucket_cap_mb_list=[0, 1])
    data = [model._get_ddp_logging_data()]
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        data.append(model._get_ddp_logging_data())
    return data


def test_buckets_are_described_before_and_after_they_are_rebuilt(ranks: RankPool) -> None:
    (data,) = ranks.run(own_values, 1)
    assert [entry["iteration"] for entry in data] == [0, 1, 2, 3]
    assert data[0]["bucket_sizes"] == data[3]["bucket_sizes"] == "8, 112"
    assert "has_rebuilt_buckets" not in data[1]
    assert data[1]["prev_iteration_grad_ready_order_indices"] == "3, 2, 1, 0"
    assert data[3]["has_rebuilt_buckets"] == 1
    assert data[3]["rebuilt_per_bucket_param_indices"] == "3, 2 1 0"
    assert data[3]["rebuilt_bucket_sizes"] == "8, 112"
    assert data[3]["num_buckets_reduced"] == 2


def sample_rates(rank: int) -> list[str]:
    messages = []
    for cls in (fastddp.DistributedDataParallel, TorchDDP):
        model = cls(module())
        model._set_ddp_runtime_logging_sample_rate(1)
        with pytest.raises(ValueError) as caught:
            model._set_ddp_runtime_logging_sample_rate(0)
        messages.append(str(caught.value))
        model._set_ddp_sink_clone(False)
    return messages


def test_a_sample_rate_below_1_is_refused_as_by_torch(ranks: RankPool) -> None:
    (messages,) = ranks.run(sample_rates, 1)
    assert all("sample rate" in message and "1" in message for message in messages)


def from_the_logger(rank: int) -> list[Any]:
    found: list[Any] = []
    for cls in (fastddp.DistributedDataParallel, TorchDDP):
        model = cls(module())
        parts = model.logger._get_ddp_logging_data()
        assert {**parts.strs_map, **parts.ints_map} == model._get_ddp_logging_data()
        found += [set(parts.strs_map) - OWN, set(parts.ints_map) - OWN]
    return found


def test_the_logger_has_texts_and_numbers_apart(ranks: RankPool) -> None:
    for our_texts, our_numbers, their_texts, their_numbers in ranks.run(from_the_logger, 2):
        assert our_texts == their_texts
        assert our_numbers == their_numbers


def called(rank: int) -> list[bool]:
    """A model, a copy, and another process group: the logger is of the model that has it, and never keeps it alive."""
    model = fastddp.DistributedDataParallel(module())
    twin = copy.deepcopy(model)
    model._update_process_group(model.process_group)
    for each in (model, twin):
        each.logger.set_runtime_stats_and_log()
        each.logger.set_error_and_log("nothing")
        each.logger.set_construction_data_and_log("Sequential", [], -1, True, False, False)
        each.logger._set_comm_hook_name("hook")
        each.logger._set_static_graph()
        each.logger._set_uneven_input_join()
    logger, alive = model.logger, weakref.ref(model)
    apart = logger is not twin.logger
    del model, each
    gc.collect()
    return [apart, alive() is None, logger is not None]


def test_each_model_has_a_logger_of_its_own(ranks: RankPool) -> None:
    assert ranks.run(called, 2) == [[True, True, True]] * 2
