"""_get_ddp_logging_data(): torch's keys, and torch's values where both classes do the same."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import fastddp
from both import Program, same_under_both
from models import RaisesInBackward
from ranks import RankPool
from releases import FORWARD_SYNC_BUFFERS, torch_takes

# What depends on the engine.
OWN = {
    "bucket_sizes",
    "num_buckets_reduced",
    "rebuilt_bucket_sizes",
    "rebuilt_per_bucket_param_indices",
    "prev_iteration_grad_ready_order_indices",
}


def train(model: nn.Module, steps: int = 1) -> None:
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()


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


def described(wrap: Program, rank: int, make: Any, options: dict[str, Any], hook: Any, steps: int) -> dict[str, Any]:
    """Types of all values, and the values that do not depend on the engine."""
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
    times = [value for key, value in data.items() if "_time" in key and "overlap" not in key]
    assert all(times) or make is Idle
    of_both = {key: data[key] for key in sorted(data) if key not in OWN and "_time" not in key}
    return of_both | {f"type of {key}": type(data[key]).__name__ for key in sorted(data)}


@pytest.mark.parametrize(
    ("make", "options", "hook", "steps"),
    [
        (module, {}, None, 0),
        (mixed_dtypes, {}, dist.BuiltinCommHookType.FP16_COMPRESS, 0),
        (module, {}, dist.BuiltinCommHookType.ALLREDUCE, 5),
        (module, {"bucket_cap_mb": 1, "gradient_as_bucket_view": True, FORWARD_SYNC_BUFFERS: False}, None, 5),
        (module, {"bucket_cap_mb_list": [1, 3]}, allreduce_hook, 5),
        (module, {"static_graph": True}, None, 5),
        (Idle, {"static_graph": True}, None, 3),
        (Idle, {"find_unused_parameters": True}, None, 3),
    ],
)
def test_keys_are_torchs_and_values_too_where_both_do_the_same(
    ranks: RankPool, make: Any, options: dict[str, Any], hook: Any, steps: int
) -> None:
    for rank, data in enumerate(same_under_both(ranks, described, make, options, hook, steps)):
        assert data["rank"] == rank
        assert data.get("unused_parameter_size", 0) == (40 if make is Idle else 0)


def sampled(wrap: Program, rank: int) -> list[int]:
    model = wrap(nn.Linear(4, 4))
    model._set_ddp_runtime_logging_sample_rate(5)
    seen = []
    for _ in range(23):
        seen.append(model._get_ddp_logging_data()["iteration"])
        train(model)
    with pytest.raises(ValueError, match=r"sample rate.*1"):
        model._set_ddp_runtime_logging_sample_rate(0)
    model._set_ddp_sink_clone(False)
    return seen


def test_steps_are_sampled_when_torch_samples_them(ranks: RankPool) -> None:
    for seen in same_under_both(ranks, sampled):
        assert seen[11:] == [10] * 5 + [15] * 5 + [20] * 2


def samples(rank: int) -> dict[str, Any]:
    """Times are nobody's who has not asked for them; and whoever asks gets his own."""
    model = fastddp.DistributedDataParallel(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))
    train(model, 4)
    data = model._get_ddp_logging_data()
    assert model.step_report() is None
    model.sample_steps(1)
    train(model, 4)
    assert model.step_report() is not None
    assert model._get_ddp_logging_data()["iteration"] == 7
    return data


def test_times_are_intervals_between_moments_and_not_in_the_way_of_the_users_samples(ranks: RankPool) -> None:
    for data in ranks.run(samples, 2):
        forward = data["forward_compute_time_start"]
        backward, computed = data["backward_compute_time_start"], data["backward_compute_time_end"]
        sent, received = data["backward_comm_time_start"], data["backward_comm_time_end"]
        assert forward < backward < computed
        assert backward < sent < received
        assert data["forward_compute_time"] == backward - forward
        assert data["backward_compute_time"] == computed - backward
        assert data["backward_comm_time"] == received - sent
        assert data["backward_compute_comm_overlap_time"] == max(0, computed - sent)
        assert data["avg_backward_comm_time"] > 0


def with_a_missing_gradient(wrap: Program, rank: int) -> list[Any]:
    model = wrap(Idle())
    train(model)
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, 4))
    data, said = model._get_ddp_logging_data(), str(caught.value)
    names = "idle.weight (number 2" in data["error"] or wrap is not fastddp.DistributedDataParallel
    return [data["has_error"], data["error"] in said or said.startswith(data["error"][:100]), names]


