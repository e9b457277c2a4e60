"""Runs fastddp's kernels once on a device, compiled first if needed, and compares with plain torch on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastddp.tools.doctor.findings import Finding, wrong

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
PAIRS = (*itertools.product(_NARROW, _NARROW), (torch.float64, torch.float64))
"""Dtypes of gradients and wire."""

_SCALE = 1 / 3
_SHAPES = ((1,), (70_001,), (4096,), (100, 203), (0,), (3, 5, 7))
_RANK = 4
_MATRICES = ((64, 147), (130, 16), (9, 3000), (200, 260))
_NUMBERS = ("int8", "e4m3")  # the defaults of the hooks of 8 bits
_BLOCK = 256
_KEPT_SHARE = 1e-3  # of a gradient: how large the errors of 8 bits are at first
# Of the largest element: what roundings add up to in sums of this length.
_TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class KernelCheck:
    """One family of kernels on one device."""

    device: str
    kernels: str  # what they do
    made_of: str  # C++, Triton, or torch's operators
    wrong: tuple[str, ...] = ()  # what differed from plain torch
    given_up: tuple[str, ...] = ()  # kernels that torch's operators stand in for, and why
    error: str | None = None  # what was raised instead of a result


def check_kernels(device: torch.device) -> list[KernelCheck]:
    """Run everything on the device; errors become part of the result."""
    return [
        _guarded(device, "pack and unpack", _check_pack),
        _guarded(device, "PowerSGD", _check_low_rank),
        _guarded(device, "8 bits", _check_block8),
        _guarded(device, "sums of 16 bits", _check_sums),
    ]


def _guarded(device: torch.device, kernels: str, check: Callable[[torch.device], tuple[int, list[str]]]) -> KernelCheck:
    before = _given_up(device)
    try:
        launches, differing = check(device)
    except Exception as error:  # whatever it is (a compiler, a driver, a missing library), it is the finding
        text = str(error).strip().splitlines()
        return KernelCheck(str(device), kernels, "", error=f"{type(error).__name__}: {text[0] if text else ''}")
    made_of = "C++" if device.type == "cpu" else "Triton" if launches else "torch's operators"
    return KernelCheck(str(device), kernels, made_of, tuple(differing), _given_up_since(before, device))


def _given_up(device: torch.device) -> list[str]:
    from fastddp import _C

    return [f"{name} ({place}): {reason}" for where, name, place, reason in _C.kernels_given_up() if where == device]


def _given_up_since(before: Sequence[str], device: torch.device) -> tuple[str, ...]:
    return tuple(kernel for kernel in _given_up(device) if kernel not in before)


def _check_pack(device: torch.device) -> tuple[int, list[str]]:
    """Launches, and what was wrong. Elements are compared bitwise, because nothing is added up."""
    from fastddp import _C
    from fastddp.exchange.launching import load_kernels

    load_kernels((device, gradient, wire) for gradient, wire in PAIRS)
    launches, differing = 0, []
    for gradient, wire in PAIRS:
        kernels = _C.Kernels(device)
        generator = torch.Generator().manual_seed(0)
        given = [torch.randn(shape, generator=generator).to(gradient) for shape in _SHAPES]
        given[3] = given[3].t()
        flat = torch.full((sum(tensor.numel() for tensor in given) + 100,), 7.0, dtype=wire, device=device)
        *parts, last = flat.split([*(tensor.numel() for tensor in given), 100])
        views = [part.view(tensor.shape) for part, tensor in zip(parts, given, strict=True)]
        kernels.pack([*(tensor.to(device) for tensor in given), None], [*views, last], _SCALE)
        packed = [_scaled(tensor, _SCALE, wire) for tensor in given]
        if not _all_equal(views, packed) or bool(last.any()):
            differing.append(f"pack of {_name(gradient)} into {_name(wire)}")
        back = [torch.zeros_like(tensor, device=device) for tensor in given]
        kernels.unpack(back, views)
        if not _all_equal(back, [_scaled(tensor, 1.0, gradient) for tensor in packed]):
            differing.append(f"unpack of {_name(wire)} into {_name(gradient)}")
        launches += kernels.launches
    return launches, differing


def _scaled(tensor: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """cast(fp32(tensor) * scale); fp64 stays fp64."""
    compute = torch.promote_types(tensor.dtype, torch.float32)
    return (tensor.to(compute) * torch.tensor(scale, dtype=compute)).to(dtype)


def _all_equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(torch.equal(one.cpu(), other) for one, other in zip(ours, theirs, strict=True))


def _check_low_rank(device: torch.device) -> tuple[int, list[str]]:
    """A window of PowerSGD: launches, and which steps were further from fp64 than roundings explain."""
    from fastddp import _C
    from fastddp.exchange.launching import load_low_rank_kernels

    load_low_rank_kernels(((device, dtype) for dtype in _NARROW), _RANK)
    launches, differing = 0, []
    for dtype in _NARROW:
        kernels = _C.LowRankKernels(device)
        for wrong_step in _wrong_steps(kernels, device, dtype):
            differing.append(f"{wrong_step} of {_name(dtype)}")
        launches += kernels.launches
    return launches, differing


def _wrong_steps(kernels: Any, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Each step begins with the right result of the step before, so that an error shows in its own step only."""
    from fastddp.kernels import low_rank_reference as reference

    generator = torch.Generator().manual_seed(0)
    differing: dict[str, None] = {}

    def random(rows: int, columns: int, kind: torch.dtype) -> Tensor:
        return torch.randn(rows, columns, generator=generator).to(kind)

    def compare(step: str, ours: Tensor, theirs: Tensor, kind: torch.dtype, like: Tensor | None = None) -> None:
        limit = _TOLERANCE[kind] * float((theirs if like is None else like).abs().max())
        if not float((ours.cpu().double() - theirs.double()).abs().max()) <= limit:  # NaN is wrong too
            differing[step] = None

    for rows, columns in _MATRICES:
        gradient, memory = random(rows, columns, dtype), random(rows, columns, dtype)
        q = random(_RANK, columns, torch.float32)
        ours = tuple(tensor.to(device) for tensor in (gradient, memory, torch.zeros(rows, _RANK), q))
        matrix, p = reference.compress(gradient, memory, q, 0.5)
        kernels.compress([ours], 0.5)
        compare("compress", ours[1], matrix, dtype)
        compare("compress", ours[2], p, torch.float32)
        ours[1].copy_(matrix)
        ours[2].copy_(p)
        basis = reference.orthogonalise(p.float()).float()
        kernels.orthogonalise([ours[2]])
        compare("orthogonalise", ours[2], basis, torch.float32)
        ours[2].copy_(basis)
        q = reference.project(matrix, basis).float()
        kernels.project([ours])
        compare("project", ours[3], q, torch.float32)
        ours[3].copy_(q)
        expected, left, _, _ = reference.reconstruct(matrix, basis, q)
        kernels.reconstruct([ours])
        compare("reconstruct", ours[0], expected, dtype)
        compare("reconstruct", ours[1], left, dtype, like=matrix)
    return list(differing)


