"""What `bench.paper` measures, and what it holds it against."""

from __future__ import annotations

import contextlib
import doctest
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from ranks import RankPool
from repository import ROOT

# Only while bench is imported: with the root there for good, kernels/ could shadow the package of that name on PyPI.
sys.path.append(str(ROOT))

from bench import cases, harness, netns, paper, paper_figures

sys.path.pop()

from fastddp.exchange import lanes


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(paper_figures).failed == 0
    assert doctest.testmod(paper_figures).attempted > 0


def test_every_figure_says_what_the_paper_found_and_what_differs() -> None:
    assert set(paper_figures.FIGURES) == set(paper.RANKS)
    for figure in paper_figures.FIGURES.values():
        words = paper_figures.words(figure)
        assert all(part in words for part in ("The paper: ", "Here: ", f"Figure {figure.name}: "))
        assert len(figure.found) > 40


# ------------------------------------------------------------------------------------------------------ contestants


def _settings(rank: int, figure: str) -> list[tuple[str, harness.Row]]:
    model, _ = cases.case_named("500x32sq").build(torch.device("cpu"))
    return [(type(c.module).__module__.split(".")[0], c.columns) for c in paper.line_up(figure, model)]


@pytest.mark.tier("slow", but_one_in=5)
@pytest.mark.parametrize(
    ("figure", "column", "values"),
    [
        ("6", "overlap", (True, False)),
        ("7", "bucket_cap_mb", paper.CAPS_MB),
        ("10", "every", paper.EVERY),
        ("12", "groups", paper.GROUPS),
    ],
)
def test_both_ddps_take_every_setting(ranks: RankPool, figure: str, column: str, values: tuple[object, ...]) -> None:
    alone, *others = ranks.run(_settings, 2, figure)[0]
    assert alone[1] == {"contestant": "alone"}
    for name in ("fastddp", "torch"):
        mine = [columns for library, columns in others if library == name]
        assert mine == [{"contestant": name, column: value} for value in values]


def _lanes(rank: int, count: int) -> tuple[int, int]:
    """Lanes of the DDP that was asked for so many, and of what comes after it."""
    model, _ = cases.case_named("500x32sq").build(torch.device("cpu"))
    wrapped = paper._over_lanes(model, count)
    return len(lanes.lanes_for(wrapped.process_group, torch.device("cpu"))), lanes._LANES


@pytest.mark.parametrize("count", [1, 2, 3])
def test_fastddp_has_as_many_lanes_as_are_asked_for(ranks: RankPool, count: int) -> None:
    assert ranks.run(_lanes, 2, count) == [(count, 2)] * 2


def _judged(rank: int) -> tuple[list[str], list[str]]:
    """Verdicts as it is, and with a contestant whose gradients are not averaged."""
    model, batch_of = cases.case_named("500x32sq").build(torch.device("cpu"))
    right = paper.line_up("10", model)
    alone = paper.Contestant({"contestant": "fastddp"}, paper.twin(model))
    reference = paper.TorchDDP(paper.twin(model))
    batch = batch_of(rank, 3)
    return paper.judge(right, reference, batch), paper.judge([*right, alone], reference, batch)


@pytest.mark.tier("slow")
def test_gradients_that_are_not_averaged_are_wrong(ranks: RankPool) -> None:
    for right, with_wrong in ranks.run(_judged, 2):
        assert right == ["none reduced"] + ["equal"] * 8
        assert with_wrong == [*right, "WRONG"]


# ------------------------------------------------------------------------------------------------------ units


def test_times_are_milliseconds_of_one_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    synchronised = []

    def passes(seconds: float) -> None:
        now[0] += seconds

    class Module(nn.Linear):
        def __call__(self) -> Any:
            passes(2.0)
            return SimpleNamespace(backward=lambda: passes(3.0))

        @contextlib.contextmanager
        def no_sync(self) -> Iterator[None]:
            synchronised.append(False)
            yield

    contestant = paper.Contestant({"contestant": "torch", "every": 4}, Module(1, 1))
    contestant._optimizer = SimpleNamespace(step=lambda: passes(1.0))  # type: ignore[assignment]
    monkeypatch.setattr(paper.time, "perf_counter", lambda: now[0])
    assert contestant.run(()) == [2000.0, 3000.0, 250.0]
    assert len(synchronised) == 3


def test_columns_compare_with_the_module_alone() -> None:
    everyone = [paper.Contestant({"contestant": name}, nn.Linear(1, 1)) for name in (paper.ALONE, paper.TORCH)]
    times = torch.tensor([[[2.0, 4.0, 1.0]], [[2.0, 7.0, 1.0]]], dtype=torch.float64)
    (row,) = paper.compare(everyone, times, ["none reduced", "equal"])
    assert (row["forward_ms"], row["backward_ms"], row["optimizer_ms"]) == (2.0, 7.0, 1.0)
    assert (row["backward_alone_ms"], row["exposed_ms"]) == (4.0, 3.0)
    assert (row["alone_ms"], row["step_ms"], row["efficiency"]) == (7.0, 10.0, 0.7)


