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
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fastddp
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
        (module, {}, None, 5),
        (module, {"bucket_cap_mb": 1, "gradient_as_bucket_view": True, FORWARD_SYNC_BUFFERS: False}, None, 5),
        (module, {"bucket_cap_mb_list": [1, 3]}, allreduce_hook, 5),
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
        for data in (ours, theirs):
            assert all(value > 0 for key, value in data.items() if "_time" in key and "overlap" not in key)


def iterations(rank: int) -> list[list[int]]:
    found = []
    for cls in (fastddp.DistributedDataParallel, TorchDDP):
        model = cls(nn.Linear(4, 4))
        model._set_ddp_runtime_logging_sample_rate(5)
        seen = []
        for _ in range(23):
            seen.append(model._get_ddp_logging_data()["iteration"])
            model(torch.ones(2, 4)).sum().backward()
        found.append(seen)
    return found


def test_steps_are_sampled_when_torch_samples_them(ranks: RankPool) -> None:
    for ours, theirs in ranks.run(iterations, 2):
        assert ours == theirs
        assert ours[11:] == [10] * 5 + [15] * 5 + [20] * 2


def in_order(rank: int) -> list[dict[str, Any]]:
    data = []
    for cls in (fastddp.DistributedDataParallel, TorchDDP):
        model = cls(nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))))
        for _ in range(4):
            model(torch.ones(8, 64)).sum().backward()
        data.append(model._get_ddp_logging_data())
    return data


def test_times_are_intervals_between_the_moments_that_are_there(ranks: RankPool) -> None:
    for both in ranks.run(in_order, 2):
        for data in both:
            forward, backward, computed = (
                data[key]
                for key in ("forward_compute_time_start", "backward_compute_time_start", "backward_compute_time_end")
            )
            sent, received = data["backward_comm_time_start"], data["backward_comm_time_end"]
            assert forward < backward < computed
            assert backward < sent < received
            assert abs(data["forward_compute_time"] - (backward - forward)) <= 1000  # torch reads two clocks
            assert data["backward_compute_time"] == computed - backward
            assert data["backward_comm_time"] == received - sent
            assert abs(data["backward_compute_comm_overlap_time"] - max(0, computed - sent)) <= 1000
            assert data["avg_backward_comm_time"] > 0


def samples_of_others(rank: int) -> list[bool]:
    """Times are nobody's who has not asked for them; and whoever asks gets his own."""
    model = fastddp.DistributedDataParallel(nn.Linear(4, 4))
    found = []
    for step in range(8):
        if step == 4:
            found.append(model.step_report() is None)
            model.sample_steps(1)
        model(torch.ones(2, 4)).sum().backward()
    found.append(model.step_report() is not None)
    found.append(model._get_ddp_logging_data()["iteration"] == 7)
    return found


def test_the_loggers_samples_are_not_in_the_way_of_the_users(ranks: RankPool) -> None:
    assert ranks.run(samples_of_others, 1) == [[True] * 3]


def builtin_hooks(rank: int) -> list[list[Any]]:
    found = []
    for cls in (fastddp.DistributedDataParallel, TorchDDP):
        names = []
        for hook in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
            model = cls(nn.Linear(4, 4))
            model._register_builtin_comm_hook(hook)
            names.append(model._get_ddp_logging_data()["comm_hook"])
        found.append(names)
    return found


def test_builtin_hooks_have_torchs_names(ranks: RankPool) -> None:
    ((ours, theirs),) = ranks.run(builtin_hooks, 1)
    assert ours == theirs


def errors(rank: int) -> list[dict[str, Any]]:
    found = []
    for cls in (fastddp.DistributedDataParallel, TorchDDP):
        model = cls(Idle())
        model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(RuntimeError) as caught:
            model(torch.ones(2, 4))
        data = model._get_ddp_logging_data()
        found.append(
            {
                "has_error": data["has_error"],
                "same": data["error"] in str(caught.value) or str(caught.value).startswith(data["error"][:100]),
                "text": data["error"],
            }
        )
    return found


def test_an_error_is_noted_with_its_text_and_the_numbers_of_its_parameters(ranks: RankPool) -> None:
    for ours, theirs in ranks.run(errors, 2):
        assert ours["has_error"] == theirs["has_error"] == 1
        assert ours["same"]
        assert theirs["same"]
        assert "idle.weight (number 2" in ours["text"]
        assert "rank" in theirs["text"]


