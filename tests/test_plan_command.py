"""``fastddp plan``: what a profile says of other numbers of ranks and other networks."""

from __future__ import annotations

import doctest
import math
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fastddp.commands import app
from fastddp.planning import scaling
from fastddp.planning.model import Link, compute_end
from fastddp.planning.profile import Profile, ProfiledGradient
from fastddp.planning.scaling import Network, predict

MIB = 2**20


def profile(ranks: int = 2, link: Link = Link(2e-5, 1e9)) -> Profile:  # noqa: B008 - it is frozen
    """Twenty gradients of 4 MiB, 10 ms apart, from 0.1 s on."""
    gradients = [ProfiledGradient(f"p{i}", 0.1 + i / 100, 4 * MIB, "float32", "cuda:0") for i in range(20)]
    return Profile(tuple(gradients), ranks, "nccl", 1, link)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    profile().save(tmp_path / "profile.json")
    return tmp_path / "profile.json"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "120", "TERM": "dumb"})


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
    with pytest.raises(ValueError, match="of one rank"):
        Network.of(profile(1), "ring", 1e-6, None)


def test_one_rank_has_nothing_to_wait_for_and_more_ranks_wait_longer() -> None:
    measured = profile()
    network = Network.of(measured, "ring", None, None)
    one, *others = [predict(measured, network, ranks) for ranks in (1, 2, 64, 4096)]
    assert (one.step, one.exposed) == (compute_end(measured.model_gradients()), 0.0)
    exposed = [prediction.exposed for prediction in others]
    assert exposed == sorted(exposed)
    assert exposed[0] > 0
    assert all(prediction.step <= prediction.step_at_default for prediction in others)


def test_a_step_takes_what_it_computes_and_the_last_bucket() -> None:
    measured = profile(link=Link(0.0, 1e9))  # a gradient travels for 4 ms, and the next one comes after 10
    prediction = predict(measured, Network.of(measured, "ring", None, None), 2)
    assert prediction.step == pytest.approx(0.1 + 0.19 + 4 * MIB / 1e9)


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
    assert [row[:3] for row in rows] == [
        [str(p.ranks), f"{1e3 * p.step:.2f}", f"{1e3 * p.exposed:.2f}"] for p in predictions
    ]


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
        (["--ranks", "0"], "not a list of numbers of ranks"),
        (["--link", "fast"], "not a rate such as"),
        (["--link", "0gbit"], "not a rate such as"),
        (["--latency", "5"], "not a time such as"),
        (["--algorithm", "star"], "star"),
    ],
)
def test_arguments_that_make_no_sense_are_named(saved: Path, arguments: list[str], complaint: str) -> None:
    result = run(saved, *arguments)
    assert result.exit_code == 2
    assert complaint in " ".join(re.sub("[│╭╮╰╯─]", "", result.output).split())


def test_a_file_that_is_no_profile_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("{}")
    for argument, complaint in ((path, "holds no profile"), (tmp_path / "nothing", "No such file")):
        result = run(argument)
        assert result.exit_code == 2
        assert complaint in " ".join(re.sub("[│╭╮╰╯─]", "", result.output).split())


def test_of_one_rank_network_and_latency_have_to_be_given(tmp_path: Path) -> None:
    profile(1).save(tmp_path / "one.json")
    assert run(tmp_path / "one.json", "--link", "10gbit").exit_code == 2
    assert run(tmp_path / "one.json", "--link", "10gbit", "--latency", "5us").exit_code == 0


def test_times_and_rates_have_units() -> None:
    assert math.isclose(scaling.seconds("0.5ms"), 5e-4)
    assert scaling.bytes_per_second("1.6tbit") == 2e11