def test_predictions_are_in_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = SimpleNamespace(columns={"contestant": "fastddp-auto"}, module=mock.Mock())
    found = SimpleNamespace(
        step_at_default=SimpleNamespace(low=0.1, high=0.2), step=SimpleNamespace(low=0.08, high=0.16), compute=0.05
    )
    monkeypatch.setattr(paper.Profile, "load", lambda path: SimpleNamespace(ranks=2))
    monkeypatch.setattr(paper.Network, "of", lambda *_: None)
    monkeypatch.setattr(paper, "predict", lambda *_: found)
    row, *_ = paper._predicted({}, [planned])  # type: ignore[list-item]
    assert (row["predicted_low_ms"], row["predicted_high_ms"]) == (100.0, 200.0)
    assert (row["best_low_ms"], row["best_high_ms"], row["alone_ms"]) == (80.0, 160.0, 50.0)


# ------------------------------------------------------------------------------------------------------ the command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--ranks 3", "--ranks must be even"),
        ("--rate fast", "'fast' is not a rate"),
        ("--case resnet51", "there is no case 'resnet51'"),
        ("--warmup 1", "--warmup at least 2"),
        ("--resume", "--resume takes --json"),
        ("--figure 11", "invalid choice"),
    ],
)
def test_bad_arguments_are_named(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.paper", *arguments.split()])
    with pytest.raises(SystemExit, match="2"):
        paper.parse_arguments()
    assert message in capsys.readouterr().err


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(netns, "unavailable", lambda: "network namespaces take root")
    monkeypatch.setattr(sys, "argv", ["bench.paper"])
    paper.main()
    assert capsys.readouterr().out == "bench.paper was skipped: network namespaces take root.\n"


def _run(monkeypatch: pytest.MonkeyPatch, path: Path, arguments: str) -> list[harness.Row]:
    monkeypatch.setattr(sys, "argv", ["bench.paper", *arguments.split(), "--json", str(path)])
    monkeypatch.setattr(sys, "path", [*sys.path, str(harness.ROOT)])  # the ranks inherit it
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the bench sets it
    paper.main()
    return json.loads(path.read_text())


@pytest.mark.tier("nightly")
def test_a_small_run_of_the_figures_that_are_measured_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "--figure 6 7 10 12 --case 500x32sq --rate loopback --ranks 2 --rounds 2 --warmup 2"
    rows = _run(monkeypatch, tmp_path / "paper.json", command)
    assert {row["figure"] for row in rows} == {"6", "7", "10", "12"}
    for row in rows:
        assert row["gradients"] == "equal"
        assert row["step_ms"] >= row["forward_ms"] > 0
        assert row["exposed_ms"] >= 0
    by_figure = {name: [row for row in rows if row["figure"] == name] for name in paper.RANKS}
    assert all((row["saved_by_overlap"] is None) != row["overlap"] for row in by_figure["6"])
    assert {row["buckets"] for row in by_figure["7"] if row["bucket_cap_mb"] == 0} == {500, None}
    assert {row["saved"] for row in by_figure["10"] if row["every"] == 1} == {0}
    assert {row["ratio_to_one_group"] for row in by_figure["12"] if row["groups"] == 1} == {1}
    printed = capsys.readouterr().out
    assert all(f"figure {name}, 500x32sq, 2 ranks, loopback" in printed for name in ("6", "7", "10", "12"))


@pytest.mark.tier("nightly")
def test_other_numbers_of_ranks_are_predicted_from_a_profile_over_a_cable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if netns.unavailable() is not None:
        pytest.skip(netns.unavailable())
    rows = _run(
        monkeypatch, tmp_path / "paper.json", "--figure 9 --case gpt --rate 1gbit --ranks 2 --rounds 1 --warmup 2"
    )
    measured = {row["contestant"]: row for row in rows if row["gradients"] != "predicted"}
    assert set(measured) == {"fastddp", "torch", "fastddp-auto"}
    assert all(row["efficiency"] > 0 and row["rate_gbit_s"] == 1 for row in measured.values())
    predicted = [row for row in rows if row["gradients"] == "predicted"]
    if "no_prediction" in predicted[0]:  # a loaded machine's times may support no bandwidth
        assert "says nothing of a network" in predicted[0]["no_prediction"]
        return
    assert [row["world_size"] for row in predicted] == list(paper.PREDICTED)
    lows = [row["predicted_low_ms"] for row in predicted]
    assert lows == sorted(lows)
    assert all(0 < row["predicted_low_ms"] <= row["predicted_high_ms"] for row in predicted)
