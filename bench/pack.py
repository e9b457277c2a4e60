"""Pack and unpack: fastddp's kernels, torch's ways and a plain copy of as many bytes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bench.cases import Shape, resnet50_shapes
from bench.jobs import FASTDDP, Family, Job, name_of, plain_copy
from fastddp import _C

# Two ranks' share. A power of two, so that scaling before or after a cast rounds alike and results can be compared.
SCALE = 0.5

# (gradient, wire)
DTYPES = (
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
)
_ON_CPU_TOO = ((torch.bfloat16, torch.float32),)
_ON_GPU_TOO = ((torch.float64, torch.float64),)


@dataclass(frozen=True)
class Bucket:
    """Gradients, the wire, each gradient's view of the wire, and what torch's way needs besides."""

    gradients: list[Tensor]
    wire: Tensor
    views: list[Tensor]
    staging: Tensor  # torch's bucket, which has the gradients' dtype whatever the wire's
    staging_views: list[Tensor]

    @classmethod
    def make(cls, mebibytes: float, gradient: torch.dtype, wire: torch.dtype, device: torch.device) -> Bucket:
        """With so many MiB of gradients, one after the other in the wire, each gradient with its own memory."""
        shapes = gradient_shapes(int(mebibytes * 2**20) // gradient.itemsize)
        generator = torch.Generator().manual_seed(0)  # the simulated device has none of its own
        # From 1 to 2: halved, nothing is subnormal in fp16, where to scale after the cast would round twice.
        random = (torch.empty(shape).uniform_(1, 2, generator=generator) for shape in shapes)
        gradients = [numbers.to(device).to(gradient) for numbers in random]
        sizes = [own.numel() for own in gradients]
        flats = [torch.zeros(sum(sizes), dtype=dtype, device=device) for dtype in (wire, gradient)]
        views = [[part.view(shape) for part, shape in zip(f.split(sizes), shapes, strict=True)] for f in flats]
        return cls(gradients, flats[0], views[0], flats[1], views[1])

    @property
    def payload_bytes(self) -> int:
        """Of one pack or unpack: every element once in each dtype."""
        return self.wire.numel() * (self.staging.element_size() + self.wire.element_size())


def gradient_shapes(elements: int) -> list[Shape]:
    """ResNet-50's shapes from its input on, over and over, the last one cut: exactly so many elements.

    >>> gradient_shapes(9600)
    [(64, 3, 7, 7), (64,), (64,), (64,)]
    """
    shapes: list[Shape] = []
    for shape in itertools.cycle(resnet50_shapes()):
        size = math.prod(shape)
        if size >= elements:
            return [*shapes, shape if size == elements else (elements,)]
        shapes.append(shape)
        elements -= size
    raise AssertionError("a cycle has no end")


# ---------------------------------------------------------------------------------------------------------- contestants


@dataclass(frozen=True)
class Contestant:
    """Both directions of one way to move a bucket's gradients; pack returns the wire that would travel."""

    name: str
    bucket: Bucket
    pack: Callable[[Bucket], Tensor]
    unpack: Callable[[Bucket], None]
    scale: float = SCALE  # by which its pack multiplies
    kernels: _C.Kernels | None = None


class Fastddp:
    """fastddp's kernels, one launch a call."""

    def __init__(self, device: torch.device) -> None:
        self.kernels = _C.Kernels(device)

    def pack(self, bucket: Bucket) -> Tensor:
        """See Contestant."""
        self.kernels.pack(bucket.gradients, bucket.views, SCALE)
        return bucket.wire

    def unpack(self, bucket: Bucket) -> None:
        """See Contestant."""
        self.kernels.unpack(bucket.gradients, bucket.views)


class Moved(Fastddp):
    """The same when the allocator gave every gradient another place since the last call: a table is uploaded."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._spare: list[Tensor] = []

    def _move(self, bucket: Bucket) -> None:
        """Swaps the bucket's gradients with copies that it had from the beginning."""
        if not self._spare:
            self._spare = [gradient.clone() for gradient in bucket.gradients]
        bucket.gradients[:], self._spare = self._spare, list(bucket.gradients)

    def pack(self, bucket: Bucket) -> Tensor:
        """One upload, one launch."""
        self._move(bucket)
        return super().pack(bucket)

    def unpack(self, bucket: Bucket) -> None:
        """One upload, one launch."""
        self._move(bucket)
        super().unpack(bucket)


def pack_foreach_copy(bucket: Bucket) -> Tensor:
    """Without the scaling: less work than the others do."""
    torch._foreach_copy_(bucket.views, bucket.gradients)
    return bucket.wire


def unpack_foreach_copy(bucket: Bucket) -> None:
    torch._foreach_copy_(bucket.gradients, bucket.views)


