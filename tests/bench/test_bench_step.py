"""What `bench.step` does with communication hooks: who competes, what gradients have to be, and what the rows say."""

from __future__ import annotations

import argparse
import doctest
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from ranks import RankPool
from repository import ROOT

# Only while bench is imported: with the root there for good, kernels/ could shadow the package of that name on PyPI.
sys.path.append(str(ROOT))

from bench import contestants, harness, step
from bench.contestants import Contestant, Hook, Step, hook_named, line_up

sys.path.pop()

HOOKS = ["fp16", "bf16", "powersgd1", "allreduce"]


# ------------------------------------------------------------------------------------------------------ who competes


def test_examples_in_docstrings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contestants.dist, "is_nccl_available", lambda: False)
    assert doctest.testmod(contestants).failed == 0


def test_without_hooks_everyone_competes() -> None:
    names = [contestant.name for contestant in contestants.CONTESTANTS]
    assert [contestant.name for contestant in line_up(names, ["none"])] == names


@pytest.mark.parametrize("nccl", [False, True])
def test_by_default_a_hook_meets_torchs_own_and_the_floor(nccl: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contestants.dist, "is_nccl_available", lambda: nccl)
    names = [contestant.name for contestant in line_up(step.WITH_HOOKS, ["bf16"])]
    torchs = ["torch+bf16", "torch-view+bf16"] if nccl else []  # torch's DDP refuses it
    assert names[:4] == ["alone", "torch", "torch-again", "torch+fp16"]
    assert names[4:] == [*torchs, "fastddp+bf16", "fastddp-view+bf16"]


def test_batched_powersgd_is_held_against_powersgd() -> None:
    names = [contestant.name for contestant in line_up(["torch", "fastddp"], ["batched-powersgd2"])]
    assert names == ["torch", "torch+powersgd2", "fastddp+batched-powersgd2"]


def test_only_torchs_powersgd_gets_a_single_bucket() -> None:
    caps = {c.name: c.bucket_cap_mb(5.0) for c in line_up(["torch", "fastddp"], ["fp16", "powersgd1"])}
    single = caps.pop("torch+powersgd1")
    assert single > 1000
    assert set(caps.values()) == {5.0}


@pytest.mark.parametrize("name", ["fp32", "powersgd", "powersgd0", "powersgd-1", "batched-fp16", ""])
def test_hooks_that_do_not_exist_are_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.step", f"--hook={name}"])
    with pytest.raises(SystemExit, match="2"):
        step.parse_arguments()
    assert (
        f"there is no hook {name!r}; there are none, allreduce, fp16, bf16, int8, fp8, auto, powersgdN"
        in capsys.readouterr().err
    )


# ------------------------------------------------------------------------------------------ what gradients have to be


def _check(name: str) -> Callable[[Sequence[Tensor], Sequence[Tensor]], bool]:
    hook = hook_named(name)
    assert hook is not None
    return hook.check.holds


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_a_cast_may_round_and_no_more(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contestants.dist, "get_world_size", lambda: 2)
    generator = torch.Generator().manual_seed(0)
    holds = _check(name)
    for scale in (1.0, 1e-3, 1e-6):  # fp16 has no normal numbers below 6e-5
        shares = [scale * torch.randn(1000, generator=generator) for _ in range(2)]
        mean = (shares[0] + shares[1]) / 2
        travelled = (shares[0].to(dtype) / 2 + shares[1].to(dtype) / 2).float()
        assert not torch.equal(travelled, mean)
        assert holds([travelled], [mean])
        assert not holds([2 * travelled], [mean])
        assert not holds([travelled.roll(1)], [mean])
    one = torch.ones(4)
    assert holds([one, one], [one, one])
    assert not holds([one], [one, one])
    assert not holds([torch.ones(2)], [one])
    assert not holds([torch.tensor([1, 1, 1, math.nan])], [one])
    assert not holds([1.1 * one], [one])


def test_without_a_hook_every_bit_counts_on_two_ranks_and_roundings_do_not_on_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, off = torch.ones(3), torch.ones(3) * (1 + 2**-22)
    for ranks, holds in ((2, False), (4, True)):
        monkeypatch.setattr(contestants.dist, "get_world_size", lambda ranks=ranks: ranks)
        assert contestants.EXACT.holds([off], [expected]) == holds
        assert contestants.EXACT.holds([expected], [expected])
        assert not contestants.EXACT.holds([1.001 * expected], [expected])


def _agreements(rank: int) -> list[bool]:
    same = [torch.arange(6.0).view(2, 3), torch.tensor(1.0)]
    cases = [
        same,
        [same[0].t().contiguous().t(), same[1]],  # other strides, the same values
        [same[0] + 1e-6 * rank, same[1]],
        [same[0], torch.tensor(math.inf)],
        [torch.zeros(2, 3), torch.tensor(0.0)],
        same[:1],
        same[: 2 - rank],
    ]
    return [_check("powersgd1")(got, same) for got in cases]


def test_an_approximation_has_to_be_finite_and_the_same_on_all_ranks(ranks: RankPool) -> None:
    for verdicts in ranks.run(_agreements, 2):
        assert verdicts == [True, True, False, False, False, False, False]


# ------------------------------------------------------------------------------------------------------ a small run


