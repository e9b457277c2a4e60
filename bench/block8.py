"""Block8's four kernels, against the same made of torch's operators and a plain copy of as many bytes.

A bucket holds gradients of ResNet-50's shapes. `add` adds up SHARDS wires, as one of so many ranks does. On the CPU:
`python -m bench.block8 --help`; calls, rounds and caches are as in `bench.kernels`.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import harness
from bench.kernels import EVICTION_BYTES, compare, gradient_shapes, time_calls
from fastddp import _C

MODULE = "bench.block8"
OPERATIONS = ("encode", "add", "decode")
NUMBERS = ("int8", "e4m3")
DTYPES = (torch.float32, torch.bfloat16)
BLOCK = 128
SHARDS = 8
SCALE = 1 / SHARDS
FASTDDP, OPERATORS, CEILING = "fastddp", "operators", "copy_"


@dataclass(frozen=True)
class Coded:
    """A bucket, its errors, and the wires of SHARDS ranks."""

    number: str
    gradients: list[tuple[Tensor, int]]
    error: Tensor
    kept: Tensor
    wire: Tensor
    target: Tensor
    shards: list[Tensor]

    @classmethod
    def make(cls, mebibytes: float, number: str, dtype: torch.dtype, device: torch.device) -> Coded:
        """The same numbers each time."""
        generator = torch.Generator().manual_seed(0)
        gradients, block = [], 0
        for shape in gradient_shapes(int(mebibytes * 2**20) // dtype.itemsize):
            size = math.prod(shape)
            gradients.append((torch.randn(size, generator=generator).to(device, dtype), block))
            block += -(-size // BLOCK)
        groups = -(-block // 4)
        wire = torch.zeros(groups * 4 * (BLOCK + 4), dtype=torch.uint8, device=device)
        error = (1e-3 * torch.randn(groups * 4 * BLOCK, generator=generator)).to(device)
        # Scales first: any bytes are numbers of int8 and, with the highest bits of exponents cleared, of floats.
        shards = []
        for _ in range(SHARDS):
            shard = torch.randint(256, wire.shape, generator=generator, dtype=torch.uint8) & 0xBF
            shard.view(groups, -1)[:, :16].view(torch.float32).copy_(torch.rand(groups, 4, generator=generator))
            shards.append(shard.to(device))
        return cls(number, gradients, error, torch.zeros_like(error), wire, torch.zeros_like(wire), shards)

    @property
    def elements(self) -> int:
        """Of all gradients."""
        return sum(gradient.numel() for gradient, _ in self.gradients)

    def payload_bytes(self, operation: str) -> int:
        """What an operation reads and writes at the least."""
        gradients = self.elements * self.gradients[0][0].element_size()
        errors = 2 * 4 * self.error.numel()
        wire = self.wire.numel()
        return {
            "encode": gradients + errors + 4 * self.error.numel() + wire,
            "add": SHARDS * wire + errors + wire,
            "decode": wire + gradients,
        }[operation]


def call(kernels: _C.Block8Kernels, operation: str, coded: Coded) -> None:
    """What is timed, and compared."""
    if operation == "encode":
        kernels.encode(coded.gradients, coded.error, coded.wire, SCALE, kept=coded.kept)
    elif operation == "add":
        kernels.add(coded.shards, coded.target, coded.error)
    else:
        kernels.decode(coded.gradients, coded.shards[0])


def contestants(number: str, device: torch.device) -> dict[str, _C.Block8Kernels]:
    """Who is measured beside the plain copy."""
    operators = _C.Block8Kernels.of_operators(number, BLOCK)
    return {FASTDDP: _C.Block8Kernels(number, BLOCK, device), OPERATORS: operators}


def calls(operation: str, coded: Coded) -> dict[str, Callable[[], object]]:
    """What is timed, by contestant; the plain copy first. All work on the same bucket."""
    half = coded.payload_bytes(operation) // 2 // 4
    device = coded.wire.device
    source, destination = (torch.rand(half, device=device) for _ in range(2))
    found = contestants(coded.number, device)
    return {CEILING: partial(destination.copy_, source)} | {
        name: partial(call, kernels, operation, coded) for name, kernels in found.items()
    }


def wrong_contestants(operation: str, number: str, dtype: torch.dtype, device: torch.device) -> set[str]:
    """Whose result is not, to the last bit, that of plain torch on the CPU."""
    from fastddp.kernels import block8_reference as reference

    expected = Coded.make(0.1, number, dtype, torch.device("cpu"))
    form = reference.Format(number, BLOCK)
    if operation == "encode":
        reference.encode(form, expected.gradients, expected.error, expected.wire, SCALE, kept=expected.kept)
    elif operation == "add":
        reference.add(form, expected.shards, expected.target, expected.error)
    else:
        reference.decode(form, expected.gradients, expected.shards[0])
    wrong = set()
    for name, kernels in contestants(number, device).items():
        coded = Coded.make(0.1, number, dtype, device)
        call(kernels, operation, coded)
        if not all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(_of(coded), _of(expected), strict=True)):
            wrong.add(name)
    return wrong


def _of(coded: Coded) -> list[Tensor]:
    return [coded.wire, coded.target, coded.error, *(gradient for gradient, _ in coded.gradients)]


def main() -> None:
    """On the CPU: a row for each operation, number, dtype, size and contestant."""
    parser = harness.parser(MODULE, __doc__)
    parser.add_argument("--mib", nargs="+", type=float, default=[25.0], help="MiB of gradients a bucket")
    parser.add_argument("--rounds", type=int, default=15, help="calls of each contestant that count (default: 15)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1, as a rank of bench.step)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a row for each measurement")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    facts = harness.environment(MODULE, torch.device("cpu"), options.threads) | {"rounds": options.rounds}
    eviction = torch.ones(EVICTION_BYTES // torch.float32.itemsize)
    rows: list[harness.Row] = []
    jobs = list(itertools.product(options.mib, NUMBERS, DTYPES, OPERATIONS))
    with harness.progress("kernels", len(jobs), show=True) as advance:
        for mebibytes, number, dtype, operation in jobs:
            rows += [facts | row for row in measure(operation, number, dtype, mebibytes, options.rounds, eviction)]
            advance()
    out = harness.console()
    out.print(harness.describe(rows[0]), highlight=False)
    out.print(table(rows, f"8 bits: µs a call, median of {options.rounds} calls, cold caches"))
    if options.json:
        harness.write_json(options.json, rows)
    wrong = [f"{row['operation']} of {row['contestant']}" for row in rows if row["result"] == "WRONG"]
    if wrong:
        sys.exit(f"wrong results: {', '.join(dict.fromkeys(wrong))}")


def measure(
    operation: str, number: str, dtype: torch.dtype, mebibytes: float, rounds: int, eviction: Tensor
) -> list[harness.Row]:
    """One operation of all contestants, on the CPU."""
    cpu = torch.device("cpu")
    coded = Coded.make(mebibytes, number, dtype, cpu)
    wrong = wrong_contestants(operation, number, dtype, cpu)
    samples = time_calls(calls(operation, coded), rounds, eviction)
    payload = coded.payload_bytes(operation)
    facts = {
        "operation": operation,
        "number": number,
        "block": BLOCK,
        "gradient_dtype": str(dtype).removeprefix("torch."),
        "gradient_mib": mebibytes,
        "gradients": len(coded.gradients),
        "payload_bytes": payload,
    }
    return [
        facts | columns | {"result": "WRONG" if columns["contestant"] in wrong else "right"}
        for columns in compare(payload, samples)
    ]


def table(rows: Sequence[harness.Row], title: str) -> Any:
    """A line for each operation, number, dtype and size: µs of each contestant, and how near fastddp is to ceilings."""
    ceilings = {"of copy_": "fraction_of_copy", "of ceiling": "fraction_of_ceiling"}
    ceilings = {heading: column for heading, column in ceilings.items() if column in rows[0]}
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        key = (row["operation"], row["number"], row["gradient_dtype"], f"{row['gradient_mib']:g}")
        line = lines.setdefault(key, {})
        line[row["contestant"]] = f"{row['median_us']:.1f}" + (" WRONG" if row["result"] == "WRONG" else "")
        if row["contestant"] == FASTDDP:
            line |= {heading: f"{100 * row[column]:.0f} %" for heading, column in ceilings.items()}
    columns = [*dict.fromkeys(row["contestant"] for row in rows), *ceilings]
    cells = [[*key, *(line.get(column, "-") for column in columns)] for key, line in lines.items()]
    return harness.table(title, ["operation", "number", "gradient", "MiB", *columns], cells, left=3)


if __name__ == "__main__":
    main()
