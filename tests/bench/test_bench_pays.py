"""What `bench.pays` measures, what it calls faster and slower, and what it leaves out when it goes on."""

from __future__ import annotations

import dataclasses
import doctest
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from ranks import RankPool
from repository import ROOT

# Only while bench is imported: with the root there for good, kernels/ could shadow the package of that name on PyPI.
sys.path.append(str(ROOT))

from bench import cases, contestants, harness, netns, pays, pays_report, resuming

sys.path.pop()


def test_examples_in_docstrings() -> None:
    for module in (pays, pays_report, resuming, cases):
        assert doctest.testmod(module).failed == 0
        assert doctest.testmod(module).attempted > 0


# ------------------------------------------------------------------------------------------------------ verdicts


def test_what_differs_by_less_than_bf16_from_itself_is_the_same() -> None:
    times = {"bf16": [10.0, 11.0, 9.0], "bf16-again": [10.5, 11.55, 9.45], "int8": [10.4, 11.44, 9.36]}
    times |= {"fp8": [10.6, 11.66, 9.54], "plain": [9.0, 9.9, 8.1]}
    rows = pays_report.judged_steps([{"wire": wire, "samples_ms": samples} for wire, samples in times.items()])
    assert {row["wire"]: row["verdict"] for row in rows} == {
        "bf16": "same",
        "bf16-again": "same",
        "int8": "same",
        "fp8": "slower",
        "plain": "faster",
    }
    assert {row["noise_floor"] for row in rows} == {0.05}


