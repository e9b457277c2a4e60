"""Names of torch's class, and attributes of its objects: each is there, or there is a decision that it need not be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fastddp
from fastddp.torch_compat.refusals import SERVE_TORCHS_REDUCER
from fastddp.torch_compat.surface import TorchSurface
from on_ranks import Wrap, on_ranks, same_under_both
from releases import names_to_come

NAMES = set(dir(TorchDDP)) - set(dir(nn.Module)) - {"__abstractmethods__", "__slots__", "_abc_impl"}
# Torch's code, with tests where they belong.
INHERITED_ELSEWHERE = {"gather", "scatter", "to_kwargs", "join_device", "join_process_group"}

# Attributes of torch's objects that fastddp's need not have.
NOT_NEEDED = {
    "_accum_grad_hooks",  # of torch's reducer in Python, for compiled autograd
    "_bucket_config",  # of a private class of torch's; what it says is in bucket_bytes_cap, .._list and .._default
    *("_delay_all_reduce_params", "_delay_grad_views"),  # read with _delay_grad_buffer only, which is None
    "_require_manual_backward_finalization",  # fastddp has the public property alone
}


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


@on_ranks(1)
def test_helpers_of_torchs_reducer_are_refused_by_name(rank: int) -> None:
    model = fastddp.DistributedDataParallel(module())
    for name in SERVE_TORCHS_REDUCER:
        assert name in NAMES | names_to_come()
        with pytest.raises(RuntimeError, match=rf"^{name}\(\) of torch's .* serves torch's own reducer"):
            getattr(model, name)()


@same_under_both()
def test_every_other_name_is_fastddps_or_does_what_it_does_for_torch(wrap: Any, rank: int) -> Any:
    inner = module()
    model = wrap(inner)
    results: dict[str, Any] = {}
    with model._inside_ddp_forward():
        assert wrap._get_active_ddp_module() is model
    results["_get_active_ddp_module"] = results["_active_ddp_module"] = wrap._active_ddp_module is None
    results["_distributed_rank"] = model._distributed_rank
    results["_find_common_rank"] = model._find_common_rank(rank, True)
    results["_check_global_requires_backward_grad_sync"] = model._check_global_requires_backward_grad_sync(True)
    for name in ("_check_sync_bufs_pre_fwd", "_check_sync_bufs_post_fwd", "_check_default_group"):
        results[name] = getattr(model, name)()
    results["_check_comm_hook"] = model._check_comm_hook(lambda state, bucket: None)
    results["_passing_sync_batchnorm_handle"] = model._passing_sync_batchnorm_handle(inner)
    results["_get_parameters"] = len(list(model._get_parameters(inner)))

    def of_a_rank_that_has_joined() -> None:
        if rank == 0:
            model._check_and_sync_module_buffers()
        else:
            model._sync_module_buffers(model._find_common_rank(rank, True))

    for name, broadcast in {
        "_check_and_sync_module_buffers": of_a_rank_that_has_joined,
        "_default_broadcast_coalesced": model._default_broadcast_coalesced,
        "_distributed_broadcast_coalesced": lambda: model._distributed_broadcast_coalesced(model.modules_buffers, 100),
        "_sync_final_model": lambda: model._sync_final_model(True),
    }.items():
        inner[1].running_mean.fill_(rank + 1.0)
        broadcast()
        results[name] = inner[1].running_mean.tolist()
    with pytest.raises(KeyError):
        model._log_and_throw(KeyError, "message")
    results["_log_and_throw"] = True
    wrap._set_params_and_buffers_to_ignore_for_model(inner, ["0.weight"])
    kept = [name for name, _ in wrap._get_data_parallel_params(inner, named_params=True)]
    results["_get_data_parallel_params"] = results["_set_params_and_buffers_to_ignore_for_model"] = kept
    dist.barrier()
    ours = vars(fastddp.DistributedDataParallel) | vars(TorchSurface)
    assert set(results) == {name for name in NAMES if name not in ours} - INHERITED_ELSEWHERE
    assert results["_check_and_sync_module_buffers"] == [2.0, 2.0]  # those of rank 1, which has not joined
    return results


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}], ids=str)
@on_ranks(1)
def test_every_attribute_of_torchs_objects_is_there_or_not_needed(rank: int, options: dict[str, Any]) -> None:
    ours, theirs = (wrap(module(), **options) for wrap in (fastddp.DistributedDataParallel, TorchDDP))
    before = {name for name in vars(theirs) if not hasattr(ours, name)}
    for model in (ours, theirs):
        model(torch.ones(3, 2)).sum().backward()
    missing = before | {name for name in vars(theirs) if not hasattr(ours, name)}
    assert missing == NOT_NEEDED - names_to_come()
    # What leads a forward that was copied from torch's past what fastddp does not have.
    assert ours._lazy_init_ran
    assert ours._static_graph_delay_allreduce_enqueued
    assert not ours._ddp_sink_clone


def hook_of_the_user(state, bucket):  # type: ignore[no-untyped-def]  # torch does not read annotations that are texts
    raise AssertionError("no backward, no call")


@pytest.mark.parametrize(
    "options",
    [
        {"bucket_cap_mb": 3},
        {"bucket_cap_mb": np.float32(0.5)},
        {"bucket_cap_mb_list": [np.int64(2), np.float64(1.0)]},
        {"device_ids": [], "output_device": 0, "dim": 1},
    ],
    ids=str,
)
@same_under_both()
def test_what_frameworks_read_is_what_torchs_attributes_tell(wrap: Wrap, rank: int, options: dict[str, Any]) -> Any:
    inner = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2), nn.BatchNorm1d(2)])
    TorchDDP._set_params_and_buffers_to_ignore_for_model(inner, ["2.weight", "2.bias"])
    model = wrap(inner, **options)
    model.register_comm_hook(rank, hook_of_the_user)
    model.require_backward_grad_sync = model.require_forward_param_sync = True
    names = {parameter: name for name, parameter in inner.named_parameters()}
    return [
        [names[parameter] for parameter in model._module_parameters],
        [(hook.__name__, state) for hook, state in model._comm_hooks],
        [model.bucket_bytes_cap, model.bucket_bytes_cap_list, model.bucket_bytes_cap_default],
        [model._delay_all_reduce_all_params, model._delay_grad_buffer, model.mixed_precision],
        [model.static_graph, model.find_unused_parameters, model.parameters_to_ignore],
        [model.device, model.device_ids, model.output_device, model.dim, model.process_group == dist.group.WORLD],
        [model.reducer is None, model.logger is None],
        [list(model.named_module_buffers), isinstance(model, TorchDDP), isinstance(model.module, nn.Module)],
    ]
