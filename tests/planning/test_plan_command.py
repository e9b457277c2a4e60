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
    """What it printed, without frames and the ends of lines."""
    return " ".join(re.sub("[│╭╮╰╯─]", "", result.output).split())


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(scaling).failed == 0


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
@pytest.mark.parametrize("ranks", [2, 8, 1024])
def test_on_as_many_ranks_as_were_measured_collectives_cost_what_was_measured(
    ranks: int, algorithm: scaling.Algorithm
) -> None:
    link = Network.of(profile(ranks), algorithm, None, None).link(ranks)
    assert link.latency == pytest.approx(2e-5)
    assert link.bandwidth == pytest.approx(1e9)


def test_the_latency_of_a_ring_grows_with_its_ranks_and_that_of_a_tree_with_their_logarithm() -> None:
    ring = Network.of(profile(2), "ring", None, None)  # 2 messages of 10 µs
    assert [ring.link(n).latency for n in (8, 64)] == pytest.approx([14e-5, 126e-5])
    tree = Network.of(profile(2), "tree", None, None)
    assert [tree.link(n).latency for n in (8, 64)] == pytest.approx([6e-5, 12e-5])


def test_bandwidth_falls_to_half_of_the_link_and_no_further() -> None:
    network = Network.of(profile(2), "ring", None, None)  # of 2 ranks, each sends every byte once
    assert [network.link(n).bandwidth for n in (4, 10**6)] == pytest.approx([1e9 / 1.5, 1e9 / 2], rel=1e-5)


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
def test_the_share_of_the_wire_may_fall_to_six_tenths_where_ranks_grow_fourfold(
    measured: int, ranks: int, share: float
) -> None:
    of_some = profile(measured, NEVER_HIDDEN)
    network = Network.of(of_some, "ring", None, None)
    step = predict(of_some, network, ranks).step
    travels = 20 * 4 * MIB / network.link(ranks).bandwidth
    assert step.low == pytest.approx(travels / max(share, 1) / 1.05, rel=5e-3)
    assert step.high == pytest.approx(travels / min(share, 1) / 0.97, rel=5e-3)


@pytest.mark.parametrize(("ranks", "error"), [(4, -0.03), (4, 0.05), (8, -0.35)])
@pytest.mark.parametrize("hidden", [0.0, 0.1])
def test_steps_that_were_measured_lie_in_the_interval(ranks: int, error: float, hidden: float) -> None:
    """A prediction that was so far off: (predicted - measured) / measured."""
    whole = profile()
    later = [replace(g, ready=g.ready + hidden) for g in whole.gradients]
    of_two = replace(whole, gradients=tuple(later), link=NEVER_HIDDEN)
    prediction = predict(of_two, Network.of(of_two, "ring", None, None), ranks)
    predicted = end_of(prediction.plan, of_two.model_gradients(), prediction.link)
    assert prediction.step.low <= predicted / (1 + error) * (1 + 1e-9)
    assert prediction.step.high >= predicted / (1 + error) * (1 - 1e-9)


def test_a_link_that_is_given_is_one_that_two_ranks_would_find_whole() -> None:
    of_some = profile(8, NEVER_HIDDEN)
    step = predict(of_some, Network.of(of_some, "ring", 0.0, 1e6), 8).step
    travels = 20 * 4 * MIB / (1e6 / 1.75)
    assert (step.low, step.high) == pytest.approx((travels / 1.05, travels / 0.6 / 0.97), rel=5e-3)


