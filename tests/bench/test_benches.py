"""Every bench that needs no GPU runs once, in its smallest case; and what would go wrong in silence: its statistics."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from on_ranks import on_ranks
from repository import ROOT

# Only while bench is imported: with the root there for good, kernels/ could shadow the package of that name on PyPI.
sys.path.append(str(ROOT))

from bench import cases, contestants, harness, losses, netns, pays, soak, step

for _name in (
    "bit_flips.__main__",
    "compiled",
    "elastic",
    "faults.__main__",
    "kernels",
    "sharded",
    "training",
    "watching",
):
    importlib.import_module(f"bench.{_name}")

sys.path.pop()

MIB = 1 << 20
Rows = list[harness.Row]


WITH_EXAMPLES = "cases contestants harness netns pack pays sharded soak"


@pytest.mark.parametrize("name", WITH_EXAMPLES.split())
def test_examples_in_docstrings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contestants.dist, "is_nccl_available", lambda: False)
    found = doctest.testmod(_bench(name))
    assert found.failed == 0 < found.attempted


# ------------------------------------------------------------------------------------------------------ small runs


def _about_network(rows: Rows) -> None:
    assert [(row["contestant"], row["hook"], row["gradients"]) for row in rows] == [
        ("torch", "none", "equal"),
        ("fastddp", "none", "equal"),
        ("torch+fp16", "fp16", "within rounding"),
        ("fastddp+fp16", "fp16", "within rounding"),
    ]
    for row in rows:
        assert 0.1 < row["tcp_gbit_s"] < row["rate_gbit_s"] == 1.0
        bits_a_direction = 8 * row["elements"] * {"none": 4, "fp16": 2}[row["hook"]]
        assert row["median_ms"] > 1e3 * bits_a_direction / 1.1e9  # the gradients did travel over the cable


def _about_pays(rows: Rows) -> None:
    assert {row["wire"] for row in rows} == {*pays.WIRES.values(), "bf16-again", "torch", "alone"}
    assert all(row["gradients"] != "WRONG" and len(row["samples_ms"]) == 2 for row in rows)


def _about_step(rows: Rows) -> None:
    by_name = {row["contestant"]: row for row in rows}
    assert {name: row["gradients"] for name, row in by_name.items()} == {
        "alone": "none reduced",
        "torch": "equal",
        "torch+fp16": "within rounding",
        "torch+powersgd1": "ranks agree",
        "fastddp+bf16": "within rounding",
        "fastddp+powersgd1": "ranks agree",
    } | dict.fromkeys(["torch+bf16"] * torch.distributed.is_nccl_available(), "within rounding")
    row = by_name["fastddp+bf16"]
    assert (row["hook"], row["held_against"]) == ("bf16", "torch+fp16")
    assert 0 < row["largest_difference"] < 0.1 < by_name["torch+powersgd1"]["largest_difference"]


def _about_compiled(rows: Rows) -> None:
    assert [row["gradients"] for row in rows] == ["none reduced", *["within rounding"] * 3]
    graphs = {row["contestant"]: row["graphs"] for row in rows}
    assert graphs.pop("torch") > 1
    assert graphs == {"alone": 1, "torch-whole": 1, "fastddp": 1}
    assert all(row["without_exchange_ms"] > 0 and row["paired_ratio_to_whole"] > 0 for row in rows)


def _about_compile_time(rows: Rows) -> None:
    assert [(row["contestant"], row["graphs"], row["ratio_to_alone"]) for row in rows] == [("torch", 1, None)]


def _about_resident_memory(rows: Rows) -> None:
    assert [(row["contestant"], row["ratio_to_torch"]) for row in rows] == [("torch", 1.0)]
    assert 100 < rows[0]["mib_before"] <= rows[0]["peak_mib"]


def _about_sharded(rows: Rows) -> None:
    assert {row["contestant"]: row["result"] for row in rows} == dict.fromkeys(
        ("torch", "zero", "sharded", "fsdp2", "sharded-int8", "sharded-bf16"), "ranks agree"
    )


def _about_memory(rows: Rows) -> None:
    """A bucket or two more may be counted, because gloo's threads free them where the profiler does not look."""
    assert {row["contestant"]: row["formula"] for row in rows} == {"torch": 20.0, "sharded-lazy": 10.0}
    for row in rows:
        assert row["formula"] <= row["held"] < row["formula"] + 2.0
        assert row["held"] <= row["peak_of_last_step"] <= row["peak"]


