"""model.step_report(): where the time of a sampled step went."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fake_cuda
import fastddp
from fastddp.times.split import Split
from fastddp.times.step_report import StepReport
from hooks_by_name import register
from on_ranks import on_ranks

NAN = math.nan
Bucket = tuple[float, float, float]


def report(buckets: list[Bucket], computed: float, end: float, next: float, **others: float) -> StepReport:
    """Of buckets that are ready, start and end, and of what else the reducer samples."""
    times: Any = SimpleNamespace(computed=computed, end=end, next=next, blocked=0.0, rest_start=NAN, rest_end=NAN)
    times.buckets = [SimpleNamespace(ready=ready, start=start, end=end) for ready, start, end in buckets]
    times.gather_before = times.gather_after = 0.0
    vars(times).update(others)
    return StepReport.of(times, [(f"{index}.weight", f"{index}.bias", 1000) for index in range(len(buckets))], None, 0)


TWO = report([(2, 2, 6), (4, 5, 12)], computed=10, end=12, next=15)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (report([(10, 10, 14)], computed=10, end=15, next=20), (11, 0, 4, 0)),  # all after the gradients
        (report([(4, 5, 9)], computed=10, end=11, next=20), (7, 4, 0, 0)),  # all of it before
        (TWO, (2, 8, 2, 0)),  # two at once count once; the second reaches beyond the gradients
        (report([(2, 2, 4), (6, 6, 8)], computed=10, end=10, next=11), (6, 4, 0, 0)),  # a gap between them
        # What travels in no bucket, together with a bucket and after it.
        (report([(2, 2, 6)], computed=5, end=12, next=12, rest_start=5, rest_end=10), (4, 3, 5, 0)),
        (report([(2, 2, 8)], computed=9, end=10, next=12, blocked=5), (4, 1, 5, 0)),  # backward waits for a collective
        (report([(4, 5, 9)], computed=10, end=11, next=20, gather_before=3, gather_after=5), (4, 4, 3, 0)),
        (report([(2, 2, 4), (NAN, NAN, NAN)], computed=10, end=10, next=11), (8, 2, 0, 0)),  # one on another device
    ],
)
def test_the_time_of_a_step_is_split(found: StepReport, expected: tuple[float, ...]) -> None:
    assert found.split == Split(*expected)


def test_a_report_is_a_line_scalars_or_prometheus_text() -> None:
    assert str(TWO).endswith("bucket 1 (1.weight ... 1.bias), 7.0 ms from 5.0 on")
    scalars = {"step": 12, "compute_only": 2, "overlapped": 8, "exposed": 2, "outside": 3}
    assert TWO.scalars("ddp/") == {f"ddp/{name}_ms": ms for name, ms in scalars.items()}
    lines = TWO.prometheus({"job": 'a "quoted" one'}).splitlines()
    assert "# TYPE fastddp_exposed_seconds gauge" in lines
    assert r'fastddp_exposed_seconds{job="a \"quoted\" one"} 0.002' in lines
    assert r'fastddp_bucket_seconds{job="a \"quoted\" one",bucket="1",first="1.weight"} 0.007' in lines


class TwoLayers(nn.Module):
    """Between the gradients of its layers backward takes ``seconds``."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        between = self.first(x)
        between.register_hook(lambda gradient: time.sleep(self.seconds))
        return self.second(between)


@torch.library.custom_op("tests::sleep", mutates_args=())
def sleep(x: Tensor, seconds: float) -> Tensor:
    time.sleep(seconds)
    return x.clone()


sleep.register_fake(lambda x, seconds: torch.empty_like(x))
sleep.register_autograd(
    lambda ctx, gradient: (sleep(gradient, ctx.seconds), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "seconds", 0.1),
)


