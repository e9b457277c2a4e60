"""Times buckets that were planned against buckets of fixed sizes, over a network: `python -m bench.planning`.

The contestants are fastddp with `bucket_cap_mb="auto"` and with each of `contestants.FIXED_CAPS`, in MiB, and torch's
DDP, to whose gradients theirs are held. Everything else is that of `bench.network`, arguments and rows included. At its
end it says for each rate and case how long a step under the plan takes, compared with the best fixed size and with
25 MiB: ratios of medians.

    python -m bench.planning --rate 1gbit 10gbit --json bench/results/planning.json
"""

from __future__ import annotations

from collections.abc import Sequence

from bench import harness, network
from bench.contestants import FIXED_CAPS

MODULE = "bench.planning"
PLANNED = "fastddp-auto"
WARM_UP = 11  # rounds; the last plan is made in the eighth


def main() -> None:
    options = network.parse_arguments(
        __doc__ or "",
        module=MODULE,
        rate=["1gbit", "10gbit"],
        contestant=[PLANNED, *(f"fastddp-{cap}" for cap in FIXED_CAPS)],
        # The first is little but communication, and buckets hardly matter; the second computes about as long.
        case=["resnet50", "gpt"],
        hook=["none"],
        warmup=WARM_UP,
    )
    rows = network.run(options)
    for case in dict.fromkeys((row["rate"], row["case"]) for row in rows):
        measured = [row for row in rows if (row["rate"], row["case"]) == case]
        print(verdict(measured))
        print("Its buckets, in MiB:", *(row["buckets_mib"] for row in measured if row["contestant"] == PLANNED))


def verdict(rows: Sequence[harness.Row]) -> str:
    """One rate and case, in a sentence.

    >>> times = {"torch": 9.0, "fastddp-auto": 2.0, "fastddp-1": 4.0, "fastddp-25": 2.5}
    >>> verdict([{"rate": "1gbit", "case": "x", "contestant": name, "median_ms": t} for name, t in times.items()])
    'x at 1gbit: the plan takes 0.800 of the time of the best fixed size (fastddp-25) and 0.800 of that of 25 MiB.'
    """
    medians = {row["contestant"]: row["median_ms"] for row in rows}
    fixed = {name: time for name, time in medians.items() if name.startswith("fastddp-") and name != PLANNED}
    best = min(fixed, key=lambda name: fixed[name])
    planned = medians[PLANNED]
    return (
        f"{rows[0]['case']} at {rows[0]['rate']}: the plan takes {planned / fixed[best]:.3f} of the time of the best "
        f"fixed size ({best}) and {planned / fixed['fastddp-25']:.3f} of that of 25 MiB."
    )


if __name__ == "__main__":
    main()