def _about_training(rows: Rows) -> None:
    plain, theirs, product, sharded, rounded = (row for row in rows if row["task"] == "gpt")
    assert theirs["curve"] == plain["curve"] != product["curve"]  # bit by bit
    assert sharded["curve"] == pytest.approx(plain["curve"], rel=1e-5) != rounded["curve"]
    assert all(len(row["curve"]) == 4 and row["ranks_agree"] for row in rows)


def _about_watching(rows: Rows) -> None:
    assert {"measured", "audited", "both", "counted"} <= {row["steps"] for row in rows}


def _about_flips(rows: Rows) -> None:
    assert {(row["found_by"], row["rank_named"]) for row in rows} >= {("replicas", True)}
    assert all(row["as_promised"] for row in rows)


def _about_faults(rows: Rows) -> None:
    one, scale = rows
    assert (one["fault"], one["right"]) == ("exit-0-between", True)
    assert (scale["keys_in_healthy_steps"], scale["findings"]) == (0, [["forward", [32]]])


def _about_kernels(rows: Rows) -> None:
    operations = {"pack", "unpack", "compress", "orthogonalise", "encode", "decode", "sum_shards"}
    assert {row["operation"] for row in rows} >= operations


def _about_alarms(rows: Rows) -> None:
    assert [(row["alarms"], row["replicas_agree"]) for row in rows] == [([], True)] * 2


def _about_regroups(rows: Rows) -> None:
    assert [(row["contestant"], row["parameters"]) for row in rows] == [("regroup, int8, 2 ranks", 2 * 64 * 64)]
    assert rows[0]["median_ms"] > 0


def _about_kills(rows: Rows) -> None:
    assert [(row["kills"], row["replicas_equal"]) for row in rows] == [(0, True), (1, True)]
    assert rows[1]["lost_steps_per_kill"] <= 2


TINY = "--case gpt-tiny --warmup 2"
SMALL = "--layers 1 --width 64 --rounds 2 --warmup 2"
RUNS: list[tuple[str, str, Callable[[Rows], None]]] = [
    ("soak", "--mode watched --steps 32 --every 8", _about_alarms),
    ("bit_flips.__main__", "--target parameter --ranks 2", _about_flips),
    ("faults.__main__", "--fault exit-0-between --ranks 2 --exchange plain --patience 2 --scale 64", _about_faults),
    ("kernels", "--quick --rounds 1", _about_kernels),
    (
        "step",
        "--rate 1gbit --case 500x32sq --contestants torch fastddp --hook none fp16 --rounds 2 --warmup 2",
        _about_network,
    ),
    ("pays", "--model 500x32sq --batch 2 --ranks 2 --rate loopback --rounds 2 --warmup 2", _about_pays),
    (
        "step",
        "--case 500x32sq --contestant alone torch fastddp --hook bf16 powersgd1 --rounds 2 --warmup 2 --backend gloo",
        _about_step,
    ),
    (
        "compiled",
        f"{TINY} --rounds 2 --bucket-cap-mb 1 --without-exchange --contestants alone torch-whole fastddp",
        _about_compiled,
    ),
    ("compiled", f"{TINY} --contestants torch --compile-time --tries 1", _about_compile_time),
    ("compiled", f"{TINY} --contestants torch --memory --rounds 1", _about_resident_memory),
    ("sharded", f"{SMALL} --contestants torch zero sharded fsdp2 sharded-int8 sharded-bf16", _about_sharded),
    ("sharded", "--memory --layers 8 --width 256 --steps 3 --contestants torch sharded-lazy", _about_memory),
    (
        "training",
        "--task gpt digits --setting uncompressed torch powersgd2 sharded sharded-int8-rounded --seeds 1 --steps 4",
        _about_training,
    ),
    ("elastic", "regroup --width 64 --layers 2 --ranks 2 --hook int8 --rounds 2", _about_regroups),
    ("elastic", "kills --kills 1 --every 4", _about_kills),
    ("watching", "--case 500x32sq --rounds 2 --seconds 0.1", _about_watching),
]