def _check_block8(device: torch.device) -> tuple[int, list[str]]:
    """A window of 8 bits: launches, and which steps differed from the reference in a bit."""
    from fastddp import _C
    from fastddp.exchange.launching import load_block8_kernels

    launches, differing = 0, []
    for number in _NUMBERS:
        load_block8_kernels(((device, dtype) for dtype in _NARROW), number, _BLOCK, stochastic=False)
        kernels = _C.Block8Kernels(number, _BLOCK, device)
        for dtype in _NARROW:
            differing += [
                f"{step} of {_name(dtype)} by {number}"
                for step in _wrong_steps_of_8_bits(kernels, device, number, dtype)
            ]
        launches += kernels.launches
    return launches, differing


def _check_sums(device: torch.device) -> tuple[int, list[str]]:
    """Launched kernels, and which sums differed from the reference in a bit."""
    from fastddp import _C
    from fastddp.exchange.launching import load_sum_kernels
    from fastddp.kernels.sum_shards_reference import sum_shards

    launches, differing = 0, []
    for dtype, short in ((torch.float16, "fp16"), (torch.bfloat16, "bf16")):
        load_sum_kernels([device], dtype)
        launches += device.type != "cpu" and _C.has_kernel(device, f"fastddp_sum_shards_{short}")
        for elements in (70_000, 70_001):  # aligned, and not
            shards = torch.randn(5, elements, generator=torch.Generator().manual_seed(0)).to(dtype)
            target = torch.zeros(elements, dtype=dtype, device=device)
            _C.sum_shards(shards.to(device), target)
            if not _all_equal([target], [sum_shards(shards)]):
                differing.append(f"sum of {elements} elements of {_name(dtype)}")
    return launches, differing


