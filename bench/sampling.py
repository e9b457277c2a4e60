"""What step reports cost: `python -m bench.sampling`.

Steps are in turn sampled and asked for a report, or neither, as `bench.on_and_off` says. A step lasts to the end of
backward, or to the report.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

import fastddp
from bench import harness, on_and_off
from bench.cases import case_named

MODULE = "bench.sampling"
SAMPLED = "sampled"
KINDS = (on_and_off.OFF, on_and_off.OFF_AGAIN, SAMPLED)


def main() -> None:
    """Measure, print, and write if asked."""
    options = on_and_off.parser(MODULE, __doc__, 120).parse_args()
    on_and_off.run(options, measure, lambda rows: [on_and_off.table("Steps that are sampled, each of them", rows)])


def measure(options: argparse.Namespace, name: str) -> list[harness.Row]:
    """One case on all ranks; every rank returns the same rows."""
    case = case_named(name)
    module, batch_of = case.build(torch.device("cpu"))
    model = fastddp.DistributedDataParallel(module)

    def prepare(kind: str) -> on_and_off.Step:
        model.sample_steps(every=int(kind == SAMPLED))

        def step(batch: tuple[Any, ...]) -> None:
            model(*batch).backward()
            if kind == SAMPLED:
                model.step_report()

        return step

    return on_and_off.measured_rows(MODULE, case, KINDS, options.rounds, model, batch_of, prepare)


if __name__ == "__main__":
    main()