@pytest.mark.tier("nightly")
@pytest.mark.parametrize(("name", "arguments", "look_at"), RUNS, ids=[run[2].__name__[1:] for run in RUNS])
def test_a_small_run(
    name: str,
    arguments: str,
    look_at: Callable[[Rows], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "1gbit" in arguments and (reason := netns.unavailable()):
        pytest.skip(reason)
    if "digits" in arguments:
        pytest.importorskip("sklearn")
    bench, path = _bench(name), tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", [f"bench.{name}", *arguments.split(), "--json", str(path)])
    monkeypatch.setattr(sys, "path", [*sys.path, str(harness.ROOT)])  # the ranks inherit it
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the bench sets it
    monkeypatch.setattr(soak, "exit_if_growing", lambda rows: None)  # so few steps may be a warm-up still
    threads = torch.get_num_threads()
    try:
        bench.main()
    finally:
        torch.set_num_threads(threads)
    rows = json.loads(path.read_text())
    look_at(rows)
    assert not any("WRONG" in row.values() for row in rows)
    assert len(capsys.readouterr().out.splitlines()) > 3  # a table


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("step", "--rate fast", "'fast' is not a rate"),
        ("step", "--warmup 1", "--warmup at least 2"),
        ("compiled", "--hook fp4", "there is no hook 'fp4'"),
        ("compiled", "--bucket-cap-mb 0.5", "--bucket-cap-mb at least 1"),
        ("pays", "--ranks 3", "--ranks must be even"),
        ("step", "--hook powersgd0", "there is no hook 'powersgd0'"),
        ("training", "--setting fp4", "there is no 'fp4'"),
    ],
)
def test_bad_arguments_are_named(
    name: str, arguments: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"bench.{name}", *arguments.split()])
    with pytest.raises(SystemExit, match="2"):
        _bench(name).parse_arguments()
    assert message in capsys.readouterr().err


# -------------------------------------------------------------------------------- who is wrong, and how a bench ends


@pytest.mark.parametrize(
    ("ends", "wrong"), [(step.exit_if_wrong, {"gradients": "WRONG"}), (soak.exit_if_growing, {"grows": ["keys"]})]
)
def test_the_exit_status_says_that_something_was_wrong(ends: Callable[[Rows], None], wrong: harness.Row) -> None:
    row: harness.Row = {"contestant": "fastddp", "case": "gpt2", "gradients": "equal", "rank": 1}
    row |= {"mode": "default", "grows": []}
    ends([row])
    with pytest.raises(SystemExit, match=r"fastddp on gpt2|rank 1"):
        ends([row, row | wrong])