def raised_in_backward(rank: int) -> dict[str, Any]:
    model = fastddp.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model(torch.ones(2, 4)).sum().backward()
    output = model.module[0](torch.ones(2, 4))
    model.module[0].forward = lambda x: RaisesInBackward.apply(output)
    loss = model(torch.ones(2, 4)).sum()
    with pytest.raises(ArithmeticError, match="in the middle of backward"):
        loss.backward()
    return model._get_ddp_logging_data()


def test_a_backward_that_raised_is_an_error(ranks: RankPool) -> None:
    (data,) = ranks.run(raised_in_backward, 1)
    assert data["has_error"] == 1
    assert data["error"] == "The last backward raised."


def raised_in_forward(rank: int) -> list[str | int | None]:
    model = fastddp.DistributedDataParallel(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        model(torch.ones(2, 3))
    data = model._get_ddp_logging_data()
    noted = [data["has_error"], int(str(caught.value) in str(data["error"]))]
    model(torch.ones(2, 4)).sum().backward()
    return [*noted, model._get_ddp_logging_data().get("has_error")]


def test_a_forward_that_raised_is_an_error_until_the_next(ranks: RankPool) -> None:
    assert ranks.run(raised_in_forward, 1) == [[1, 1, None]]


def static_or_not(rank: int) -> list[Any]:
    model = fastddp.DistributedDataParallel(Idle(), find_unused_parameters=True)
    found = []
    for step in range(5):
        if step == 3:
            model.module.used, model.module.idle = model.module.idle, model.module.used
        found.append(model._get_ddp_logging_data().get("can_set_static_graph"))
        model(torch.ones(2, 4)).sum().backward()
    model(torch.ones(2, 4))
    found.append(model._get_ddp_logging_data()["can_set_static_graph"])
    return found


def test_whether_the_graph_is_static_is_known_from_the_second_step_on(ranks: RankPool) -> None:
    assert ranks.run(static_or_not, 2) == [[None, None, None, 1, 1, 0]] * 2


def late_static_graph(rank: int) -> list[list[str]]:
    found = []
    for cls in (fastddp.DistributedDataParallel, TorchDDP):
        outcomes = []
        for steps in (0, 1):
            model = cls(nn.Linear(4, 4), find_unused_parameters=True)
            for _ in range(steps):
                model(torch.ones(2, 4)).sum().backward()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    model._set_static_graph()
                    model._set_static_graph()  # changes nothing
                except RuntimeError as error:
                    outcomes.append(f"raised: {'before' if 'before' in str(error) else error}")
            outcomes += [
                f"{'find_unused_parameters' in str(each.message)} at {Path(each.filename).name}"
                for each in caught
                if "static_graph" in str(each.message)
            ]
        found.append(outcomes)
    return found


def test_a_static_graph_is_set_before_training_or_not_at_all_as_under_torch(ranks: RankPool) -> None:
    ((ours, theirs),) = ranks.run(late_static_graph, 1)
    assert ours == theirs
    assert ours[-1].startswith("raised")


def deprecated(rank: int, options: dict[str, Any]) -> list[list[tuple[str, str]]]:
    found = []
    for cls in (fastddp.DistributedDataParallel, TorchDDP):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            cls(module(), **options)
        found.append([(each.category.__name__, Path(each.filename).name) for each in caught])
    return found


@pytest.mark.skipif(not torch_takes(["forward_sync_buffers"]), reason="this torch does not warn")
@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({}, False),
        ({"broadcast_buffers": True}, True),
        ({"broadcast_buffers": False}, True),
        ({"broadcast_buffers": False, "forward_sync_buffers": True}, True),
        ({"forward_sync_buffers": False}, False),
    ],
)
def test_broadcast_buffers_is_deprecated_at_the_callers_line_as_by_torch(
    ranks: RankPool, options: dict[str, Any], warns: bool
) -> None:
    ((ours, theirs),) = ranks.run(deprecated, 1, options)
    assert ours == theirs == [("FutureWarning", "test_logging_data.py")] * warns


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
    assert [entry["iteration"] for entry in data] == [0, 0, 1, 2]
    assert data[0]["bucket_sizes"] == data[3]["bucket_sizes"] == "8, 112"
    assert "num_buckets_reduced" not in data[1]
    assert data[2]["prev_iteration_grad_ready_order_indices"] == "3, 2, 1, 0"
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
