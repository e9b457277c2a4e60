"""Prepares a run on a machine with a GPU that can fetch nothing: `make gpu-carry`.

Makes a folder that goes there, beside a copy of this repository without its history:

    site/            fastddp as it was compiled for the torch that runs this, with symbols stripped
    triton.tar.gz    Triton's cache, with every kernel compiled for one architecture; to be unpacked at the root there,
                     because the cache stores absolute paths
    commit.json      what the copy is of: results name it

Run it by the interpreter, the torch and the Triton of that machine. Where Triton is another build there, its cache is
of no use, kernels are compiled as usual, and `bench.gpu facts` says so.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import triton
from fastddp.kernels import ahead_of_time, block8_kernels, low_rank_kernels
from fastddp.kernels.pack_kernels import TRITON_DTYPES, moves, pack_kernel

import fastddp
from bench import harness

MODULE = "bench.gpu.carry"
FOLDER = harness.CARRIED_COMMIT.parent
_MIB = 2**20
_MOST_MIB = 40


def main() -> int:
    options = parse_arguments()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    copy_package()
    harness.CARRIED_COMMIT.write_text(json.dumps(harness.commit_of_this_copy()))
    compile_all(options.capability)
    pack_cache()
    size = sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) / _MIB
    print(f"{FOLDER.relative_to(harness.ROOT)}: {size:.0f} MiB, torch {torch.__version__}, Triton {triton.__version__}")
    return 0 if size <= _MOST_MIB else 1


def parse_arguments() -> argparse.Namespace:
    parser = harness.parser(MODULE, __doc__)
    parser.add_argument("--capability", type=int, default=90, help="of the GPU, without the dot (default: %(default)s)")
    return parser.parse_args()


def copy_package() -> None:
    """Only what runs: of the extension, no symbols."""
    site, package = FOLDER / "site", Path(fastddp.__file__).parent
    shutil.copytree(package, site / "fastddp", ignore=shutil.ignore_patterns("__pycache__", "csrc"))
    for library in site.rglob("*.so"):
        subprocess.run(["strip", "--strip-unneeded", library], check=True)


def compile_all(capability: int) -> None:
    """Put every kernel that fastddp has into Triton's cache."""
    with concurrent.futures.ProcessPoolExecutor(len(os.sched_getaffinity(0)), initializer=_name_as_jobs_do) as workers:
        compiled = [workers.submit(call) for call in all_kernels(capability)]
        for number, one in enumerate(concurrent.futures.as_completed(compiled), 1):
            one.result()
            print(f"\rcompiled {number} of {len(compiled)}", end="", file=sys.stderr)
    print(file=sys.stderr)


def _name_as_jobs_do() -> None:
    """Triton's name of a kernel in the cache depends on which kernels with the same helpers were named before it.

    A job compiles pack first. A worker may not.
    """
    pack_kernel.cache_key  # noqa: B018


def all_kernels(capability: int) -> Iterator[Callable[[], object]]:
    """Calls that compile them: each dtype, format and rank."""
    yield partial(ahead_of_time.compile_write_words, capability)
    for gradient, wire in itertools.product(TRITON_DTYPES, repeat=2):
        for form in ("pack", "unpack", "pack_measuring") if moves(gradient, wire) else ():
            yield partial(ahead_of_time.compile_pack, form, gradient, wire, capability)
    for dtype in TRITON_DTYPES:
        yield partial(ahead_of_time.compile_measure, dtype, capability)
        yield partial(ahead_of_time.compile_measure_gradients, dtype, capability)
    for dtype in (torch.float16, torch.bfloat16):
        yield partial(ahead_of_time.compile_sum_shards, dtype, capability)
    formats = itertools.product(block8_kernels.DTYPES, block8_kernels.NUMBERS, block8_kernels.BLOCKS, (False, True))
    for dtype, number, block, stochastic in formats:
        yield partial(ahead_of_time.compile_block8, dtype, number, block, stochastic, capability)
    ranks = [2**power for power in range(low_rank_kernels.LARGEST_RANK.bit_length())]
    for dtype, rank in itertools.product(ahead_of_time.LOW_RANK_DTYPES, ranks):
        yield partial(ahead_of_time.compile_low_rank, dtype, rank, capability)


def pack_cache() -> None:
    """Triton's cache in an archive, under its absolute path."""
    cache = Path(triton.knobs.cache.dir)
    with tarfile.open(FOLDER / "triton.tar.gz", "w:gz") as archive:
        archive.add(cache, arcname=str(cache).lstrip(os.sep), filter=_without_owner)


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    sys.exit(main())
