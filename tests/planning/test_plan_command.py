"""``fastddp plan``: what a profile says of other numbers of ranks and other networks."""

from __future__ import annotations

import doctest
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import fastddp
from fastddp import _build_info
from fastddp.bucket_plan import Buckets
from fastddp.planning.model import Link, compute_end, end_of
from fastddp.planning.profile import Profile, ProfiledGradient
from fastddp.tools.commands import app
from fastddp.tools.plan import scaling, uncertainty
from fastddp.tools.plan.scaling import Network, predict
from fastddp.tools.plan.uncertainty import Interval

MIB = 2**20


def profile(ranks: int = 2, link: Link | None = Link(2e-5, 1e9)) -> Profile:  # noqa: B008 - it is frozen
    """Twenty gradients of 4 MiB, 10 ms apart, from 0.1 s on."""
    size = 4 * MIB
    gradients = [ProfiledGradient(f"p{i}", 0.1 + i / 100, size, size, "float32", "cuda:0") for i in range(20)]
    return Profile(tuple(gradients), ranks, "nccl", 1, link)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    profile().save(tmp_path / "profile.json")
    return tmp_path / "profile.json"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "120", "TERM": "dumb"})


def words(result: Result) -> str:
    return " ".join(re.sub("[│╭╮╰╯─]", "", result.output).split())


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(scaling).failed == 0


@pytest.mark.parametrize(
    ("algorithm", "measured", "ranks", "latency", "bandwidth"),
    [
        *((algorithm, ranks, ranks, 2e-5, 1e9) for algorithm in ("ring", "tree") for ranks in (2, 8, 1024)),
        # 2 messages of 10 µs; a ring has 2 (n - 1) of them, a tree 2 log2(n). Of 2 ranks, each sends every byte once.
        ("ring", 2, 4, 6e-5, 1e9 / 1.5),
        ("ring", 2, 64, 126e-5, 1e9 / (2 - 1 / 32)),
        ("tree", 2, 8, 6e-5, 1e9 / 1.75),
        ("tree", 2, 64, 12e-5, 1e9 / (2 - 1 / 32)),
    ],
)
def test_what_collectives_cost_depends_on_the_number_of_ranks_and_the_algorithm(
    algorithm: scaling.Algorithm, measured: int, ranks: int, latency: float, bandwidth: float
) -> None:
    link = Network.of(profile(measured), algorithm, None, None).link(ranks)
    assert (link.latency, link.bandwidth) == (pytest.approx(latency), pytest.approx(bandwidth))


def test_what_is_given_replaces_what_was_measured() -> None:
    network = Network.of(profile(2), "ring", 1e-6, 5e10)
    assert (network.latency, network.bandwidth) == (1e-6, 5e10)
    assert network.measured_on == uncertainty.WHOLE_WIRE
    with pytest.raises(ValueError, match="is of one rank, which says nothing of a network"):
        Network.of(profile(1), "ring", 1e-6, None)
    with pytest.raises(ValueError, match="knows no bandwidth"):
        Network.of(profile(8, link=None), "ring", None, 5e10)


def test_one_rank_has_nothing_to_wait_for_and_more_ranks_wait_longer() -> None:
    measured = profile()
    network = Network.of(measured, "ring", None, None)
    one, *others = [predict(measured, network, ranks) for ranks in (1, 2, 64, 4096)]
    compute = compute_end(measured.model_gradients())
    assert (one.step, one.exposed, one.speed) == (Interval(compute, compute), Interval(0.0, 0.0), Interval(1.0, 1.0))
    for exposed in ([p.exposed.low for p in others], [p.exposed.high for p in others]):
        assert exposed == sorted(exposed)
    assert others[0].exposed.high > 0
    assert all(p.step.low <= p.step_at_default.low for p in others)


