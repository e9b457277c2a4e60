"""Which gradients travel together, and in which order.

``plan_buckets`` decides this. It is a pure function of the parameters, so every rank gets the same buckets.
:class:`BucketPlan` gives the decision by parameter name: to read, to keep in a file, and to pin in another run.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastddp.documents.formats import DocumentFormat
from fastddp.documents.typed_json import restored, shown
from fastddp.errors import see

Buckets = list[list[int]]
"""The indices of each bucket's parameters; buckets in the order of their collectives."""


def plan_buckets(parameters: Sequence[Tensor], caps: Sequence[int], order: Sequence[int] | None = None) -> Buckets:
    """Divide ``parameters`` into buckets.

    Walks the parameters in ``order``, and closes a bucket as soon as its bytes reach its cap, so a bucket exceeds its
    cap by less than one parameter. A bucket holds one dtype on one device. Buckets are ordered by their last parameter,
    which is the order in which they become ready.

    Args:
        parameters: of any shape, dtype and device.
        caps: bytes at which the first, second, ... bucket of a dtype and device is closed; the last is for all others.
        order: of the parameters' indices, in which gradients are expected. Default: reversed, as backward runs.

    Example: four parameters of 4 bytes each with caps [4, 8] give [[3], [2, 1], [0]].
    """
    open_buckets: dict[object, list[int]] = {}
    sizes, closed = Counter[object](), Counter[object]()  # bytes of open buckets, and how many of a kind were closed
    plan: Buckets = []
    for index in order if order is not None else reversed(range(len(parameters))):
        kind = (parameters[index].dtype, parameters[index].device)
        open_buckets.setdefault(kind, []).append(index)
        sizes[kind] += parameters[index].nbytes
        if sizes[kind] >= caps[min(closed[kind], len(caps) - 1)]:
            plan.append(open_buckets[kind])
            open_buckets[kind], sizes[kind], closed[kind] = [], 0, closed[kind] + 1
    return plan + [bucket for bucket in open_buckets.values() if bucket]


def with_one_dtype(plan: Buckets, parameters: Sequence[Tensor]) -> Buckets:
    """``plan``, cut where gradients of one dtype are those of parameters of several.

    Example: [[3, 2, 1, 0]] becomes [[3, 1], [2, 0]] if parameters 0 and 2 are fp32 and 1 and 3 are bf16.
    """
    parts: Buckets = []
    for bucket in plan:
        of_dtype: dict[torch.dtype, list[int]] = {}
        for index in bucket:
            of_dtype.setdefault(parameters[index].dtype, []).append(index)
        parts += of_dtype.values()
    return parts


def become_complete_in_order(plan: Buckets, order: Sequence[int]) -> bool:
    """Whether buckets of ``plan`` become complete one after the other, if gradients come in ``order``.

    Example: with the buckets [[3], [2, 1], [0]] and the order 3, 1, 2, 0 they do; with 2, 1, 3, 0 they do not.
    """
    moments = {index: moment for moment, index in enumerate(order)}
    if {index for bucket in plan for index in bucket} != moments.keys():
        return False
    ends = [max(moments[index] for index in bucket) for bucket in plan]
    return ends == sorted(ends)