@on_ranks(2)
def test_ranks_that_compute_something_else_are_wrong(rank: int) -> None:
    """Models that are not averaged, and losses that drift apart."""
    model, batch_of = cases.case_named("500x32sq").build(torch.device("cpu"))
    reference, right = contestants.line_up(["fastddp"], ["none"])
    alone = dataclasses.replace(right, engine="plain")
    everyone = [reference, right, alone]
    verdicts = step._judge(everyone, [one.step(model, None) for one in everyone], batch_of(rank, 3))
    assert [verdict.holds for verdict in verdicts] == [True, True, False]
    same = [torch.arange(6.0).view(2, 3), torch.tensor(1.0)]
    apart = [same, [same[0] + 1e-6 * rank, same[1]], [same[0], torch.tensor(math.inf)], same[:1], same[: 2 - rank]]
    holds = contestants.hook_named("powersgd1").check.holds
    assert [holds(got, same) for got in apart] == [True, False, False, False, False]


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_a_cast_may_round_and_no_more(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contestants.dist, "get_world_size", lambda: 2)
    holds: Callable[[list[Tensor], list[Tensor]], bool] = contestants.hook_named(name).check.holds
    for scale in (1.0, 1e-3, 1e-6):  # fp16 has no normal numbers below 6e-5
        shares = [scale * torch.randn(1000, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
        mean = (shares[0] + shares[1]) / 2
        travelled = (shares[0].to(dtype) / 2 + shares[1].to(dtype) / 2).float()
        assert [holds([got], [mean]) for got in (travelled, 2 * travelled, travelled.roll(1))] == [True, False, False]
    one = torch.ones(4)
    for got in ([one], [one, torch.ones(2)], [one, one / 0 * 0], [one, 1.1 * one]):
        assert not holds(got, [one, one])


# ------------------------------------------------------------------------------------------------------ statistics


@pytest.mark.parametrize(
    ("changed", "grows"),
    [
        ({}, []),
        ({"bytes": [min(place, 7) * 4 * MIB for place in range(16)]}, []),  # a warm-up
        ({"bytes": [300 * MIB + 100 * 2000 * place for place in range(16)]}, ["memory"]),
        *(({name: [9] * 15 + [10]}, [name]) for name in soak.COUNTS),
    ],
)
def test_what_soak_takes_for_growth(changed: dict[str, list[int]], grows: list[str]) -> None:
    flat = {"bytes": [300 * MIB] * 16, "threads": [9] * 16, "descriptors": [20] * 16, "keys": [7] * 16}
    assert soak.judge(flat | changed, every=100)["grows"] == grows


@pytest.mark.parametrize(
    ("got", "in_spread", "close"),
    [
        ([2.3, 2.2, 2.0], True, False),
        ([2.3, 2.2, 2.2], False, False),
        ([2.03, 2.13, 1.95], True, True),  # 1.8 % above
        ([2.05, 2.13, 1.96], True, False),  # 2.3 % above
        ([2.0, 2.1, math.nan], False, False),
    ],
)
def test_losses_are_compared_with_what_the_seeds_differ(got: list[float], in_spread: bool, close: bool) -> None:
    verdict = losses.Verdict.of(got, [2.0, 2.1, 1.9])
    assert (verdict.in_spread, verdict.close) == (in_spread, close)


def test_trainings_that_fail_are_named() -> None:
    def row(setting: str, seed: int, loss: float, **columns: Any) -> harness.Row:
        row = {"task": "made up", "world_size": 2, "setting": setting, "seed": seed, "training_loss": loss}
        return row | {"evaluation_loss": loss, "ranks_agree": True, "parameters_digest": f"{loss}"} | columns

    plain = [row(losses.UNCOMPRESSED, seed, 2 + 0.1 * seed) for seed in range(3)]
    same = [other | {"setting": setting} for other in plain for setting in ("torch", "bf16", "powersgd1")]
    worse = [row("powersgd1", seed, 9.0) for seed in range(3)]
    assert losses.failures(plain + same) == losses.failures(plain + worse) == []
    for wrong, said in (
        ([*plain, *(row("fp16", seed, 2.31) for seed in range(3))], "not in the spread"),
        ([*plain, *(other | {"setting": "torch", "parameters_digest": "other"} for other in plain)], "not bitwise"),
        ([other | {"ranks_agree": False} for other in plain], "different parameters"),
        ([*plain[:2], plain[2] | {"evaluation_loss": math.nan}], "not a number"),
    ):
        assert said in losses.failures(wrong)[0]
        with pytest.raises(SystemExit, match="made up"):
            losses.exit_if_wrong(wrong)


def _bench(name: str) -> ModuleType:
    return sys.modules[f"bench.{name}"]
