"""Tests for machines with a GPU. `pytest tests/gpu --device simulated` runs their bodies on the simulated device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import fake_cuda
from fastddp.kernel_loading import proofs
from nodes import share_the_gpu
from ranks import RankPool


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    simulated = config.getoption("--device") == fake_cuda.DEVICE
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        # Ranks and processes that a test starts have limits of their own, after which the run goes on. pytest's ends
        # the whole run: a test that compiles kernels, or initialises NCCL, would cost the results of all.
        item.add_marker(pytest.mark.timeout(0))
        if simulated and item.get_closest_marker("needs_cuda"):
            item.add_marker(pytest.mark.skip(reason="needs CUDA itself, not only a device that behaves like it"))
        elif not simulated and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device on this machine"))


def trust_kernels() -> None:
    """So that tests see what kernels write, and not what stands in for those that are wrong."""
    proofs.proof_of = lambda kernel, device: Path(__file__)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The type of the device."""
    return str(request.config.getoption("--device"))


def share_and_trust() -> None:
    share_the_gpu()
    trust_kernels()


def living_pool(device: str, prepare: Callable[[], None] = trust_kernels) -> Iterator[RankPool]:
    """The backend is NCCL, or what stands in for it."""
    if device == fake_cuda.DEVICE:
        fake_cuda.build()
        pool = RankPool(prepare=fake_cuda.install, backend=fake_cuda.DEVICE)
    else:
        pool = RankPool(prepare=prepare, backend="nccl")
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def gpu_ranks(device: str) -> Iterator[RankPool]:
    """Ranks that share the device, over NCCL at most one."""
    yield from living_pool(device)


@pytest.fixture
def fresh_gpu_ranks(device: str) -> Iterator[RankPool]:
    """Ranks for one test, in which no kernel is loaded yet."""
    yield from living_pool(device)


@pytest.fixture(scope="session")
def sharing_ranks(device: str) -> Iterator[RankPool]:
    """Ranks that share the device, over NCCL too."""
    yield from living_pool(device, share_and_trust)


@pytest.fixture
def fresh_sharing_ranks(device: str) -> Iterator[RankPool]:
    """The same for one test, after which they are of no more use."""
    yield from living_pool(device, share_and_trust)