def test_a_step_takes_what_it_computes_and_the_last_bucket() -> None:
    measured = profile(link=Link(0.0, 1e9))  # a gradient travels for 4 ms, and the next one comes after 10
    step = predict(measured, Network.of(measured, "ring", None, None), 2).step
    expected = 0.1 + 0.19 + 4 * MIB / 1e9
    assert (step.low, step.high) == pytest.approx((expected / 1.05, expected / 0.97))


NEVER_HIDDEN = Link(0.0, 1e6)  # all of it travels for 84 s, beside which the first gradient's 0.1 s is nothing


@pytest.mark.parametrize(
    ("measured", "ranks", "share"),
    [(2, 2, 1.0), (2, 8, 0.6), (8, 32, 0.6), (8, 8, 1.0), (2, 32, 0.36), (8, 2, 1 / 0.6)],
)
def test_the_share_of_the_wire_may_fall_where_ranks_grow_fourfold(measured: int, ranks: int, share: float) -> None:
    of_some = profile(measured, NEVER_HIDDEN)
    network = Network.of(of_some, "ring", None, None)
    step = predict(of_some, network, ranks).step
    travels = 20 * 4 * MIB / network.link(ranks).bandwidth
    assert step.low == pytest.approx(travels / max(share, 1) / 1.05, rel=5e-3)
    assert step.high == pytest.approx(travels / min(share, 1) / 0.97, rel=5e-3)


def test_a_link_that_is_given_is_one_that_two_ranks_would_find_whole() -> None:
    of_some = profile(8, NEVER_HIDDEN)
    step = predict(of_some, Network.of(of_some, "ring", 0.0, 1e6), 8).step
    travels = 20 * 4 * MIB / (1e6 / 1.75)
    assert (step.low, step.high) == pytest.approx((travels / 1.05, travels / 0.6 / 0.97), rel=5e-3)


@pytest.mark.parametrize(
    ("device", "dtypes", "default"),
    [
        ("cuda:0", ["float32"] * 20, [[0], [*range(1, 8)], [*range(8, 15)], [*range(15, 20)]]),
        ("cpu", ["float32"] * 20, [[*range(7)], [*range(7, 14)], [*range(14, 20)]]),
        ("cuda:0", ["float32", "bfloat16"] * 3, [[0], [1], [2, 4], [3, 5]]),  # each dtype has a small first one
    ],
)
def test_default_buckets_are_counted_in_bytes_of_parameters(device: str, dtypes: list[str], default: Buckets) -> None:
    pairs = zip(profile().gradients, dtypes, strict=False)
    halved = [replace(gradient, bytes=2 * MIB, device=device, dtype=dtype) for gradient, dtype in pairs]
    measured = replace(profile(), gradients=tuple(halved), link=Link(0.005, 1e9))
    prediction = predict(measured, Network.of(measured, "ring", None, None), 2)
    expected = end_of(default, measured.model_gradients(), prediction.link)
    assert prediction.step_at_default.high == pytest.approx(expected / 0.97, rel=1e-12)


def test_a_step_that_takes_no_time_is_as_fast_as_that_of_one_rank(tmp_path: Path) -> None:
    at_once = tuple(replace(gradient, ready=0.0) for gradient in profile().gradients)
    replace(profile(), gradients=at_once).save(tmp_path / "at_once.json")
    result = run(tmp_path / "at_once.json", "--ranks", "1")
    assert result.exit_code == 0, result.output
    assert "100%" in result.output


def test_the_table_has_a_row_for_each_number_of_ranks_and_is_labelled_a_prediction(saved: Path) -> None:
    result = run(saved, "--ranks", "8,64", "--link", "400gbit", "--latency", "5us")
    assert result.exit_code == 0, result.output
    assert "Prediction, not a measurement" in result.output
    text = " ".join(result.output.split())
    assert "400 Gbit/s in each direction (given)" in text
    assert "A message takes 5 µs (given)" in text
    assert "(ring) takes 2 (n - 1) messages" in text
    assert "-35 % off, because gloo's ring reached 60 % of the wire there" in text
    rows = [re.findall(r"[\d.]+", line) for line in result.output.splitlines() if re.match(r"\W*(8|64) ", line)]
    for ranks, row in zip((8, 64), rows, strict=True):
        p = predict(profile(), Network(5e-6, 5e10, "ring"), ranks)
        times = [1e3 * end for end in (p.step.low, p.step.high, p.exposed.low, p.exposed.high)]
        latency = 1e3 * len(p.plan) * 2 * (ranks - 1) * 5e-6
        expected = [ranks, *times, 100 * p.speed.low, 100 * p.speed.high, latency]
        assert [float(number) for number in row[:8]] == pytest.approx(expected, rel=0.01)


