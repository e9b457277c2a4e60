"""The numbers of a bucket's collectives are those of c10d's flight recorder, so that its dump can be matched."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastddp
from fastddp import _C, comm_hooks
from fastddp.exchange import lanes
from ranks import RankPool

Found = tuple[int, str, int]


def in_python(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def in_the_recorder(rank: int, exchange: str) -> list[Found]:
    """For each collective that a bucket says is its own: lane, and the recorder's group and number of elements.

    Layers are a bucket each; the page is read when all but the first one have been sent.
    """
    seen: list[_C.Snapshot] = []

    def look(module: nn.Module, inputs: object, output: Tensor) -> None:
        output.register_hook(lambda gradient: seen.append(model.reducer.progress.read()))

    net = nn.Sequential(*(nn.Linear(size, size + 2, bias=False) for size in (3, 5, 7, 9)))
    net[0].register_forward_hook(look)
    with mock.patch.multiple(lanes, _ENOUGH_BYTES=1, _LARGE_BUCKET_BYTES=1):
        model = fastddp.DistributedDataParallel(net, bucket_cap_mb=0)
        if exchange == "python":
            model.register_comm_hook(None, in_python)
        elif exchange == "fp16":
            model.register_comm_hook(comm_hooks.CompressState(accumulate="fp32"), comm_hooks.fp16_compress_hook)
        for _ in range(4):
            model(torch.ones(1, 3)).sum().backward()
    groups = [model.process_group, *lanes._made.get(model.process_group, [])]
    recorded = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(True, False))["entries"]  # type: ignore[attr-defined]
    entries = {(entry["process_group"][0], entry["collective_seq_id"]): entry for entry in recorded}
    found = []
    for bucket in seen[-1].buckets:
        for of in bucket.collectives:
            for number in range(of.first, of.last + 1):
                entry = entries[groups[of.lane].group_name, number]
                found.append((of.lane, entry["process_group"][1], entry["input_sizes"][0][0]))
    return found


MAIN, SECOND = (0, "default_pg"), (1, "fastddp lane 2 of 2")


@pytest.mark.parametrize(
    ("exchange", "expected"),
    [
        ("plain", [(*MAIN, 99), (*SECOND, 63), (*MAIN, 35)]),
        ("python", [(*MAIN, 99), (*MAIN, 63), (*MAIN, 35)]),
        ("fp16", []),  # messages between pairs of ranks
    ],
)
def test_a_buckets_numbers_are_those_of_the_recorder(ranks: RankPool, exchange: str, expected: list[Found]) -> None:
    assert ranks.run(in_the_recorder, 2, exchange) == [expected] * 2
