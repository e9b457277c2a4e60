"""The changing half of a bucket: where its gradients are right now.

Shape letters:

    N  gradients of the bucket
    C  chunks of the bucket
"""

from collections.abc import Sequence

import torch

from .layout import BucketLayout, collapse, may_overlap
from .pack_kernels import ADDRESS_WORDS


class AddressTable:
    """The two tables of :mod:`.pack_kernels` on one device; the one with addresses is uploaded only when it changed.

    Attributes:
        layout: the bucket that it belongs to.
        chunks: int64 [C, 4], uploaded once.
        rows: int64 [2 N + shape blocks], as of the last :meth:`refresh`.
        uploads: how often ``rows`` was uploaded. In a steady state it stands still.
        overlapping: the first gradient that may overlap itself and so cannot be unpacked into; None if all can.

    Refresh and launch on one stream: a replaced table is freed in the order of the stream that it was made on. Pack and
    unpack on two streams take a table each.

    For two fp32 gradients of shape (2, 3), the first contiguous at address 4096, the second transposed (strides (1, 2))
    at 8192, both for row-major parameters, ``rows`` is::

        [4096, 0,  8192, 4,  2, 3, 2, 2, 1]
         gradient  gradient  |  |     size 2, stride 1
         0: flat   1: shape  |  size 3, stride 2
                   block at 4|
                             number of dims
    """

    def __init__(self, layout: BucketLayout, device: torch.device | str) -> None:
        self.layout = layout
        self.device = torch.device(device)
        self.chunks = layout.chunks().to(self.device)
        self.rows = torch.empty(0, dtype=torch.int64, device=self.device)
        self.uploads = 0
        self.overlapping: int | None = None
        self._seen: list[object] | None = None

    def refresh(self, gradients: Sequence[torch.Tensor | None], wire: torch.Tensor) -> torch.Tensor:
        """Return ``rows`` for ``gradients``, after checking and uploading them if anything differs from the last call.

        Raises:
            ValueError: the gradients do not fit the bucket; see :meth:`.BucketLayout.check_gradients`.
        """
        seen: list[object] = [_identity(gradient) for gradient in gradients]
        if seen != self._seen:
            self.layout.check_gradients(gradients, wire)
            words, self.overlapping = self._words(gradients)
            # A fresh buffer on both sides: neither the copy in flight nor a kernel still running sees its table change.
            staged = torch.tensor(words, dtype=torch.int64, pin_memory=self.device.type == "cuda")
            self.rows = staged.to(self.device, non_blocking=True)
            self.uploads += 1
            self._seen = seen
        return self.rows

    def _words(self, gradients: Sequence[torch.Tensor | None]) -> tuple[list[int], int | None]:
        rows: list[int] = []
        blocks: list[int] = []
        overlapping = None
        for index, (gradient, place) in enumerate(zip(gradients, self.layout.placements, strict=True)):
            if gradient is None or place.numel == 0:
                rows += [0, 0]
                continue
            dims = collapse(place.shape, gradient.stride(), place.strides)
            flat = place.numel == 1 or (len(dims) == 1 and dims[0].stride == 1)
            rows += [gradient.data_ptr(), 0 if flat else ADDRESS_WORDS * len(gradients) + len(blocks)]
            if not flat:
                blocks += [len(dims), *(number for dim in dims for number in dim)]
            if overlapping is None and may_overlap(dims):
                overlapping = index
        return rows + blocks, overlapping


def _identity(gradient: torch.Tensor | None) -> object:
    """Equal for two gradients exactly if the same checks and the same row hold for both."""
    if gradient is None:
        return None
    if gradient.layout is not torch.strided:
        return gradient.layout
    return (
        gradient.data_ptr(),
        gradient.shape,
        gradient.stride(),
        gradient.dtype,
        gradient.device,
        gradient.is_neg(),
    )
