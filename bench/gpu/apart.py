"""What is measured in processes of its own: fresh ones, or several ranks that share the device."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch

from bench import harness
from bench.gpu import simulated
from bench.gpu.results import Run


def rows(
    run: Run, measure: Callable[..., list[harness.Row]], *arguments: Any, ranks: int = 1, **environment: str
) -> list[harness.Row]:
    """What `measure`, called with the device and these, returns on rank 0. An error is a row and costs others nothing.

    Everything is pickled. `environment`: variables, which are there before the device is first used.
    """
    backend = "nccl" if run.device.type == "cuda" else simulated.DEVICE
    enter = partial(_enter, run.device.type, ranks > 1)
    try:
        with mock.patch.dict(os.environ, environment):
            return harness.spawn_ranks(_on_device, [measure, run.device.type, *arguments], ranks, 1, backend, enter)
    except Exception as error:  # whatever it is: it is the finding
        text = str(error).strip().splitlines()[-1:] or [repr(error)]
        run.results.add("failed", what=f"{measure.__name__} {_words(arguments)}", error=text[0][:300], result="WRONG")
        return []


def _words(arguments: Sequence[Any]) -> str:
    return " ".join(map(str, arguments))


def _on_device(measure: Callable[..., list[harness.Row]], device: str, *arguments: Any) -> list[harness.Row]:
    return measure(torch.device(device, 0), *arguments)  # which cannot be unpickled before there is one


def _enter(device: str, shares: bool, rank: int) -> None:
    if device == simulated.DEVICE:
        simulated.install()
    elif shares:
        simulated.of_tests("nodes").share_the_gpu()
    torch.accelerator.set_device_index(0)
