"""`fastddp doctor` runs the kernels of each device and notices what is wrong about them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fake_cuda
from fastddp import _C
from fastddp.tools.doctor import kernel_checks
from fastddp.tools.doctor.kernel_checks import KernelCheck, check_kernels
from ranks import RankPool

CPU = torch.device("cpu")


WHAT = ("pack and unpack", "PowerSGD", "8 bits", "sums of 16 bits")


def test_the_kernels_of_the_cpu_are_right() -> None:
    assert check_kernels(CPU) == [KernelCheck("cpu", what, "C++") for what in WHAT]
    assert kernel_checks.findings(check_kernels(CPU)) == []


def on_simulated_gpu(rank: int, capability: int) -> list[KernelCheck]:
    fake_cuda.schedule("in_order")
    fake_cuda.set_capability(capability)
    return check_kernels(torch.device(fake_cuda.DEVICE, 0))


@pytest.mark.timeout(300)  # the first time, 60 kernels are compiled
def test_a_gpu_runs_the_compiled_kernels(simulated_ranks: RankPool) -> None:
    (checks,) = simulated_ranks.run(on_simulated_gpu, 1, 90, time_limit=280)
    assert checks == [KernelCheck("simulated:0", what, "Triton") for what in WHAT]


@pytest.mark.tier("slow")
def test_a_gpu_before_ampere_runs_operators(simulated_device: None) -> None:
    fresh = RankPool(prepare=fake_cuda.install, backend=fake_cuda.DEVICE)  # nothing has been loaded there
    try:
        (checks,) = fresh.run(on_simulated_gpu, 1, 75)
    finally:
        fresh.stop()
    assert [(check.made_of, check.wrong, check.error) for check in checks] == [("torch's operators", (), None)] * 4


def spoil(monkeypatch: pytest.MonkeyPatch, kernels: str, step: str, spoilt: Callable[..., None]) -> None:
    """One step of the CPU's kernels is another one: it is called with the step as it is and with its arguments."""
    there = getattr(_C, kernels)

    class Spoilt:
        def __init__(self, *arguments: Any) -> None:
            self._kernels = there(*arguments)

        def __getattr__(self, name: str) -> Any:
            found = getattr(self._kernels, name)
            return functools.partial(spoilt, found) if name == step else found

    monkeypatch.setattr(_C, kernels, Spoilt)


def one_more(pack: Any, gradients: Any, views: Any, scale: float) -> None:
    pack(gradients, views, scale)
    views[1][-1] += 1


def but_the_last(step: Any, gradients: Any, views: Any, *scale: float) -> None:
    step(gradients[:-1], views[:-1], *scale)


@pytest.mark.parametrize(("step", "spoilt"), [("pack", one_more), ("pack", but_the_last), ("unpack", but_the_last)])
def test_wrong_elements_are_found(monkeypatch: pytest.MonkeyPatch, step: str, spoilt: Any) -> None:
    spoil(monkeypatch, "Kernels", step, spoilt)
    pack, *others = check_kernels(CPU)
    assert len([words for words in pack.wrong if words.startswith(f"{step} of")]) == len(kernel_checks.PAIRS)
    assert [check.wrong for check in others] == [(), (), ()]
    (finding,) = kernel_checks.findings([pack, *others])
    assert (finding.level, finding.about) == ("wrong", "cpu")


# The first tensor that a step writes.
WRITES: dict[str, Callable[..., Tensor]] = {
    "compress": lambda given, *scale: given[0][2],
    "orthogonalise": lambda given: given[0],
    "project": lambda given, *scale: given[0][3],
    "reconstruct": lambda given, *scale: given[0][0],
    "encode": lambda gradients, error, wire, scale, key, kept: kept,
    "add": lambda shards, target, error: target,
    "decode": lambda gradients, wire: gradients[1][0],
}
DTYPES = ("float32", "float16", "bfloat16")


@pytest.mark.parametrize("step", ["compress", "orthogonalise", "project", "reconstruct"])
@pytest.mark.parametrize("value", [0.01, torch.nan])
def test_a_wrong_step_of_power_sgd_is_found_alone(monkeypatch: pytest.MonkeyPatch, step: str, value: float) -> None:
    def spoilt(right: Any, *given: Any) -> None:
        right(*given)
        tensor = WRITES[step](*given)
        tensor.view(-1)[0] += value * tensor.abs().max() * 10

    spoil(monkeypatch, "LowRankKernels", step, spoilt)
    found = [check.wrong for check in check_kernels(CPU)]
    assert found == [(), tuple(f"{step} of {dtype}" for dtype in DTYPES), (), ()]


@pytest.mark.parametrize("step", ["encode", "add", "decode"])
def test_a_wrong_bit_of_8_bits_is_found_alone(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def spoilt(right: Any, *given: Any) -> None:
        right(*given)
        WRITES[step](*given).view(torch.uint8)[16] ^= 1

    spoil(monkeypatch, "Block8Kernels", step, spoilt)
    wrong = tuple(f"{step} of {dtype} by {number}" for number in ("int8", "e4m3") for dtype in DTYPES)
    assert [check.wrong for check in check_kernels(CPU)] == [(), (), wrong, ()]


def test_a_wrong_sum_of_16_bits_is_found_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sum_shards = _C.sum_shards

    def spoil(shards: Tensor, target: Tensor) -> None:
        sum_shards(shards, target)
        target.view(torch.int16)[-1] ^= 1

    monkeypatch.setattr(_C, "sum_shards", spoil)
    *others, sums = check_kernels(CPU)
    assert [check.wrong for check in others] == [(), (), ()]
    assert sums.wrong[0] == "sum of 70000 elements of float16"
    assert len(sums.wrong) == 4


def test_what_is_raised_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> None:
        raise RuntimeError("no kernel image is available\nmore lines")

    monkeypatch.setattr(_C, "Kernels", fail)
    pack, *_ = check_kernels(CPU)
    (finding,) = kernel_checks.findings([pack], "rank 3, ")
    assert finding.about == "rank 3, cpu"
    assert "did not run: RuntimeError: no kernel image is available." in finding.what