@pytest.mark.parametrize(("device", "counts"), [("cuda:0", [1, 7, 7, 5]), ("cpu", [7, 7, 6])])
def test_default_buckets_are_counted_in_bytes_of_parameters_whatever_travels(device: str, counts: list[int]) -> None:
    whole, numbers = profile(), iter(range(20))
    halved = [replace(gradient, bytes=2 * MIB, device=device) for gradient in whole.gradients]
    measured = replace(whole, gradients=tuple(halved), link=Link(0.005, 1e9))
    default: Buckets = [[next(numbers) for _ in range(count)] for count in counts]
    prediction = predict(measured, Network.of(measured, "ring", None, None), 2)
    expected = end_of(default, measured.model_gradients(), prediction.link)
    assert prediction.step_at_default.high == pytest.approx(expected / 0.97, rel=1e-12)


def test_each_dtype_has_a_small_first_bucket() -> None:
    mixed = [replace(g, dtype=("float32", "bfloat16")[i % 2]) for i, g in enumerate(profile().gradients[:6])]
    measured = replace(profile(), gradients=tuple(mixed), link=Link(0.005, 1e9))
    prediction = predict(measured, Network.of(measured, "ring", None, None), 2)
    default = [[0], [1], [2, 4], [3, 5]]
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
    rows = [re.findall(r"[\d.,]+", line) for line in result.output.splitlines() if re.match(r"\W*(8|64) ", line)]
    predictions = [predict(profile(), Network(5e-6, 5e10, "ring"), ranks) for ranks in (8, 64)]
    assert [row[:7] for row in rows] == [
        [
            str(p.ranks),
            *(f"{1e3 * end:.0f}" for end in (p.step.low, p.step.high)),
            *(f"{1e3 * end:.{digits}f}" for end, digits in ((p.exposed.low, 2), (p.exposed.high, high_digits))),
            *(f"{100 * end:.0f}" for end in (p.speed.low, p.speed.high)),
        ]
        for p, high_digits in zip(predictions, (2, 1), strict=True)
    ]


def test_it_says_how_wrong_predictions_were(saved: Path) -> None:
    for text in (words(run(saved)), words(run("--help"))):
        assert "-3 to +5 % off" in text
        assert "-35 % off, because gloo's ring reached 60 % of the wire there" in text


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
        (["--ranks", 400 * "9"], "such as 8,64,256, each from 1 to 999999999"),
        (["--ranks", 5000 * "9"], "such as 8,64,256, each from 1 to 999999999"),
        (["--link", "fast"], "not a rate in bits such as"),
        (["--link", "0gbit"], "not a rate in bits such as"),
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


def test_a_file_that_is_no_profile_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("{}")
    result = run(path)
    assert result.exit_code == 2
    assert "holds no profile" in words(result)


def test_a_file_that_cannot_be_read_is_named_and_how_one_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    how = 'To write a profile, train with bucket_cap_mb="auto" and call model.save_profile(path).'
    for argument, complaint in (("nothing", "No such file or directory"), ("folder", "Is a directory")):
        result = run(argument)
        assert result.exit_code == 2
        assert f"{argument} cannot be read: {complaint}. {how}" in words(result)


def test_help_tells_what_is_taken_if_nothing_is_given() -> None:
    assert words(run("--help")).count("[default: as measured]") == 2


def test_the_version_is_fastddps_and_that_of_the_torch_it_was_built_for() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"fastddp {fastddp.__version__}, fastddp._C built for torch {_build_info.torch_version}\n"


def test_of_one_rank_network_and_latency_have_to_be_given(tmp_path: Path) -> None:
    profile(1).save(tmp_path / "one.json")
    assert run(tmp_path / "one.json", "--link", "10gbit").exit_code == 2
    assert run(tmp_path / "one.json", "--link", "10gbit", "--latency", "5us").exit_code == 0


@pytest.mark.parametrize("rate", ["400gbit", "400 gbit", "400Gbit/s", "400Gbps", "400 Gb/s", "400gbps", "0.4tbit"])
def test_times_and_rates_are_understood_as_people_write_them(rate: str) -> None:
    assert scaling.bytes_per_second(rate) == 5e10
    assert (scaling.seconds("0.5ms"), scaling.seconds("5 us")) == pytest.approx((5e-4, 5e-6))
