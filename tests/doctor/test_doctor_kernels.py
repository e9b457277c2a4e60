"""`fastddp doctor` runs the kernels of each device and notices what is wrong about them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import fake_cuda
from fastddp import _C
from fastddp.tools.doctor import kernel_checks
from fastddp.tools.doctor.findings import KernelCheck
from fastddp.tools.doctor.kernel_checks import check_kernels
from fastddp.tools.doctor.report import Report
from ranks import RankPool

CPU = torch.device("cpu")
WHAT = ("pack and unpack", "PowerSGD", "8 bits", "sums of 16 bits")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine, threads wait longer for each other than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.tier("slow")
def test_the_kernels_of_the_cpu_are_right() -> None:
    found = check_kernels(CPU)
    assert found == [KernelCheck("cpu", what, "C++") for what in WHAT]
    assert [check.findings() for check in found] == [[]] * len(WHAT)


def on_simulated_gpu(rank: int, capability: int) -> list[KernelCheck]:
    torch.set_num_threads(1)
    fake_cuda.schedule("in_order")
    fake_cuda.set_capability(capability)
    return check_kernels(torch.device(fake_cuda.DEVICE, 0))


@pytest.fixture
def fresh(simulated_device: None) -> Iterator[RankPool]:
    """Nothing has been loaded there."""
    pool = RankPool(prepare=fake_cuda.install, backend=fake_cuda.DEVICE)
    yield pool
    pool.stop()


@pytest.mark.tier("slow")
@pytest.mark.timeout(1500)  # the first time, some 80 kernels are compiled
@pytest.mark.parametrize(("capability", "made_of"), [(90, "Triton"), (75, "torch's operators")])
def test_a_gpu_runs_the_compiled_kernels_and_one_before_ampere_operators(
    fresh: RankPool, capability: int, made_of: str
) -> None:
    (checks,) = fresh.run(on_simulated_gpu, 1, capability, time_limit=1400)
    assert checks == [KernelCheck("simulated:0", what, made_of) for what in WHAT]


@pytest.mark.parametrize(
    "check",
    [
        KernelCheck("cuda:0", "8 bits", "Triton", wrong=("add by int8",)),
        KernelCheck("cuda:0", "8 bits", "Triton", given_up=("fastddp_block8_add_int8 (H100): launching failed",)),
        KernelCheck("cuda:0", "8 bits", "", error="RuntimeError: no memory"),
    ],
    ids=["wrong", "given up", "not checked"],
)
def test_what_is_wrong_given_up_or_not_checked_ends_the_doctor_with_status_1(check: KernelCheck) -> None:
    found = tuple(check.findings())
    assert [finding.level for finding in found] == ["wrong"]
    assert Report(None, None, (), None, found).status == 1
    assert Report(None, None, (), None, ()).status == 0


def spoil(monkeypatch: pytest.MonkeyPatch, kernels: str, step: str, spoilt: Callable[..., Any]) -> None:
    """One step of the CPU's kernels is another one: it is called with the step as it is and with its arguments."""
    there = getattr(_C, kernels)

    class Spoilt:
        of_operators = there.of_operators

        def __init__(self, *arguments: Any) -> None:
            self._kernels = there(*arguments)

        def __getattr__(self, name: str) -> Any:
            found = getattr(self._kernels, name)
            return functools.partial(spoilt, found) if name == step else found

    monkeypatch.setattr(_C, kernels, Spoilt)


def whats(check: KernelCheck) -> list[str]:
    """What was wrong, without the paths."""
    return [text.split(" (")[0] for text in check.wrong]


PACK, LOW_RANK, BLOCK8 = (0, "Kernels"), (1, "LowRankKernels"), (2, "Block8Kernels")
# Whose a step is, the first tensor that it writes, and how many checks of it there are.
WRITES: dict[str, tuple[tuple[int, str], Callable[..., Tensor], int]] = {
    "compress": (LOW_RANK, lambda given, *scale: given[0][2], 3),
    "orthogonalise": (LOW_RANK, lambda given, *others: given[0], 1),
    "project": (LOW_RANK, lambda given, *scale: given[0][3], 3),
    "reconstruct": (LOW_RANK, lambda given, *scale: given[0][0], 3),
    "pack": (PACK, lambda gradients, views, *scale, **measuring: views[1], len(kernel_checks.PAIRS)),
    "unpack": (PACK, lambda gradients, views: gradients[-1], len(kernel_checks.PAIRS)),
    "encode": (BLOCK8, lambda gradients, error, wire, scale, key, kept: wire, 12),
    "add": (BLOCK8, lambda shards, target, *others: target, 4),
    "decode": (BLOCK8, lambda gradients, wire: gradients[1][0], 6),
}


@pytest.mark.tier("slow")
@pytest.mark.parametrize(
    ("step", "value"), [*itertools.product([*WRITES][:4], [0.01, torch.nan]), *((step, None) for step in [*WRITES][4:])]
)
def test_a_wrong_step_of_power_sgd_or_a_wrong_bit_is_found_alone(
    monkeypatch: pytest.MonkeyPatch, step: str, value: float | None
) -> None:
    (place, kernels), writes, count = WRITES[step]

    def spoilt(right: Any, *given: Any, **measuring: bool) -> Any:
        result = right(*given, **measuring)
        tensor = writes(*given)
        if value is None:
            tensor.as_strided((1,), (1,)).view(torch.uint8)[0] ^= 1
        else:
            tensor[0, 0] += value * tensor.abs().max() * 10
        return result

    spoil(monkeypatch, kernels, step, spoilt)
    by_family = [*map(whats, check_kernels(CPU))]
    assert len([what for what in by_family.pop(place) if what.startswith(step)]) == count
    assert by_family == [[], [], []]


def test_what_is_raised_is_a_finding() -> None:
    error = RuntimeError("no kernel image\nmore lines")
    with mock.patch("fastddp.kernel_loading.kernel_cases.pack", side_effect=error):
        pack, *_ = check_kernels(CPU)
    (finding,) = pack.findings("rank 3, ")
    assert finding.about == "rank 3, cpu"
    assert "did not run: RuntimeError: no kernel image." in finding.what