def test_an_error_is_noted_with_its_text_and_the_numbers_of_its_parameters(ranks: RankPool) -> None:
    assert same_under_both(ranks, with_a_missing_gradient) == [[1, True, True]] * 2


def raised(rank: int) -> list[Any]:
    model = fastddp.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        model(torch.ones(2, 3))
    in_forward = model._get_ddp_logging_data()
    train(model)
    cleared = model._get_ddp_logging_data().get("has_error")
    output = model.module[0](torch.ones(2, 4))
    model.module[0].forward = lambda x: RaisesInBackward.apply(output)
    with pytest.raises(ArithmeticError, match="in the middle of backward"):
        train(model)
    in_backward = model._get_ddp_logging_data()
    return [in_forward["has_error"], str(caught.value) in in_forward["error"], cleared, in_backward["has_error"]]


def test_a_forward_or_backward_that_raised_is_an_error_until_the_next(ranks: RankPool) -> None:
    assert ranks.run(raised, 1) == [[1, True, None, 1]]


def static_or_not(rank: int) -> list[Any]:
    model = fastddp.DistributedDataParallel(Idle(), find_unused_parameters=True)
    found = []
    for step in range(5):
        if step == 3:
            model.module.used, model.module.idle = model.module.idle, model.module.used
        found.append(model._get_ddp_logging_data().get("can_set_static_graph"))
        train(model)
    model(torch.ones(2, 4))
    return [*found, model._get_ddp_logging_data()["can_set_static_graph"]]


def test_whether_the_graph_is_static_is_known_from_the_second_step_on(ranks: RankPool) -> None:
    assert ranks.run(static_or_not, 2) == [[None, None, None, 1, 1, 0]] * 2


def late_static_graph(wrap: Program, rank: int) -> list[Any]:
    outcomes: list[Any] = []
    for steps in (0, 1):
        model = wrap(nn.Linear(4, 4), find_unused_parameters=True)
        train(model, steps)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                model._set_static_graph()
                model._set_static_graph()  # changes nothing
            except RuntimeError as error:
                outcomes.append("before" in str(error))
        said = [each for each in caught if "static_graph" in str(each.message)]
        outcomes += [("find_unused_parameters" in str(each.message), Path(each.filename).name) for each in said]
    return outcomes


def test_a_static_graph_is_set_before_training_or_not_at_all_as_under_torch(ranks: RankPool) -> None:
    assert same_under_both(ranks, late_static_graph)[0][-1] is True


def deprecated(wrap: Program, rank: int, options: dict[str, Any]) -> list[tuple[str, str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrap(module(), **options)
    return [(each.category.__name__, Path(each.filename).name) for each in caught]


@pytest.mark.skipif(not torch_takes(["forward_sync_buffers"]), reason="this torch does not warn")
@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({"broadcast_buffers": True}, True),
        ({"broadcast_buffers": False, "forward_sync_buffers": True}, True),
        ({"forward_sync_buffers": False}, False),
    ],
)
def test_broadcast_buffers_is_deprecated_at_the_callers_line_as_by_torch(
    ranks: RankPool, options: dict[str, Any], warns: bool
) -> None:
    assert same_under_both(ranks, deprecated, options)[0] == [("FutureWarning", Path(__file__).name)] * warns


def own_values(rank: int) -> list[dict[str, Any]]:
    model = fastddp.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), bucket_cap_mb_list=[0, 1])
    data = [model._get_ddp_logging_data()]
    for _ in range(3):
        train(model)
        data.append(model._get_ddp_logging_data())
    return data


def test_buckets_are_described_before_and_after_they_are_rebuilt(ranks: RankPool) -> None:
    (data,) = ranks.run(own_values, 1)
    assert [entry["iteration"] for entry in data] == [0, 0, 1, 2]
    assert data[0]["bucket_sizes"] == data[3]["bucket_sizes"] == data[3]["rebuilt_bucket_sizes"] == "8, 112"
    assert "num_buckets_reduced" not in data[1]
    assert data[2]["prev_iteration_grad_ready_order_indices"] == "3, 2, 1, 0"
    assert data[3]["has_rebuilt_buckets"] == 1
    assert data[3]["rebuilt_per_bucket_param_indices"] == "3, 2 1 0"
    assert data[3]["num_buckets_reduced"] == 2


def called(rank: int) -> bool:
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
    assert logger is not twin.logger
    del model, each
    gc.collect()
    return alive() is None


def test_each_model_has_a_logger_of_its_own(ranks: RankPool) -> None:
    assert ranks.run(called, 2) == [True, True]