class CompiledTwoLayers(TwoLayers):
    """One graph, in whose backward that time passes."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(sleep(self.first(x), 0.0))


def sampled(
    rank: int, seconds: float, late: float, hook: str, every: int, steps: int, device: str = "cpu"
) -> list[Any]:
    """Reports after each step. Rank 1 begins backward `late` seconds later."""
    if hook == "compiled":
        model = fastddp.DistributedDataParallel(CompiledTwoLayers(), bucket_cap_mb=1e-6)
        model.compile(backend="aot_eager")
    else:
        model = fastddp.DistributedDataParallel(TwoLayers(seconds).to(device), bucket_cap_mb=1e-6)
        register(model, hook)
    model.sample_steps(every)
    reports = []
    for _ in range(steps):
        loss = model(torch.ones(2, 8, device=device)).sum()
        time.sleep(late * rank)
        loss.backward()
        model.zero_grad()
        reports.append(model.step_report())
    return reports


HOOKS = pytest.mark.parametrize("hook", ["none", "bf16", "python", "PowerSGD"])


@pytest.mark.tier("slow", but_one_in=3)
@pytest.mark.parametrize("hook", ["compiled", "none", "bf16", "python", "PowerSGD"])
@on_ranks(2)
def test_what_backward_hides_is_overlapped(rank: int, hook: str) -> None:
    # The second layer's bucket travels while backward sleeps on its way to the first layer.
    _, _, *reports = sampled(rank, 0.1, 0.0, hook, 1, 5)  # buckets are rebuilt
    for found in reports:
        first, second = found.buckets
        assert found.split.step > 100
        assert [(of.first, of.last, of.bytes) for of in (first, second)] == [
            (name, name, 256) for name in ("second.weight", "first.weight")
        ]
        assert second.ready - first.ready > 90
        assert all(of.ready <= of.start <= of.end <= found.split.step + 0.1 for of in found.buckets)
    # Under PowerSGD the last factors of a bucket travel with the first ones of the next bucket, and the parts of
    # sums that bf16 sends over gloo do not tell when they have come.
    if hook not in ("PowerSGD", "bf16"):
        assert any(found.buckets[0].end < found.buckets[1].ready for found in reports)


@pytest.mark.tier("slow", but_one_in=3)
@HOOKS
@on_ranks(2)
def test_the_wait_for_a_late_rank_is_exposed(rank: int, hook: str) -> None:
    exposed = [found.split.exposed for found in sampled(rank, 0.0, 0.1, hook, 1, 8)[-3:]]
    # On a busy machine not each time.
    assert max(exposed) > 60 if rank == 0 else min(exposed) < 40


class Late(torch.optim.SGD):
    """On rank 1."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        time.sleep(0.1 * torch.distributed.get_rank())
        super().step()


@pytest.mark.tier("slow", but_one_in=2)
@pytest.mark.parametrize("gather", ["step", "forward"])
@on_ranks(2)
def test_the_wait_for_parameters_is_exposed_where_the_forward_reads_them(rank: int, gather: Any) -> None:
    model = fastddp.DistributedDataParallel(TwoLayers())
    optimizer = fastddp.ShardedOptimizer(model, Late, gather=gather, lr=0.1)
    model.sample_steps(1)
    exposed = []
    for _ in range(6):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        report = model.step_report()
        exposed += [report.split.exposed] if report else []
    # On a busy machine not each time.
    assert max(exposed) > 60 if (rank, gather) == (0, "forward") else min(exposed) < 40


@on_ranks(1)
def test_only_what_was_asked_for_is_sampled(rank: int) -> None:
    for every in (-1, 1.5, True, "2"):
        with pytest.raises(ValueError, match=f"every={every!r}.* is a number of steps, or 0"):
            fastddp.DistributedDataParallel(nn.Linear(8, 8)).sample_steps(every)
    reports = sampled(rank, 0.0, 0.0, "none", 3, 8)
    # Of steps 0, 3 and 6, each known in the step after it.
    assert [found is not None for found in reports] == [False] + [True] * 7
    assert reports[1] == reports[2] == reports[3] != reports[4]
    assert reports[4] == reports[5] == reports[6] != reports[7]
    assert sampled(rank, 0.0, 0.0, "none", 0, 4) == [None] * 4


@on_ranks(2, pool="simulated_ranks")
def test_on_a_device_times_are_those_of_its_streams(rank: int) -> None:
    first, *_, found = sampled(rank, 0.0, 0.0, "none", 1, 4, fake_cuda.DEVICE)
    assert first is None
    assert [bucket.first for bucket in found.buckets] == ["second.weight", "first.weight"]
    for bucket in found.buckets:
        assert 0 < bucket.ready <= bucket.start <= bucket.end <= found.split.step
    assert found.outside > 0