def test_a_link_beside_what_gloo_took_for_a_message_is_warned_of(tmp_path: Path) -> None:
    replace(profile(), backend="gloo").save(tmp_path / "gloo.json")
    said = {
        options: "Give its --latency too" in words(run(tmp_path / "gloo.json", *options))
        for options in [(), ("--link", "400gbit"), ("--link", "400gbit", "--latency", "5us")]
    }
    assert list(said.values()) == [False, True, False]


def test_without_options_the_network_is_the_measured_one(saved: Path) -> None:
    text = " ".join(run(saved, "--algorithm", "tree").output.split())
    assert "8 Gbit/s in each direction (measured over nccl on 2 ranks)" in text
    assert "A message takes 10 µs (measured over nccl on 2 ranks)" in text
    assert "(tree) takes 2 log2(n) messages" in text
    assert "1,024" in text


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--ranks", "8,many"], "not a list of numbers of ranks"),
        (["--ranks", "8,,64"], "not a list of numbers of ranks"),
        (["--ranks", "0"], "not a list of numbers of ranks"),
        (["--ranks", 5000 * "9"], "such as 8,64,256, each from 1 to 999999999"),
        (["--link", "fast"], "not a rate in bits such as"),
        (["--link", "400GBps"], "'400GBps' is not a rate in bits such as 100mbit, 10gbit or 400Gbps"),
        (["--link", 400 * "9" + "gbit"], "not a rate in bits such as"),
        (["--link", "0." + 30 * "0" + "1kbit"], "not a rate in bits such as"),
        (["--latency", "5"], "not a time such as"),
        (["--latency", 400 * "9" + "s"], "not a time such as"),
        (["--algorithm", "star"], "star"),
    ],
)
def test_arguments_that_make_no_sense_are_named(saved: Path, arguments: list[str], complaint: str) -> None:
    result = run(saved, *arguments)
    assert result.exit_code == 2
    assert complaint in words(result)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("nothing", "nothing cannot be read: No such file or directory. To write a profile, train with bucket_cap_mb="),
        ("folder", "folder cannot be read: Is a directory. To write a profile, train with bucket_cap_mb="),
        ("x", "x holds no profile"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_and_how_one_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("x").write_text("{}")
    result = run(name)
    assert result.exit_code == 2
    assert complaint in words(result)


def test_the_version_is_fastddps_and_that_of_the_torch_it_was_built_for() -> None:
    printed = CliRunner().invoke(app, ["--version"]).output
    assert printed == f"fastddp {fastddp.__version__}, fastddp._C built for torch {_build_info.torch_version}\n"


def test_of_one_rank_network_and_latency_have_to_be_given(tmp_path: Path) -> None:
    profile(1).save(tmp_path / "one.json")
    assert run(tmp_path / "one.json", "--link", "10gbit").exit_code == 2
    assert run(tmp_path / "one.json", "--link", "10gbit", "--latency", "5us").exit_code == 0


@pytest.mark.parametrize("rate", ["400gbit", "400 gbit", "400Gbit/s", "400Gbps", "400 Gb/s", "400gbps", "0.4tbit"])
def test_times_and_rates_are_understood_as_people_write_them(rate: str) -> None:
    assert scaling.bytes_per_second(rate) == 5e10
    assert (scaling.seconds("0.5ms"), scaling.seconds("5 us")) == pytest.approx((5e-4, 5e-6))
