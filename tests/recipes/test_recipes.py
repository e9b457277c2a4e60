"""The scripts of docs/recipes.md train, and leave all ranks with equal parameters."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fastddp
from nodes import nodes_of_two
from ranks import RankPool
from repository import ROOT

RECIPES = ROOT / "examples" / "recipes"


def check_replicas(is_in_levels: bool = False) -> None:
    """In place of the script's last line: all ranks have the same parameters."""
    (model,) = (made for made in gc.get_objects() if type(made) is fastddp.DistributedDataParallel)
    mine = torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])
    of_rank_0 = mine.clone()
    dist.broadcast(of_rank_0, 0)
    assert torch.equal(mine, of_rank_0)
    assert is_in_levels == (model.engine.now.setting.hierarchy is not None)


def printed_by(
    rank: int,
    script: str,
    *arguments: str,
    where: Callable[[int], contextlib.AbstractContextManager[object]] | None = None,
) -> str:
    """What the script prints on this rank, which has its process group already."""
    gc.collect()
    with (
        mock.patch.object(sys, "argv", [script, *arguments]),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group", functools.partial(check_replicas, where is not None)),
        contextlib.redirect_stdout(io.StringIO()) as output,
        where(rank) if where else contextlib.nullcontext(),
    ):
        runpy.run_path(str(RECIPES / script), run_name="__main__")
    return output.getvalue()


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\S+)", text)]


def test_a_second_run_of_bf16_goes_on_with_equal_losses(ranks: RankPool, tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.pt"
    whole, silent = ranks.run(printed_by, 2, "bf16.py", str(file))
    found = losses(whole)
    assert (len(found), silent) == (25, "")
    assert sum(found[-3:]) < 0.3 * sum(found[:3])
    resumed, _ = ranks.run(printed_by, 2, "bf16.py", str(file))
    assert resumed.splitlines() == whole.splitlines()[20:]


@pytest.mark.tier("slow")
def test_the_scaler_finds_a_scale_and_the_loss_falls(ranks: RankPool) -> None:
    text, _ = ranks.run(printed_by, 2, "grad_scaler.py")
    scales = [float(scale) for scale in re.findall(r"scale (\d+)", text)]
    assert scales[0] == 2.0**23  # the first step was skipped
    assert scales[-1] == scales[len(scales) // 2]
    assert losses(text)[-1] < 0.5 * losses(text)[0]


@pytest.mark.tier("slow")
def test_averages_are_equal_on_all_ranks_and_better(ranks: RankPool) -> None:
    texts = ranks.run(printed_by, 2, "averaged.py")
    first, second = (re.findall(r"last (\S+), averaged (\S+)", text) for text in texts)
    assert first == second
    last, averaged = map(float, first[-1])
    assert averaged < last < float(first[0][0])


@pytest.mark.tier("slow")
def test_two_nodes_exchange_8_bits(ranks: RankPool) -> None:
    text, *_ = ranks.run(printed_by, 4, "two_nodes.py", where=nodes_of_two)
    assert losses(text)[-1] < 0.5 * losses(text)[0]


@pytest.mark.tier("slow")
def test_a_compiled_model_trains(ranks: RankPool) -> None:
    text, _ = ranks.run(printed_by, 2, "compiled.py", time_limit=200.0)
    assert losses(text)[-1] < 0.5 * losses(text)[0]
    assert int(re.findall(r"(\d+) buckets", text)[0]) > 1