def _options(names: list[str], hooks: list[str]) -> argparse.Namespace:
    return argparse.Namespace(
        contestant=names,
        hook=hooks,
        rounds=2,
        warmup=2,
        threads=1,
        backend="gloo",
        bucket_cap_mb=None,
        keep_samples=False,
        module="test",
    )


def _measured(rank: int, names: list[str], hooks: list[str]) -> list[harness.Row]:
    with mock.patch.dict(os.environ, LOCAL_RANK=str(rank)):
        return step.measure("500x32sq", _options(names, hooks))


@pytest.mark.tier("nightly")
def test_rows_say_which_hook_which_check_and_what_they_are_held_against(ranks: RankPool) -> None:
    rows, other = ranks.run(_measured, 2, ["alone", "torch", "fastddp", "fastddp-view"], HOOKS)
    by_name = {row["contestant"]: row for row in rows}
    assert list(by_name) == [row["contestant"] for row in other]
    assert {name: row["gradients"] for name, row in by_name.items()} == {
        "alone": "none reduced",
        "torch": "equal",
        **{c.name: c.check.passed for c in line_up(["torch", "fastddp", "fastddp-view"], HOOKS) if c.hook},
    }
    fastddp = by_name["fastddp+bf16"]
    assert (fastddp["hook"], fastddp["held_against"]) == ("bf16", "torch+fp16")
    assert "bfloat16" in fastddp["check"]
    assert 0 < fastddp["largest_difference"] < 0.1
    assert fastddp["ratio_to_held_against"] == pytest.approx(
        fastddp["median_ms"] / by_name["torch+fp16"]["median_ms"], rel=1e-4
    )
    assert by_name["fastddp-view+fp16"]["best_torch"] is None  # nobody has views and fp16
    assert by_name["fastddp+powersgd1"]["best_torch"] == "torch+powersgd1"
    assert by_name["torch+powersgd1"]["largest_difference"] > 0.1  # the approximation was in use
    assert (by_name["torch"]["hook"], by_name["torch"]["held_against"]) == ("none", None)
    assert step.case_table(rows).row_count == len(rows)


class _Spoilt:
    """A step whose gradients are changed before anybody sees them."""

    def __init__(self, inner: Step, change: Callable[[Tensor], Tensor]) -> None:
        self.run, self.clear = inner.run, inner.clear
        self.gradients = lambda: [change(gradient) for gradient in inner.gradients()]


def _measured_with_spoilt_contestants(rank: int) -> dict[str, Any]:
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "fastddp": lambda gradient: gradient * (1 + 2**-20),
        "fastddp+fp16": lambda gradient: gradient * 1.05,
        "torch+fp16": lambda gradient: gradient * (1 + 2**-20),  # within rounding
        "fastddp+powersgd1": lambda gradient: gradient + 1e-3 * rank,
        "fastddp-view+powersgd1": lambda gradient: gradient / 0,
    }

    def spoil(contestant: Contestant) -> Contestant:
        def prepare(module: nn.Module, bucket_cap_mb: float | None, hook: Hook | None) -> Step:
            return _Spoilt(contestant.prepare(module, bucket_cap_mb, hook), changes[contestant.name])

        return replace(contestant, prepare=prepare) if contestant.name in changes else contestant

    def spoilt_line_up(names: Sequence[str], hooks: Sequence[str]) -> list[Contestant]:
        return [spoil(contestant) for contestant in line_up(names, hooks)]

    with mock.patch.object(step, "line_up", spoilt_line_up):
        rows = _measured(rank, ["torch", "fastddp", "fastddp-view"], ["none", "fp16", "powersgd1"])
    return {row["contestant"]: row["gradients"] for row in rows}


@pytest.mark.tier("nightly")
def test_contestants_that_compute_something_else_are_wrong(ranks: RankPool) -> None:
    for verdicts in ranks.run(_measured_with_spoilt_contestants, 2):
        wrong = {name for name, verdict in verdicts.items() if verdict == "WRONG"}
        assert wrong == {"fastddp", "fastddp+fp16", "fastddp+powersgd1", "fastddp-view+powersgd1"}
        assert verdicts["torch+fp16"] == verdicts["fastddp-view+fp16"] == "within rounding"
        assert verdicts["torch+powersgd1"] == "ranks agree"


def test_the_exit_status_says_that_somebody_was_wrong() -> None:
    row = {"contestant": "fastddp+fp16", "case": "gpt2", "gradients": "equal"}
    step.exit_if_wrong([row])
    with pytest.raises(SystemExit, match=r"fastddp\+fp16 on gpt2"):
        step.exit_if_wrong([row, row | {"gradients": "WRONG"}])


@pytest.mark.tier("nightly")
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "step.json"
    arguments = "--case 500x32sq --contestant fastddp torch --hook powersgd2 --rounds 2 --warmup 2 --backend gloo"
    monkeypatch.setattr(sys, "argv", ["bench.step", *arguments.split(), "--json", str(path)])
    monkeypatch.setattr(sys, "path", [*sys.path, str(harness.ROOT)])  # the ranks inherit it
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the bench sets it
    step.main()
    printed = capsys.readouterr().out
    rows = json.loads(path.read_text())
    assert [row["contestant"] for row in rows] == ["torch", "torch+powersgd2", "fastddp+powersgd2"]
    assert all(row["contestant"] in printed for row in rows)
    assert "--hook powersgd2" in rows[0]["command"]
