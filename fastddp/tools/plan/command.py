"""``fastddp plan``: predicts the step of a saved profile on other numbers of ranks."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from fastddp.planning.profile import HOW_TO_WRITE, Profile
from fastddp.tools.plan.scaling import Network, Prediction, bytes_per_second, numbers_of_ranks, predict, seconds
from fastddp.tools.plan.uncertainty import HOW_WRONG, Interval


class Algorithm(StrEnum):
    """How an allreduce is made of messages."""

    ring = "ring"
    tree = "tree"


def plan(
    profile: Annotated[Path, typer.Argument(help="what model.save_profile(path) has written")],
    ranks: Annotated[str, typer.Option(help="numbers of ranks: 8,64,256")] = "8,64,256,1024",
    link: Annotated[
        str | None, typer.Option(help=r"bits a second of each rank's link: 400gbit, 400Gbps \[default: as measured]")
    ] = None,
    latency: Annotated[str | None, typer.Option(help=r"of one message: 5us \[default: as measured]")] = None,
    algorithm: Annotated[Algorithm, typer.Option(help="of the allreduce: how its latency grows with ranks")] = (
        Algorithm.ring
    ),
) -> None:
    """Predict the step of a measured model on other numbers of ranks, with the best bucket plan for each.

    Times are intervals, as wide as predictions were wrong. Those for 4 ranks from 2 were -3 to +5 % off, and one for 8
    ranks at 200 Mbit/s was -35 % off, because gloo's ring reached 60 % of the wire there. Beyond 8 ranks nothing was
    measured.

    A profile is written by a run with DistributedDataParallel(model, bucket_cap_mb="auto"): model.save_profile(path).
    """
    measured = _given(_load, profile, "PROFILE")
    numbers = _given(numbers_of_ranks, ranks, "--ranks")
    bandwidth = None if link is None else _given(bytes_per_second, link, "--link")
    message = None if latency is None else _given(seconds, latency, "--latency")
    try:
        network = Network.of(measured, algorithm.value, message, bandwidth)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    out = Console()
    out.print(_table(measured, [predict(measured, network, number) for number in numbers]))
    if link is not None and latency is None and measured.backend == "gloo":
        out.print(_of_another_network(network), style="yellow", highlight=False)
    out.print(_assumptions(measured, network, link is not None, latency is not None), highlight=False)


def _of_another_network(network: Network) -> str:
    return (
        "Warning: --link is another network than the measured one, but a message still takes "
        f"{1e6 * network.latency:.4g} µs here, as it did over gloo. Give its --latency too, such as 5us."
    )


_Given = TypeVar("_Given")


def _given(read: Callable[[Any], _Given], what: object, option: str) -> _Given:
    """The result of ``read``; a message and exit status 2 if it fails."""
    try:
        return read(what)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def _load(path: Path) -> Profile:
    try:
        return Profile.load(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}. To write a profile, {HOW_TO_WRITE}") from None


def _table(profile: Profile, predictions: list[Prediction]) -> Table:
    size = sum(gradient.bytes for gradient in profile.gradients)
    table = Table(
        title=f"Prediction, not a measurement: forward and backward of {len(profile.gradients)} gradients, "
        f"{size / 2**20:.1f} MiB on the wire"
    )
    for heading in (
        "ranks",
        "step ms",
        "exposed ms",
        "of one rank's speed",
        "latency ms",
        "buckets",
        "largest MiB",
        "25 MiB: ms",
    ):
        table.add_column(heading, justify="right")
    for prediction in predictions:
        largest = max(sum(profile.gradients[index].bytes for index in bucket) for bucket in prediction.plan)
        table.add_row(
            f"{prediction.ranks:,}",
            _in_ms(prediction.step),
            _in_ms(prediction.exposed),
            _in_percent(prediction.speed),
            _three_digits(1e3 * prediction.latency),
            str(len(prediction.plan)),
            f"{largest / 2**20:.2f}",
            _in_ms(prediction.step_at_default),
        )
    return table


def _in_ms(interval: Interval) -> str:
    return _between(_three_digits(1e3 * interval.low), _three_digits(1e3 * interval.high))


def _three_digits(number: float) -> str:
    return f"{number:.{0 if number >= 100 else 1 if number >= 10 else 2}f}"


def _in_percent(interval: Interval) -> str:
    return _between(f"{100 * interval.low:.0f}", f"{100 * interval.high:.0f}") + "%"


def _between(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def _assumptions(profile: Profile, network: Network, link_given: bool, latency_given: bool) -> str:
    source = f"measured over {profile.backend} on {profile.ranks} ranks"
    messages = "2 (n - 1)" if network.algorithm == "ring" else "2 log2(n)"
    return (
        f"Assumed: each rank has a link of {8 * network.bandwidth / 1e9:.4g} Gbit/s in each direction "
        f"({'given' if link_given else source}), and nobody else uses it. A message takes "
        f"{1e6 * network.latency:.4g} µs ({'given' if latency_given else source}). An allreduce of b bytes over n "
        f"ranks ({network.algorithm}) takes {messages} messages and 2 (n - 1) / n · b bytes of link; allreduces run "
        f"one after the other. Each rank computes as long as those that were measured ({source}). 25 MiB: default "
        "buckets, counted in bytes of parameters; the first on a GPU is of 1 MiB. Not in it: stragglers, faster links "
        f"inside a machine, the optimizer, data loading. {HOW_WRONG}"
    )
