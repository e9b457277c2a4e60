"""What `bench.training` trains, and what it says of the losses that come out."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from ranks import RankPool
from repository import ROOT

# Only while bench is imported: with the root there for good, kernels/ could shadow the package of that name on PyPI.
sys.path.append(str(ROOT))

from bench import harness, losses, tasks, training
from bench.losses import UNCOMPRESSED, Verdict, failures, verdicts
from bench.training import PowerSGDOptions

sys.path.pop()

STEPS = 12


# ------------------------------------------------------------------------------------------------------ verdicts


def test_in_spread_compares_means_with_what_the_seeds_differ() -> None:
    uncompressed = [2.0, 2.1, 1.9]  # 0.2 between the largest and the smallest
    assert Verdict.of([2.3, 2.2, 2.0], uncompressed).in_spread
    assert not Verdict.of([2.3, 2.2, 2.2], uncompressed).in_spread
    assert not Verdict.of([1.9, 1.8, 1.6], uncompressed).in_spread  # nor may it be lower
    assert not Verdict.of([2.01, 2.01, 2.01], [2.0, 2.0, 2.0]).in_spread
    verdict = Verdict.of([2.1, 2.2, 2.0], uncompressed)
    assert (verdict.mean, verdict.deviation, verdict.ratio) == pytest.approx((2.1, 0.1, 1.05))
    assert (verdict.uncompressed, verdict.spread) == pytest.approx((2.0, 0.2))


def test_differences_are_of_the_same_seed() -> None:
    assert Verdict.of([2.0, 1.9, 2.1], [2.0, 2.1, 1.9]).largest_difference == pytest.approx(0.2)
    rows = [_row(setting, seed, float(seed)) for seed in (2, 0, 1) for setting in (UNCOMPRESSED, "bf16")]
    rows.append(rows.pop(0))
    assert verdicts(rows, "training_loss")["bf16"].largest_difference == 0


def test_close_is_at_most_two_percent_above() -> None:
    uncompressed = [2.0, 2.1, 1.9]
    assert Verdict.of([2.03, 2.13, 1.95], uncompressed).close  # 2.0367, 1.8 % above
    assert not Verdict.of([2.05, 2.13, 1.96], uncompressed).close  # 2.0467, 2.3 % above
    assert Verdict.of([1.0, 1.0, 1.0], uncompressed).close


@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_no_number_is_neither(place: int) -> None:
    losses = [2.0, 2.1, 1.9]
    losses[place] = math.nan
    verdict = Verdict.of(losses, [2.0, 2.1, 1.9])
    assert not verdict.in_spread
    assert not verdict.close


def _row(setting: str, seed: int, loss: float, **columns: Any) -> harness.Row:
    row = {
        "task": "made up",
        "world_size": 2,
        "setting": setting,
        "seed": seed,
        "training_loss": loss,
        "evaluation_loss": loss,
        "ranks_agree": True,
        "parameters_digest": f"{loss}",
    }
    return row | columns


def test_failures_are_named_and_a_worse_powersgd_is_none() -> None:
    plain = [_row(UNCOMPRESSED, seed, 2 + 0.1 * seed) for seed in range(3)]
    same = [row | {"setting": setting} for row in plain for setting in ("torch", "bf16", "powersgd1")]
    assert failures(plain + same) == []
    assert failures([*plain, *(_row("powersgd1", seed, 9.0) for seed in range(3))]) == []
    assert failures([*plain, *(_row("fp16", seed, 2.31) for seed in range(3))]) == [
        "fp16 on made up: the training loss is not in the spread",
        "fp16 on made up: the evaluation loss is not in the spread",
    ]
    assert failures([plain[0], _row("fp16", 0, 2.21)]) == []  # a single seed has no spread
    other = [*plain, *(row | {"setting": "torch", "parameters_digest": "other"} for row in plain)]
    assert failures(other) == [f"{UNCOMPRESSED} on made up: not bitwise what torch's DDP trains"]
    assert failures([row | {"world_size": 3} for row in other]) == []  # more than two ranks add up in another order
    apart = [row | {"ranks_agree": False} for row in plain]
    assert failures(apart) == [f"{UNCOMPRESSED} on made up: ranks end with different parameters"]
    assert "not a number" in failures([*plain[:2], plain[2] | {"evaluation_loss": math.nan}])[0]
    with pytest.raises(SystemExit, match="made up"):
        losses.exit_if_wrong(other)


# -------------------------------------------------------------------------------------------------------- settings


def hooks_of_settings(rank: int) -> dict[str, str | None]:
    ours = [setting for setting in training.SETTINGS if not setting.startswith("torch")]
    hooks = {setting: training.wrap(nn.Linear(4, 4), setting, PowerSGDOptions(2))._comm_hook for setting in ours}
    return {setting: None if hook is None else hook[1].__name__ for setting, hook in hooks.items()}  # type: ignore[index]


def test_every_setting_has_the_hook_of_its_name(ranks: RankPool) -> None:
    power_sgd = dict.fromkeys((f"powersgd{vectors}" for vectors in (1, 2, 4, 8)), "powerSGD_hook")
    compress = {name: f"{name}_compress_hook" for name in ("bf16", "fp16", "int8", "fp8")}
    expected = {UNCOMPRESSED: None, "nudged": None, "auto": "auto_hook"} | compress | power_sgd
    assert ranks.run(hooks_of_settings, 1) == [expected]


# ------------------------------------------------------------------------------------------------------ small runs


def _tiny_gpt() -> tasks.Task:
    shape = tasks.Shape(layers=1, heads=2, width=16, context=8)
    return tasks.gpt_task(steps=STEPS, shape=shape, rows=2, evaluation_batches=2)


def _options(**changes: Any) -> argparse.Namespace:
    options = {
        "setting": [UNCOMPRESSED, "torch", "nudged", "bf16", "powersgd2", "torch-powersgd2"],
        "seeds": 2,
        "steps": None,
        "learning_rate": None,
        "powersgd_start": 3,
        "min_compression_rate": 1.0,
        "threads": 1,
        "module": "test",
    }
    return argparse.Namespace(**(options | changes))


def _measured(rank: int) -> list[harness.Row]:
    return training.measure(_tiny_gpt(), _options())


@pytest.mark.tier("nightly")
def test_rows_and_table_of_a_small_run(ranks: RankPool) -> None:
    rows, other = ranks.run(_measured, 2)
    assert [(row["setting"], row["seed"]) for row in rows] == [
        (setting, seed) for setting in _options().setting for seed in (0, 1)
    ]
    assert [row["parameters_digest"] for row in other] == [row["parameters_digest"] for row in rows]
    plain, theirs, nudged, cast, product, their_product = losses.by_setting(rows).values()
    for seed in (0, 1):
        assert theirs[seed]["curve"] == plain[seed]["curve"]  # bit by bit
        assert nudged[seed]["parameters_digest"] != plain[seed]["parameters_digest"]
        assert nudged[seed]["training_loss"] == pytest.approx(plain[seed]["training_loss"], rel=1e-3)
        assert cast[seed]["curve"][0] == plain[seed]["curve"][0]  # the same parameters and the same batch
        assert cast[seed]["parameters_digest"] != plain[seed]["parameters_digest"]  # there was a cast
        start = product[seed]["powersgd_start"]
        assert product[seed]["curve"][: start + 1] == plain[seed]["curve"][: start + 1]
        assert product[seed]["curve"] != plain[seed]["curve"]
        assert their_product[seed]["training_loss"] == pytest.approx(product[seed]["training_loss"], rel=1e-2)
    assert plain[0]["curve"][0] != plain[1]["curve"][0]
    assert all(len(row["curve"]) == STEPS and row["ranks_agree"] for row in rows)
    assert plain[0]["powersgd_start"] is None
    assert failures([row for row in rows if row["setting"] != "bf16"]) == []
    assert losses.task_table(rows).row_count == 6


def _with_a_rank_that_drifts(rank: int) -> bool:
    def wrap(model: nn.Module, setting: str, power_sgd: PowerSGDOptions) -> nn.Module:
        with torch.no_grad():
            next(model.parameters()).add_(1e-3 * rank)
        return model

    with mock.patch.object(training, "wrap", wrap):
        return training.measure(_tiny_gpt(), _options(setting=[UNCOMPRESSED], seeds=1))[0]["ranks_agree"]


@pytest.mark.tier("slow")
def test_ranks_with_different_parameters_are_seen(ranks: RankPool) -> None:
    assert ranks.run(_with_a_rank_that_drifts, 2) == [False, False]


@pytest.mark.tier("slow")
def test_digits_are_shared_out_and_none_is_for_both() -> None:
    pytest.importorskip("sklearn")
    task = tasks.digits_task()
    shares = [task.data(0, rank, 2) for rank in range(2)]
    evaluation = torch.cat([inputs for share in shares for inputs, _ in share.evaluation])
    assert len(evaluation) == 450
    steps_an_epoch = (1797 - 450) // 64
    epoch = torch.cat([share.batch(step)[0] for step in range(steps_an_epoch) for share in shares])
    assert len(epoch.flatten(1).unique(dim=0)) == len(epoch)  # each image once
    assert len(torch.cat([epoch, evaluation]).flatten(1).unique(dim=0)) == len(epoch) + len(evaluation)
    assert not torch.equal(shares[0].batch(0)[0], shares[0].batch(steps_an_epoch)[0])  # another order
    assert not torch.equal(shares[0].batch(0)[0], task.data(1, 0, 2).batch(0)[0])
    assert task.model()(evaluation).shape == (450, 10)


def test_the_learning_rate_warms_up_and_goes_down() -> None:
    task = replace(_tiny_gpt(), steps=100, learning_rate=1.0)
    rates = [task.learning_rate_at(step) for step in range(100)]
    assert rates[0] == 0.05
    assert max(rates) == rates[19] == pytest.approx(0.829)
    assert rates[99] == pytest.approx(0.109)


@pytest.mark.parametrize("name", ["fp4", "powersgd", "powersgd0", "powersgd33"])
def test_settings_that_do_not_exist_are_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.training", f"--setting={name}"])
    with pytest.raises(SystemExit, match="2"):
        training.parse_arguments()
    assert f"there is no {name!r}; there are uncompressed, torch, nudged, bf16, fp16" in capsys.readouterr().err


@pytest.mark.tier("nightly")
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path, picture = tmp_path / "training.json", tmp_path / "training.png"
    arguments = f"--task gpt --setting powersgd2 --seeds 1 --steps 3 --json {path} --plot {picture}"
    monkeypatch.setattr(sys, "argv", ["bench.training", *arguments.split()])
    monkeypatch.setattr(sys, "path", [*sys.path, str(harness.ROOT)])  # the ranks inherit it
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the bench sets it
    training.main()
    printed = capsys.readouterr().out
    rows = json.loads(path.read_text())
    assert [row["setting"] for row in rows] == [UNCOMPRESSED, "powersgd2"]
    assert all(row["setting"] in printed for row in rows)
    assert "--setting powersgd2" in rows[0]["command"]
    assert picture.read_bytes().startswith(b"\x89PNG")
