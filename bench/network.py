"""Times a training step over a network of a given rate, on one machine: `python -m bench.network --rate 1gbit 100mbit`.

The contestants, rounds and checks are those of `bench.step`; here its two ranks, with gloo on the CPU, sit in two
network namespaces, and a cable of that rate is all there is between them (`bench.netns`). So the wire is a real one for
gloo and TCP, with the time that it takes, and the two ranks still share the machine's cores. With `--ranks-per-node`
each namespace holds several ranks, as a machine with several processes does: they reach each other without the cable.
It takes root; without, or where the kernel does not have what it takes, nothing is measured and the exit status is 0.

    python -m bench.network --rate 1gbit --json bench/results/network.json
    python -m bench.network --rate 200mbit --ranks-per-node 4 --case vit-tiny --hook none fp16 bf16
    python -m bench.network --rate 100mbit 1gbit --hook none powersgd1 --contestants torch fastddp-view --rounds 4
    python -m bench.network --ranks-per-node 2 --hook none fp16 powersgd4 --contestants torch fastddp fastddp-nodes

`fastddp-nodes` is fastddp with `hierarchy="node"`: the namespaces are the nodes.

Rows are those of `bench.step`, and `ranks_per_node`, `rate`, `rate_gbit_s`, `tcp_gbit_s` (what one plain TCP connection
got, in one direction, before the rounds: frames have headers, so 0.96 of the rate at best) and `congestion_control`
(TCP's). The file is written after each rate and case. `ratio_to_torch` is to torch's DDP without a hook,
`ratio_to_held_against` to it with torch's own hook of that name (for bf16, with fp16).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bench import harness, netns, step

MODULE = "bench.network"

# One step of ResNet-50's gradients without a hook takes 0.1 s at 10 Gbit/s, 0.9 s at 1 Gbit/s and 9 s at 100 Mbit/s.
_ROUNDS = ((5e9, 24), (5e8, 12), (0, 6))


@dataclass(frozen=True)
class _Seat:
    """Puts each rank at its end of the cable: the first ones at the left."""

    ends: netns.Pair
    ranks_per_node: int

    def __call__(self, rank: int) -> None:
        self.ends[rank // self.ranks_per_node].enter()
        os.environ["GLOO_SOCKET_IFNAME"] = netns.DEVICE


def main() -> None:
    run(parse_arguments())


def run(options: argparse.Namespace) -> list[harness.Row]:
    """All rates and cases, with tables on the way; no rows where there can be no cable."""
    reason = netns.unavailable()
    if reason is not None:
        print(f"{options.module} was skipped: {reason}.")
        return []
    out = harness.console()
    rows: list[harness.Row] = []
    for rate in options.rate:
        for case in options.case:
            measured = measure(rate, case, options)
            if not rows:
                out.print(harness.describe(measured[0]), highlight=False)
            network = f" at {rate} (a TCP connection got {measured[0]['tcp_gbit_s']} Gbit/s)"
            out.print(step.case_table(measured, network))
            rows += measured
            if options.json:
                harness.write_json(options.json, rows)
    step.exit_if_wrong(rows)
    return rows


def parse_arguments(about: str = __doc__ or "", **defaults: object) -> argparse.Namespace:
    """The command line, with what `bench.step` wants to know and cannot be chosen here; `defaults` in place of ours."""
    module = defaults.get("module", MODULE)
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about.split(":")[0] + ".")
    parser.add_argument(
        "--rate",
        nargs="+",
        default=["1gbit"],
        metavar="RATE",
        help="as for tc: 100mbit, 2.5gbit (default: %(default)s)",
    )
    parser.add_argument("--ranks-per-node", type=int, default=1, help="at either end (default: %(default)s)")
    step.add_arguments(parser, default_rounds="by the rate")
    parser.set_defaults(
        case=["resnet50"],
        contestant=[step.REFERENCE, "fastddp"],
        hook=["none", "fp16", "bf16", "powersgd1", "powersgd4"],
        warmup=3,
        module=MODULE,
        backend="gloo",
    )
    parser.set_defaults(**defaults)
    options = parser.parse_args()
    try:
        for rate in options.rate:
            netns.bits_per_second(rate)
    except ValueError as error:
        parser.error(f"--rate: {error}")
    if options.ranks_per_node < 1:
        parser.error("--ranks-per-node needs at least 1")
    step.check_arguments(parser, options)
    options.ranks = 2 * options.ranks_per_node
    return options


def rounds_at(rate: str) -> int:
    """How many rounds a rate gets if nobody says: the slower, the fewer, and the less they vary.

    >>> rounds_at("10gbit"), rounds_at("1gbit"), rounds_at("100mbit")
    (24, 12, 6)
    """
    return next(rounds for bits, rounds in _ROUNDS if netns.bits_per_second(rate) >= bits)


def measure(rate: str, case: str, options: argparse.Namespace) -> list[harness.Row]:
    """One case over a cable of its own."""
    options = argparse.Namespace(**{**vars(options), "rounds": options.rounds or rounds_at(rate)})
    with cable(rate, options.ranks_per_node) as (enter, facts):
        return [row | facts for row in step.spawn_ranks(case, options, enter)]


LOOPBACK = "loopback"  # in place of a rate: no cable, which takes no root


@contextmanager
def cable(rate: str, ranks_per_node: int) -> Iterator[tuple[Callable[[int], None] | None, harness.Row]]:
    """For as long as the block lasts: how a rank gets to its end of the cable, and what rows say of the network."""
    facts: harness.Row = {"ranks_per_node": ranks_per_node, "rate": rate}
    if rate == LOOPBACK:
        yield None, facts | dict.fromkeys(("rate_gbit_s", "tcp_gbit_s", "congestion_control"))
        return
    bits = netns.bits_per_second(rate)
    with netns.pair(rate) as ends:
        size = int(bits / 8 * 0.5)  # half a second
        transfer = netns.send(*ends, size)
        facts |= {
            "rate_gbit_s": bits / 1e9,
            "tcp_gbit_s": round(8 * size / transfer.seconds / 1e9, 3),
            "congestion_control": transfer.congestion_control,
        }
        yield _Seat(ends, ranks_per_node), facts


if __name__ == "__main__":
    main()
