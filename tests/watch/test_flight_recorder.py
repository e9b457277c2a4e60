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
from fastddp.wrapper import Wrapper
from ranks import RankPool

Found = tuple[int, str, int]
SIZES = (3, 5, 7, 9)


class Net(nn.Module):
    """Layers of different sizes, a bucket each; what the page says when all but the first layer have been sent."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=False) for size in SIZES)
        self.page: _C.Progress | None = None
        self.seen: _C.Snapshot | None = None

    def forward(self) -> Tensor:
        """All layers, the last one's gradient comes first."""
        total = torch.zeros(())
        for layer, size in zip(self.layers, SIZES, strict=True):
            total = layer(torch.ones(1, size)).sum() + total
            if size == SIZES[0]:
                total.register_hook(self._look)
        return total

    def _look(self, gradient: Tensor) -> None:
        if self.page is not None:
            self.seen = self.page.read()


def in_python(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def register(model: Wrapper, exchange: str) -> None:
    if exchange == "python":
        model.register_comm_hook(None, in_python)
    elif exchange == "fp16":
        model.register_comm_hook(comm_hooks.CompressState(accumulate="fp32"), comm_hooks.fp16_compress_hook)


def in_the_recorder(rank: int, exchange: str) -> list[Found]:
    """For each collective that a bucket says is its own: lane, and the recorder's group and number of elements."""
    net = Net()
    with mock.patch.multiple(lanes, _ENOUGH_BYTES=1, _LARGE_BUCKET_BYTES=1):
        model = fastddp.DistributedDataParallel(net, bucket_cap_mb=0)
        register(model, exchange)
        for _ in range(3):
            model().backward()
        net.page = model.reducer.progress
        model().backward()
    groups = [model.process_group, *lanes._made.get(model.process_group, [])]
    recorded = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(True, False))["entries"]  # type: ignore[attr-defined]
    entries = {(entry["process_group"][0], entry["collective_seq_id"]): entry for entry in recorded}
    found = []
    assert net.seen is not None
    for bucket in net.seen.buckets:
        for of in bucket.collectives:
            for number in range(of.first, of.last + 1):
                entry = entries[groups[of.lane].group_name, number]
                found.append((of.lane, entry["process_group"][1], entry["input_sizes"][0][0]))
    return found


MAIN, SECOND = (0, "default_pg"), (1, "fastddp lane 2 of 2")


@pytest.mark.parametrize(
    ("exchange", "expected"),
    [
        ("plain", [(*MAIN, 81), (*SECOND, 49), (*MAIN, 25)]),
        ("python", [(*MAIN, 81), (*MAIN, 49), (*MAIN, 25)]),
        ("fp16", []),  # messages between pairs of ranks
    ],
)
def test_a_buckets_numbers_are_those_of_the_recorder(ranks: RankPool, exchange: str, expected: list[Found]) -> None:
    assert ranks.run(in_the_recorder, 2, exchange) == [expected] * 2