def _wrong_steps_of_8_bits(kernels: Any, device: torch.device, number: Any, dtype: torch.dtype) -> list[str]:
    """Each step begins with the reference's result of the step before."""
    from fastddp.kernels import block8_reference as reference

    form = reference.Format(number, _BLOCK)
    generator = torch.Generator().manual_seed(0)
    given, blocks = [], 0
    for shape in _SHAPES:
        gradient = torch.randn(shape, generator=generator).flatten().to(dtype)
        given.append((gradient, blocks))
        blocks += form.blocks_of(gradient.numel())
    groups = -(-blocks // reference.GROUP_BLOCKS)
    error = _KEPT_SHARE * torch.randn(groups * reference.GROUP_BLOCKS * _BLOCK, generator=generator)
    wire = torch.zeros(groups * form.group_bytes, dtype=torch.uint8)
    total = torch.zeros_like(wire)

    differing = []

    def compare(step: str, on_device: Callable[..., object], expected: Callable[..., object], *arguments: Any) -> None:
        ours = _moved(arguments, device)
        on_device(*ours)
        expected(form, *arguments)
        if not _all_equal(list(_tensors(ours)), list(_tensors(arguments))):
            differing.append(step)

    compare("encode", kernels.encode, reference.encode, given, error, wire, _SCALE, None, torch.zeros_like(error))
    compare("add", kernels.add, reference.add, [wire, wire, wire], total, error)
    compare("decode", kernels.decode, reference.decode, given, total)
    return differing


def _moved(argument: Any, device: torch.device) -> Any:
    """A copy on the device of every tensor, in lists and tuples too."""
    if isinstance(argument, Tensor):
        return argument.to(device, copy=True)
    return (
        type(argument)(_moved(each, device) for each in argument) if isinstance(argument, (list, tuple)) else argument
    )


def _tensors(argument: Any) -> Iterator[Tensor]:
    if isinstance(argument, Tensor):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for each in argument:
            yield from _tensors(each)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def findings(checks: Sequence[KernelCheck], about: str = "") -> list[Finding]:
    """Findings on what did not run, or was computed wrong.

    Args:
        checks: of one process.
        about: whose they are, before the device.
    """
    found = []
    for check in checks:
        where = f"{about}{check.device}"
        if check.error is not None:
            what = f"fastddp's kernels for {check.kernels} did not run: {check.error.rstrip('.')}."
            found.append(wrong(where, what, "Whatever it is would end training as well: see to it first."))
        if check.wrong:
            what = f"fastddp's kernels computed something else than plain torch: {', '.join(check.wrong)}."
            broken = (
                "Do not train on this device: check its memory. Should all devices do this, tell fastddp's authors."
            )
            found.append(wrong(where, what, broken))
        for kernel in check.given_up:
            what = f"torch's operators stand in for fastddp's kernel {kernel}."
            found.append(wrong(where, what, "Training is right there, and slower. Tell fastddp's authors this line."))
    return found
