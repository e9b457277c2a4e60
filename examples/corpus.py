"""Text that every machine has: the source of Python's own standard library, with its documentation."""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Not part of the library, or not meant for people to read (`encodings` is mostly tables).
SKIPPED_FOLDERS = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "idle_test",
    "lib2to3",
    "site-packages",
    "test",
    "tests",
}
VALIDATION_EVERY = 20  # each twentieth file is kept for validation


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes, from other files, to validate on."""

    training: Tensor
    validation: Tensor
    files: int


def library_files() -> Iterator[Path]:
    """Python's standard library, file by file, in the same order on every machine that has this version of Python."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    for path in sorted(paths, key=Path.as_posix):
        if not SKIPPED_FOLDERS.intersection(path.parts):
            yield root / path


def read_corpus() -> Corpus:
    """Read the whole library, about 10 MB, in a fraction of a second."""
    texts = [path.read_bytes() for path in library_files()]
    validation = b"".join(texts[::VALIDATION_EVERY])
    training = b"".join(text for index, text in enumerate(texts) if index % VALIDATION_EVERY)
    return Corpus(as_tensor(training), as_tensor(validation), len(texts))


def as_tensor(text: bytes) -> Tensor:
    """The bytes of a text as uint8."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


@dataclass(frozen=True)
class Batches:
    """Random pieces of a text. All ranks draw the same global batch, and each takes its own rows of it."""

    text: Tensor
    rows: int  # for each rank
    length: int
    rank: int
    world_size: int
    seed: int = 0

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """This rank's inputs and targets (rows, length) in one step; the targets lie one byte further on."""
        chance = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(len(self.text) - self.length, (self.world_size, self.rows), generator=chance)[self.rank]
        pieces = self.text[starts[:, None] + torch.arange(self.length + 1)].long()
        return pieces[:, :-1], pieces[:, 1:]
