"""The ranks of a node compile each Triton kernel once: one does, the others wait and take it from Triton's cache."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fastddp.kernels.compiling_once import alone_on_this_node

from file_kinds import FILE_KINDS

RANKS = 3

COMPILES = """
import sys, time
from pathlib import Path
import torch, triton
from fastddp.kernels import ahead_of_time

rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
compiled = []
triton.knobs.compilation.listener = lambda *, src, cache_hit, **rest: None if cache_hit else compiled.append(src.name)
(folder / f"ready{rank}").touch()
while len(list(folder.glob("ready*"))) < ranks:  # all want the first kernel at the same moment
    time.sleep(0.01)
for form in ("pack", "unpack", "pack_measuring"):
    assert ahead_of_time.compile_pack(form, torch.float32, torch.bfloat16, 90).cubin
print(len(compiled))
"""

HOLDS = """
import sys, time
from pathlib import Path
from fastddp.kernels.compiling_once import alone_on_this_node

with alone_on_this_node(Path(sys.argv[1]), "a kernel"):
    print("held", flush=True)
    time.sleep(600)
"""


def start(script: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})


@pytest.mark.tier("nightly")
@pytest.mark.timeout(300)
def test_one_rank_compiles_and_the_others_find_it(tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    ranks = [start(COMPILES, rank, RANKS, tmp_path, TRITON_CACHE_DIR=cache) for rank in range(RANKS)]
    counts = [int(rank.communicate(timeout=280)[0]) for rank in ranks]
    assert sum(counts) == 3, counts  # kernels


@pytest.mark.tier("slow")
def test_who_has_waited_long_enough_compiles_too_and_the_lock_of_a_rank_that_dies_is_free(tmp_path: Path) -> None:
    holder = start(HOLDS, tmp_path)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with alone_on_this_node(tmp_path, "a kernel", patience=0.1):
        assert holder.poll() is None  # it still holds it
    with alone_on_this_node(tmp_path, "another kernel", patience=600):
        assert holder.poll() is None
    holder.kill()
    holder.wait()
    begin = time.monotonic()
    with alone_on_this_node(tmp_path, "a kernel", patience=600):
        assert time.monotonic() - begin < 300  # not by patience's end


@pytest.mark.parametrize("kind", FILE_KINDS)
def test_a_file_of_any_kind_in_place_of_a_lock_keeps_nobody_from_compiling(kind: str, tmp_path: Path) -> None:
    with alone_on_this_node(tmp_path, "a kernel"):
        pass
    (lock,) = (tmp_path / "fastddp-locks").iterdir()
    lock.unlink()
    FILE_KINDS[kind](lock)
    with alone_on_this_node(tmp_path, "a kernel"):
        compiled = True
    assert compiled


@pytest.mark.parametrize("has_locks", [True, False])
def test_what_goes_wrong_while_compiling_is_not_hidden_and_nobody_holds_the_lock_then(
    tmp_path: Path, has_locks: bool
) -> None:
    folder = tmp_path / "cache"
    folder.mkdir() if has_locks else folder.touch()
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match="ptxas"), alone_on_this_node(folder, "a kernel", patience=600):
            raise FileNotFoundError("ptxas")