@dataclass(frozen=True)
class PlannedParameter:
    """One parameter of a bucket, under its name in the module."""

    name: str
    """As the module calls it."""
    shape: tuple[int, ...]
    """As the module has it."""
    dtype: torch.dtype
    """Of its gradient."""

    @property
    def bytes(self) -> int:
        """Of its gradient."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class PlannedBucket:
    """The parameters whose gradients travel together."""

    number: int
    """Its place in the order of collectives, from 0; errors call number 3 "bucket 3"."""
    parameters: tuple[PlannedParameter, ...]
    """In the order in which their gradients lie on the wire; all of one dtype."""
    device: str = field(compare=False)
    """Where this rank has it. Ranks have different devices, so it is not compared."""

    @property
    def bytes(self) -> int:
        """Of its gradients."""
        return sum(parameter.bytes for parameter in self.parameters)


@dataclass(frozen=True)
class BucketPlan:
    """All buckets of a model, in the order of their collectives; ``print`` shows them as a table.

    Raises:
        ValueError: buckets are not numbered 0, 1, ...; a bucket is empty or has several dtypes; a name occurs twice.
    """

    buckets: tuple[PlannedBucket, ...]
    """In the order of their collectives."""

    def __post_init__(self) -> None:
        seen: dict[str, int] = {}
        for number, bucket in enumerate(self.buckets):
            if bucket.number != number:
                raise ValueError(f"bucket number {number} of the plan says that it is number {bucket.number}")
            if not bucket.parameters:
                raise ValueError(f"bucket {number} of the plan has no parameters")
            dtype = bucket.parameters[0].dtype
            for parameter in bucket.parameters:
                if parameter.dtype != dtype:
                    raise ValueError(
                        f"bucket {number} of the plan holds {dtype} and, with parameter '{parameter.name}', "
                        f"{parameter.dtype}; a bucket has one dtype"
                    )
                if parameter.name in seen:
                    raise ValueError(
                        f"parameter '{parameter.name}' is twice in the plan, in bucket {seen[parameter.name]} and in "
                        f"bucket {number}"
                    )
                seen[parameter.name] = number

    @classmethod
    def of(cls, buckets: Buckets, names: Sequence[str], parameters: Sequence[Tensor]) -> BucketPlan:
        """The plan that puts parameters into given buckets.

        Args:
            buckets: the indices of each bucket's parameters; buckets in the order of their collectives.
            names: of all parameters.
            parameters: tensors with their shapes, and with the dtypes and devices of their gradients.
        """

        def planned(index: int) -> PlannedParameter:
            return PlannedParameter(names[index], tuple(parameters[index].shape), parameters[index].dtype)

        return cls(
            tuple(
                PlannedBucket(number, tuple(map(planned, bucket)), str(parameters[bucket[0]].device))
                for number, bucket in enumerate(buckets)
            )
        )

    @property
    def bytes(self) -> int:
        """Of all gradients."""
        return sum(bucket.bytes for bucket in self.buckets)

    def __str__(self) -> str:
        lines = [("bucket", "parameter", "shape", "dtype", "device", "bytes")]
        for bucket in self.buckets:
            dtype = str(bucket.parameters[0].dtype).removeprefix("torch.")
            count = _counted(len(bucket.parameters), "parameter")
            lines.append((str(bucket.number), count, "", dtype, bucket.device, f"{bucket.bytes:,}"))
            lines += [("", p.name, str(p.shape), "", "", f"{p.bytes:,}") for p in bucket.parameters]
        parameters = sum(len(bucket.parameters) for bucket in self.buckets)
        total = f"{_counted(parameters, 'parameter')} in {_counted(len(self.buckets), 'bucket')}"
        return _table([*lines, ("total", total, "", "", "", f"{self.bytes:,}")])

    # --------------------------------------------------------------------------------------------------- its file

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON. All ranks may do so at the same time, since they write the same.

        Args:
            path: of the file.

        Raises:
            OSError: the file cannot be written.
        """
        content = {
            "buckets": [
                {
                    "number": bucket.number,
                    "device": bucket.device,
                    "parameters": [
                        {"name": p.name, "shape": p.shape, "dtype": str(p.dtype).removeprefix("torch.")}
                        for p in bucket.parameters
                    ],
                }
                for bucket in self.buckets
            ],
        }
        _FILE.save(path, content)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> BucketPlan:
        """Read a plan that :meth:`save` has written.

        Args:
            path: of the file.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is not JSON, or was cut short; it holds something else, a plan in another version of
                this format, or no valid plan.
        """
        content = _FILE.load(path)
        try:
            buckets: list[_BucketInFile] = restored(content.get("buckets"), list[_BucketInFile], "buckets")
            return cls(tuple(bucket.planned() for bucket in buckets))
        except ValueError as error:
            raise ValueError(f"{path} holds no valid bucket plan: {error}. {_FILE.remedy}" + see("FD026")) from None


_FILE = DocumentFormat("fastddp bucket plan", 1, "bucket plan", "Write it anew with model.bucket_plan().save(path).")


@dataclass(frozen=True)
class _ParameterInFile:
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class _BucketInFile:
    number: int
    device: str
    parameters: tuple[_ParameterInFile, ...]

    def planned(self) -> PlannedBucket:
        parameters = tuple(PlannedParameter(p.name, p.shape, _dtype_named(p.dtype)) for p in self.parameters)
        return PlannedBucket(self.number, parameters, self.device)


def _dtype_named(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {shown(name)}")
    return dtype


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _table(lines: Sequence[tuple[str, ...]]) -> str:
    """The lines as columns, each as wide as its widest cell, the last one aligned on the right."""
    *widths, last = (max(map(len, column)) for column in zip(*lines, strict=True))
    row = "  ".join([*(f"{{:{width}}}" for width in widths), f"{{:>{last}}}"])
    return "\n".join(row.format(*line) for line in lines)