def test_the_noise_floor_grows_with_the_scatter_and_shrinks_with_the_rounds() -> None:
    def floor(spread: float, rounds: int) -> float:
        return pays_report.noise_floor([1 - spread, 1 + spread] * (rounds // 2), [1.0] * rounds)

    assert floor(0.2, 8) > floor(0.1, 8) > floor(0.1, 32) > 0
    assert pays_report.noise_floor([1.1], [1.0]) == pytest.approx(0.1)


def _step_row(wire: str, verdict: str, **columns: Any) -> harness.Row:
    row = {"kind": "step", "cell": "c", "model": "m", "batch": 8, "world_size": 4, "rate": "1gbit", "wire": wire}
    row |= {"median_ms": 2.0, "ratio_to_bf16": 1.0, "noise_floor": 0.01, "verdict": verdict}
    return row | columns


def test_two_levels_have_a_line_of_their_own_and_losing_cells_are_red(tmp_path: Path) -> None:
    rows = [_step_row("bf16", "same"), _step_row("int8", "slower"), _step_row("int8-nodes", "faster")]
    (table,) = pays_report.tables(rows)
    assert [column.header for column in table.columns] == ["model x batch", "network", "bf16", "int8", "noise"]
    assert [str(cell) for cell in table.columns[1].cells] == ["4 ranks, 1gbit", "in two levels"]
    losing, winning = table.columns[3].cells
    assert (losing, winning) == ("[bold red]2[/]", "[green]2[/]")
    assert pays_report.markdown(rows, "step").splitlines()[2:] == [
        "| m x8 | 4 ranks, 1gbit | 2 | **2** ▲ | 1.0% |",
        "| m x8 | in two levels |  | 2 ▼ | 1.0% |",
    ]
    pays_report.draw(tmp_path / "map.png", rows)
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_a_loss_that_never_comes_loses() -> None:
    rows = [{"wire": wire, "seconds_to_loss": 10.0} for wire in ("bf16", "bf16-again")]
    *_, never = pays_report.judged_trainings([*rows, {"wire": "powersgd1", "seconds_to_loss": None}])
    assert (never["verdict"], never["ratio_to_bf16"]) == ("never", None)
    assert "red" in pays_report._STYLES["never"]


# ---------------------------------------------------------------------------------------------------- cells and batches


@pytest.mark.parametrize("name", ["500x32sq", "gpt"])
def test_a_larger_batch_computes_more_of_the_same_parameters(name: str) -> None:
    plain, larger = (cases.case_named(n).build(torch.device("cpu")) for n in (name, f"{name}@3"))
    assert [p.shape for p in plain[0].parameters()] == [p.shape for p in larger[0].parameters()]
    computed = []
    for model, batch_of in (plain, larger):
        loss = model(*batch_of(0, 0))
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        rows = model.uses if name == "500x32sq" else batch_of(0, 0)[0]
        computed.append(len(rows))
    assert computed[1] == 3 * computed[0]


@pytest.mark.parametrize("name", ["resnet51", "gpt@0", "gpt@", "@2", "gpt@-1"])
def test_a_case_that_does_not_exist_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"there is no case '{name}'; there are 500x32sq"):
        cases.case_named(name)


def test_two_levels_compete_where_machines_have_several_ranks_and_fastddp_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without = [contestant for contestant in contestants.CONTESTANTS if contestant.name != pays.NODES]
    monkeypatch.setattr(contestants, "CONTESTANTS", without)
    assert pays.levels(4) == ["fastddp"]
    nodes = contestants.Contestant(pays.NODES, "default", contestants._fastddp(), by_default=False)
    monkeypatch.setattr(contestants, "CONTESTANTS", [*without, nodes])
    assert pays.levels(2) == ["fastddp"]
    assert pays.levels(4) == ["fastddp", pays.NODES]


def test_bf16_once_more_is_there_under_its_own_name() -> None:
    names = [c.name for c in contestants.line_up(["fastddp", pays._TWICE], list(pays.WIRES))]
    assert names.count(pays._TWICE) == 1
    twice = next(c for c in contestants.CONTESTANTS if c.name == pays._TWICE)
    assert (twice.hook_name, twice.check.passed) == ("bf16", "within rounding")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--ranks 3", "--ranks must be even"),
        ("--rate fast", "'fast' is not a rate"),
        ("--warmup 1", "--warmup at least 2"),
        ("--batch 0", "must be at least 1"),
        ("--resume", "--resume takes --json"),
        ("--model resnet51", "invalid choice"),
    ],
)
def test_bad_arguments_are_named(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.pays", *arguments.split()])
    with pytest.raises(SystemExit, match="2"):
        pays.parse_arguments()
    assert message in capsys.readouterr().err


def test_full_is_more_and_what_is_named_still_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.pays", "--full", "--rate", "1gbit"])
    options = pays.parse_arguments()
    assert options.rate == ["1gbit"]
    assert set(options.model) > set(pays._DEFAULT["model"])


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(netns, "unavailable", lambda: "network namespaces take root")
    monkeypatch.setattr(sys, "argv", ["bench.pays"])
    pays.main()
    assert capsys.readouterr().out == "bench.pays was skipped: network namespaces take root.\n"


@pytest.mark.parametrize(("limit", "what"), [("--memory-gib 0.1", "1 GiB"), ("--longest 0.1", "0.3 minutes")])
def test_what_takes_too_much_is_left_out_and_named(
    limit: str, what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = f"--model 500x32sq --batch 1 --ranks 2 --rate loopback --task {limit}"
    monkeypatch.setattr(sys, "argv", ["bench.pays", *arguments.split()])
    pays.main()
    expected = f"Left out: 500x32sq x1 on 2 ranks at loopback, which would take about {what}.\n"
    assert capsys.readouterr().out == expected


# ------------------------------------------------------------------------------------------------------ trainings


def _trained(rank: int) -> list[harness.Row]:
    """Of int8, whose loss falls to bf16's last one, plus 2 %, in half of the steps; a step takes 0.1 s."""

    def train(task: object, setting: str, seed: int, power_sgd: object) -> SimpleNamespace:
        slope = 2.0 if setting == "int8" else 1.0
        return SimpleNamespace(
            losses=[100.0 - slope * step for step in range(40)],
            step_ends=[0.1 * (step + 1) for step in range(40)],
            evaluation_loss=1.0,
            digests=["a", "a"],
        )

    with mock.patch.object(pays.training, "train", train), mock.patch.dict(pays.TASKS, {"digits": NoTask}):
        return pays.train_all("digits", ["bf16", "int8"], 40, 0, 1)


@dataclasses.dataclass
class NoTask:
    name: str = "digits"
    about: str = ""
    steps: int = 0


def test_what_counts_is_the_time_to_bf16s_last_loss_plus_2_percent(ranks: RankPool) -> None:
    bf16, int8 = ranks.run(_trained, 1)[0]
    last = 100 - 34.5  # the mean of the last ten
    assert bf16["final_loss"] == last
    assert bf16["target_loss"] == int8["target_loss"] == pytest.approx(1.02 * last)
    # A mean of ten steps of int8 is at 66.81 when the last of them is number 21.1: the 22nd, from 0.
    assert (int8["steps_to_loss"], int8["seconds_to_loss"]) == (23, 2.3)
    assert bf16["seconds_to_loss"] > int8["seconds_to_loss"]
    assert bf16["median_ms"] == pytest.approx(100.0)


def test_memory_and_minutes_of_a_cell() -> None:
    # 25.6 million gradients of 4 bytes.
    assert 2 * 0.095 * 11 < pays.needs_gib("resnet50", 2) < 2 * 0.095 * 20
    more_ranks = pays.needs_gib("resnet50", 8) / pays.needs_gib("resnet50", 4)
    assert more_ranks == pytest.approx(2.0)
    # Ten rounds and two more; plain over 1 Gbit/s takes 0.82 s, all wires together 3.9 times as much, and auto's first
    # steps 11 times.
    slow, fast = (pays.needs_minutes("resnet50", 1, 2, rate, 10) for rate in ("1gbit", "loopback"))
    assert 60 * (slow - fast) == pytest.approx((12 * 3.9 + 11) * 0.818, rel=0.01)


# ------------------------------------------------------------------------------------------------------ going on


def _commit(monkeypatch: pytest.MonkeyPatch, commit: str = "a", dirty: bool = False) -> None:
    monkeypatch.setattr(harness, "environment", lambda *_: {"commit": commit, "dirty": dirty})


def test_cells_of_the_same_commit_are_there_and_others_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    _commit(monkeypatch)
    results = resuming.Results(path, resume=True)  # there is no file yet
    for number, cell in enumerate(("first", "second")):
        assert cell not in results
        results.measure_if_missing(cell, lambda number: [{"commit": "a", "dirty": False, "number": number}], number)
        assert cell in results
        results.measure_if_missing(cell, lambda: pytest.fail("it is there"))
        assert [row["cell"] for row in json.loads(path.read_text())] == ["first", "second"][: number + 1]
    assert "first" in resuming.Results(path, resume=True)
    assert "first" not in resuming.Results(path, resume=False)
    _commit(monkeypatch, commit="b")
    assert "first" not in resuming.Results(path, resume=True)
    _commit(monkeypatch, dirty=True)
    assert "first" not in resuming.Results(path, resume=True)


@pytest.mark.parametrize(("text", "message"), [("[{", "is not JSON"), ('[{"a": 1}]', "does not hold rows of cells")])
def test_a_file_of_something_else_is_refused_and_kept(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    arguments = f"--model 500x32sq --rate loopback --task --resume --json {path}"
    monkeypatch.setattr(sys, "argv", ["bench.pays", *arguments.split()])
    with pytest.raises(SystemExit, match=f"--json: .*{message}"):
        pays.main()
    assert path.read_text() == text


# ------------------------------------------------------------------------------------------------------ small runs


@pytest.mark.tier("nightly")
def test_a_small_run_and_its_resumption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    path, picture = tmp_path / "pays.json", tmp_path / "pays.png"
    arguments = "--model 500x32sq --batch 2 --ranks 2 --rate loopback --rounds 2 --warmup 2 "
    arguments += f"--task digits --training-rate loopback --steps 4 --json {path} --plot {picture} --resume --markdown"
    monkeypatch.setattr(sys, "argv", ["bench.pays", *arguments.split()])
    monkeypatch.setattr(sys, "path", [*sys.path, str(harness.ROOT)])  # the ranks inherit it
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the bench sets it
    pays.main()
    rows = json.loads(path.read_text())
    steps, trainings = ([row for row in rows if row["kind"] == kind] for kind in ("step", "training"))
    wires = set(pays.WIRES.values()) | {"bf16-again"}
    assert {row["wire"] for row in steps} == wires | {"torch", "alone"}
    assert {row["wire"] for row in trainings} == wires
    for row in steps:
        assert (row["model"], row["batch"], row["world_size"], row["rate"]) == ("500x32sq", 2, 2, "loopback")
        assert len(row["samples_ms"]) == row["rounds"] == 2
        assert row["gradients"] != "WRONG"
        assert row["case"] == "500x32sq@2"
    for row in trainings:
        assert row["ranks_agree"]
        assert (row["seconds_to_loss"] is None) == (row["steps_to_loss"] is None)
    bf16, again = (next(row for row in trainings if row["wire"] == wire) for wire in ("bf16", "bf16-again"))
    assert bf16["final_loss"] == again["final_loss"]  # the same training
    assert bf16["steps_to_loss"] is not None
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "| 500x32sq x2 | 2 ranks, loopback |" in capsys.readouterr().out

    now = harness.environment("", torch.device("cpu"), 1)
    for row in rows:
        row["dirty"] = False
    harness.write_json(path, rows)
    monkeypatch.setattr(harness, "environment", lambda *_: now | {"dirty": False})
    monkeypatch.setattr(harness, "spawn_ranks", lambda *_, **__: pytest.fail("it was there already"))
    pays.main()
    assert json.loads(path.read_text()) == rows


@pytest.mark.tier("nightly")
def test_a_cell_over_a_cable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if netns.unavailable() is not None:
        pytest.skip(netns.unavailable())
    path = tmp_path / "pays.json"
    arguments = f"--model 500x32sq --batch 1 --ranks 4 --rate 1gbit --rounds 1 --warmup 2 --task --json {path}"
    monkeypatch.setattr(sys, "argv", ["bench.pays", *arguments.split()])
    monkeypatch.setattr(sys, "path", [*sys.path, str(harness.ROOT)])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    pays.main()
    rows = json.loads(path.read_text())
    assert {(row["world_size"], row["ranks_per_node"], row["rate_gbit_s"]) for row in rows} == {(4, 2, 1.0)}
    assert all(0 < row["tcp_gbit_s"] < 1 for row in rows)