def pack_torch_ddp(bucket: Bucket) -> Tensor:
    """Gradient by gradient, as in torch's reducer; where the dtypes differ, its fp16/bf16 hook casts and divides."""
    if bucket.wire.dtype == bucket.staging.dtype:
        for gradient, view in zip(bucket.gradients, bucket.views, strict=True):
            torch.mul(gradient, SCALE, out=view)
        return bucket.wire
    for gradient, view in zip(bucket.gradients, bucket.staging_views, strict=True):
        view.copy_(gradient)
    return bucket.staging.to(bucket.wire.dtype).mul_(SCALE)


def unpack_torch_ddp(bucket: Bucket) -> None:
    """Gradient by gradient, after the hook's cast of the whole bucket where the dtypes differ."""
    views = bucket.views
    if bucket.wire.dtype != bucket.staging.dtype:
        bucket.staging.copy_(bucket.wire)
        views = bucket.staging_views
    for gradient, view in zip(bucket.gradients, views, strict=True):
        gradient.copy_(view)


def contestants(mebibytes: float, gradient: torch.dtype, wire: torch.dtype, device: torch.device) -> list[Contestant]:
    """They share a bucket, but for the one that moves its gradients about, which only a GPU notices."""
    bucket, fast = Bucket.make(mebibytes, gradient, wire, device), Fastddp(device)
    found = [Contestant(FASTDDP, bucket, fast.pack, fast.unpack, kernels=fast.kernels)]
    if device.type != "cpu":
        moving, moved = Bucket.make(mebibytes, gradient, wire, device), Moved(device)
        found.append(Contestant("fastddp moved", moving, moved.pack, moved.unpack, kernels=moved.kernels))
    return [
        *found,
        Contestant("_foreach_copy_", bucket, pack_foreach_copy, unpack_foreach_copy, scale=1.0),
        Contestant("torch DDP", bucket, pack_torch_ddp, unpack_torch_ddp),
    ]


def wrong_contestants(everyone: Sequence[Contestant]) -> set[tuple[str, str]]:
    """Direction and name of those that do not give, bit by bit, what a cast of the flat gradients or wire gives.

    The wire is another one for each, so nobody passes by doing nothing.
    """
    wrong = set()
    for contestant in everyone:
        bucket = contestant.bucket
        expected = torch.cat([gradient.flatten() for gradient in bucket.gradients]).float() * contestant.scale
        bucket.wire.fill_(math.nan)
        if not torch.equal(contestant.pack(bucket), expected.to(bucket.wire.dtype)):
            wrong.add(("pack", contestant.name))
    for index, contestant in enumerate(everyone):
        bucket = contestant.bucket
        bucket.wire.copy_(torch.randn(bucket.wire.shape, generator=torch.Generator().manual_seed(index)))
        contestant.unpack(bucket)
        got = torch.cat([gradient.flatten() for gradient in bucket.gradients])
        if not torch.equal(got, bucket.wire.to(got.dtype)):
            wrong.add(("unpack", contestant.name))
    return wrong


# ----------------------------------------------------------------------------------------------------------------- jobs


def _make(mebibytes: float, gradient: torch.dtype, wire: torch.dtype, device: torch.device) -> list[Job]:
    """Both directions."""
    if device.type != "cpu":
        from fastddp.kernel_loading.launching import load_kernels

        load_kernels([(device, gradient, wire)])
    everyone = contestants(mebibytes, gradient, wire, device)
    bucket, wrong = everyone[0].bucket, wrong_contestants(everyone)
    facts = {"gradient_dtype": name_of(gradient), "wire_dtype": name_of(wire), "gradient_mib": mebibytes}
    facts |= {"gradients": len(bucket.gradients)}
    copy = plain_copy(bucket.payload_bytes, device)
    counts = {own.name: partial(_counts, own.kernels) for own in everyone if own.kernels is not None}
    return [
        Job(
            {"operation": direction} | facts,
            bucket.payload_bytes,
            copy | {own.name: partial(getattr(own, direction), own.bucket) for own in everyone},
            {name for where, name in wrong if where == direction},
            counts,
        )
        for direction in ("pack", "unpack")
    ]


def _counts(kernels: _C.Kernels) -> tuple[int, int]:
    return kernels.launches, kernels.uploads


def _jobs(device: torch.device, quick: bool) -> Iterator[tuple[str, Callable[[], list[Job]]]]:
    is_cpu = device.type == "cpu"
    dtypes = DTYPES[1:2] if quick else (*DTYPES, *(_ON_CPU_TOO if is_cpu else _ON_GPU_TOO))
    # The size that matters most first, in case that there is no time for all.
    sizes = (1.0,) if quick else (25.0, 1.0, 100.0 if is_cpu else 256.0)
    for size, (gradient, wire) in itertools.product(sizes, dtypes):
        what = f"pack and unpack of {size:g} MiB, {gradient} to {wire}"
        yield what, partial(_make, size, gradient, wire, device)


_KEYS = ("operation", "gradient_dtype", "wire_dtype", "gradient_mib")
FAMILY = Family("pack", "pack and unpack", "kernel", _KEYS, _jobs)
