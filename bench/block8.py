"""Block8's four kernels, against the same made of torch's operators and a plain copy of as many bytes.

A bucket holds gradients of ResNet-50's shapes. `add` adds up SHARDS wires, as one of so many ranks does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from bench.jobs import FASTDDP, OPERATORS, Calls, Family, Job, name_of, plain_copy
from bench.pack import gradient_shapes
from fastddp import _C

OPERATIONS = ("encode", "add", "decode")
Number = Literal["int8", "e4m3"]
NUMBERS: tuple[Number, ...] = ("int8", "e4m3")
DTYPES = (torch.float32, torch.bfloat16)
BLOCK = 128
SHARDS = 8
SCALE = 1 / SHARDS


@dataclass(frozen=True)
class Coded:
    """A bucket, its errors, and the wires of SHARDS ranks."""

    number: Number
    gradients: list[tuple[Tensor, int]]
    before: Tensor
    error: Tensor
    wire: Tensor
    target: Tensor
    shards: list[Tensor]

    @classmethod
    def make(cls, mebibytes: float, number: Number, dtype: torch.dtype, device: torch.device) -> Coded:
        """The same numbers each time."""
        generator = torch.Generator().manual_seed(0)
        gradients, block = [], 0
        for shape in gradient_shapes(int(mebibytes * 2**20) // dtype.itemsize):
            size = math.prod(shape)
            gradients.append((torch.randn(size, generator=generator).to(device, dtype), block))
            block += -(-size // BLOCK)
        groups = -(-block // 4)
        wire = torch.zeros(groups * 4 * (BLOCK + 4), dtype=torch.uint8, device=device)
        before = (1e-3 * torch.randn(groups * 4 * BLOCK, generator=generator)).to(device)
        # Scales first: any bytes are numbers of int8 and, with the highest bits of exponents cleared, of floats.
        shards = []
        for _ in range(SHARDS):
            shard = torch.randint(256, wire.shape, generator=generator, dtype=torch.uint8) & 0xBF
            shard.view(groups, -1)[:, :16].view(torch.float32).copy_(torch.rand(groups, 4, generator=generator))
            shards.append(shard.to(device))
        return cls(number, gradients, before, torch.zeros_like(before), wire, torch.zeros_like(wire), shards)

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
            "encode": gradients + errors + wire,
            "add": SHARDS * wire + errors + wire,
            "decode": wire + gradients,
        }[operation]


def call(kernels: _C.Block8Kernels, operation: str, coded: Coded) -> None:
    """What is timed, and compared."""
    if operation == "encode":
        kernels.encode(coded.gradients, coded.error, coded.wire, SCALE, before=coded.before)
    elif operation == "add":
        kernels.add(coded.shards, coded.target, coded.error)
    else:
        kernels.decode(coded.gradients, coded.shards[0])


def contestants(number: Number, device: torch.device) -> dict[str, _C.Block8Kernels]:
    """Who is measured beside the plain copy; on the simulated device without operators, which take minutes there."""
    found = {FASTDDP: _C.Block8Kernels(number, BLOCK, device)}
    return found if device.type == "simulated" else found | {OPERATORS: _C.Block8Kernels.of_operators(number, BLOCK)}


def wrong_contestants(operation: str, number: Number, dtype: torch.dtype, device: torch.device) -> set[str]:
    """Whose result is not, to the last bit, that of plain torch on the CPU."""
    from fastddp.kernels import block8_reference as reference

    expected = Coded.make(0.1, number, dtype, torch.device("cpu"))
    form = reference.Format(number, BLOCK)
    if operation == "encode":
        reference.encode(form, expected.gradients, expected.error, expected.wire, SCALE, before=expected.before)
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


def _make(operation: str, number: Number, dtype: torch.dtype, mebibytes: float, device: torch.device) -> list[Job]:
    if device.type != "cpu":
        from fastddp.kernel_loading.launching import load_block8_kernels

        load_block8_kernels({(device, dtype)}, number, BLOCK, False)
    coded = Coded.make(mebibytes, number, dtype, device)
    payload = coded.payload_bytes(operation)
    calls: Calls = plain_copy(payload, device)
    calls |= {name: partial(call, own, operation, coded) for name, own in contestants(number, device).items()}
    facts = {"operation": operation, "number": number, "block": BLOCK, "gradient_dtype": name_of(dtype)}
    facts |= {"gradient_mib": round(coded.elements * dtype.itemsize / 2**20, 1), "gradients": len(coded.gradients)}
    return [Job(facts, payload, calls, wrong_contestants(operation, number, dtype, device))]


def _jobs(device: torch.device, quick: bool) -> Iterator[tuple[str, Callable[[], list[Job]]]]:
    for number, dtype, operation in itertools.product(NUMBERS, DTYPES, OPERATIONS):
        if operation == "add" and dtype != torch.float32:
            continue  # it has no gradients
        mebibytes = 0.1 if quick else 25.0
        yield f"{operation} of {number} and {dtype}", partial(_make, operation, number, dtype, mebibytes, device)


FAMILY = Family("block8", "8 bits", "block8 kernel", ("operation", "number", "gradient_dtype", "gradient_mib"), _jobs)
