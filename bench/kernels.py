"""Bandwidth of the kernels on the CPU, against torch's ways and a plain copy: `python -m bench.kernels --help`.

What is timed is in `bench.pack`, `bench.low_rank`, `bench.block8` and `bench.sum_shards`; how, in `bench.jobs`. Caches
are cold, as for a bucket that was filled one gradient at a time. Calls are made from Python, so each contestant's time
includes the conversion of its lists of tensors; inside a training step neither torch nor fastddp pays that.
"""

from __future__ import annotations

import torch

from bench import block8, harness, jobs, low_rank, pack, sum_shards

MODULE = "bench.kernels"
FAMILIES = (pack.FAMILY, low_rank.FAMILY, block8.FAMILY, sum_shards.FAMILY)

# More than the last-level cache of most machines; read, not written, so that nothing is left to be written back.
_EVICTION_BYTES = 256 * 2**20


def main() -> None:
    parser = harness.parser(MODULE, __doc__)
    harness.add_selection(parser, FAMILIES, "--kernel", "--kernels")
    parser.add_argument("--quick", action="store_true", help="try everything out with little work")
    harness.add_common(parser, "job and contestant", rounds=40, threads=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cpu = torch.device("cpu")
    facts = harness.environment(MODULE, cpu, options.threads) | {"rounds": options.rounds}
    eviction = torch.ones(_EVICTION_BYTES // torch.float32.itemsize)
    rows: list[harness.Row] = []
    for family in FAMILIES:
        if family.name not in options.kernel:
            continue
        todo = list(family.jobs(cpu, options.quick))
        with harness.progress(family.name, len(todo), show=True) as advance:
            for _, make in todo:
                for job in make():
                    seconds = jobs.time_calls(job.calls, options.rounds, eviction)
                    rows += [facts | {"kernel": family.name} | job.row(name, seconds) for name in seconds]
                advance()
    tables = [
        jobs.table([row for row in rows if row["kernel"] == family.name], family, "on the CPU")
        for family in FAMILIES
        if family.name in options.kernel
    ]
    harness.report(rows, tables, options.json)
    harness.exit_if_wrong(rows, "{operation} of {contestant}", "wrong results")


if __name__ == "__main__":
    main()
