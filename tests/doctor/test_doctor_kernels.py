"""`fastddp doctor` runs the kernels of each device and notices what is wrong about them."""

from __future__ import annotations

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
BLOCK8_KERNELS = _C.Block8Kernels  # not the one that a test puts there


def test_the_kernels_of_the_cpu_are_right() -> None:
    assert check_kernels(CPU) == [
        KernelCheck("cpu", "pack and unpack", "C++"),
        KernelCheck("cpu", "PowerSGD", "C++"),
        KernelCheck("cpu", "8 bits", "C++"),
        KernelCheck("cpu", "sums of 16 bits", "C++"),
    ]
    assert kernel_checks.findings(check_kernels(CPU)) == []


def on_simulated_gpu(rank: int, capability: int) -> list[KernelCheck]:
    fake_cuda.schedule("in_order")
    fake_cuda.set_capability(capability)
    return check_kernels(torch.device(fake_cuda.DEVICE, 0))


@pytest.mark.timeout(300)  # the first time, 60 kernels are compiled
def test_a_gpu_runs_the_compiled_kernels(simulated_ranks: RankPool) -> None:
    (checks,) = simulated_ranks.run(on_simulated_gpu, 1, 90, time_limit=280)
    assert checks == [
        KernelCheck("simulated:0", "pack and unpack", "Triton"),
        KernelCheck("simulated:0", "PowerSGD", "Triton"),
        KernelCheck("simulated:0", "8 bits", "Triton"),
        KernelCheck("simulated:0", "sums of 16 bits", "Triton"),
    ]


@pytest.mark.tier("slow")
def test_a_gpu_before_ampere_runs_operators(simulated_device: None) -> None:
    fresh = RankPool(prepare=fake_cuda.install, backend=fake_cuda.DEVICE)  # nothing has been loaded there
    try:
        (checks,) = fresh.run(on_simulated_gpu, 1, 75)
    finally:
        fresh.stop()
    assert [(check.made_of, check.wrong, check.error) for check in checks] == [("torch's operators", (), None)] * 4


class Wrapped:
    """The kernels of the CPU, one of which is spoilt by a subclass."""

    of: Any = None

    def __init__(self, device: torch.device) -> None:
        self._kernels = self.of(device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)


class PackSpoilt(Wrapped):
    of = _C.Kernels

    def pack(self, gradients: Any, views: Any, scale: float) -> None:
        self._kernels.pack(gradients, views, scale)
        views[1][-1] += 1


class ZerosForgotten(Wrapped):
    of = _C.Kernels

    def pack(self, gradients: Any, views: Any, scale: float) -> None:
        self._kernels.pack(gradients[:-1], views[:-1], scale)


class UnpackSpoilt(Wrapped):
    of = _C.Kernels

    def unpack(self, gradients: Any, views: Any) -> None:
        self._kernels.unpack(gradients[:-1], views[:-1])


@pytest.mark.parametrize(
    ("kernels", "step"), [(PackSpoilt, "pack of"), (ZerosForgotten, "pack of"), (UnpackSpoilt, "unpack of")]
)
def test_elements_that_are_packed_or_unpacked_wrongly_are_found(
    monkeypatch: pytest.MonkeyPatch, kernels: type[Wrapped], step: str
) -> None:
    monkeypatch.setattr(_C, "Kernels", kernels)
    pack, *others = check_kernels(CPU)
    assert len([words for words in pack.wrong if words.startswith(step)]) == len(kernel_checks.PAIRS)
    assert [check.wrong for check in others] == [(), (), ()]
    (finding,) = kernel_checks.findings([pack, *others])
    assert (finding.level, finding.about) == ("wrong", "cpu")


@pytest.mark.parametrize("step", ["compress", "orthogonalise", "project", "reconstruct"])
@pytest.mark.parametrize("value", [0.01, torch.nan])
def test_a_wrong_step_of_power_sgd_is_found_alone(monkeypatch: pytest.MonkeyPatch, step: str, value: float) -> None:
    class Spoilt(Wrapped):
        of = _C.LowRankKernels

    def spoil(self: Any, given: Any, *scale: float) -> None:
        getattr(self._kernels, step)(given, *scale)
        written = {"compress": 2, "project": 3, "reconstruct": 0}
        tensor = given[0] if step == "orthogonalise" else given[0][written[step]]
        tensor.view(-1)[0] += value * tensor.abs().max() * 10

    setattr(Spoilt, step, spoil)
    monkeypatch.setattr(_C, "LowRankKernels", Spoilt)
    pack, low_rank, eight_bits, sums = check_kernels(CPU)
    assert pack.wrong == eight_bits.wrong == sums.wrong == ()
    assert low_rank.wrong == tuple(f"{step} of {dtype}" for dtype in ("float32", "float16", "bfloat16"))


# The first tensor that the step writes.
_WRITES = {
    "encode": lambda gradients, error, wire, scale, key, kept: kept,
    "add": lambda shards, target, error: target,
    "decode": lambda gradients, wire: gradients[1][0],
}


@pytest.mark.parametrize("step", _WRITES)
def test_a_wrong_bit_of_8_bits_is_found_alone(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    class Spoilt:
        def __init__(self, number: str, block: int, device: torch.device) -> None:
            self._kernels = BLOCK8_KERNELS(number, block, device)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._kernels, name)

    def spoil(self: Any, *given: Any) -> None:
        getattr(self._kernels, step)(*given)
        _WRITES[step](*given).view(torch.uint8)[16] ^= 1

    setattr(Spoilt, step, spoil)
    monkeypatch.setattr(_C, "Block8Kernels", Spoilt)
    pack, low_rank, eight_bits, sums = check_kernels(CPU)
    assert pack.wrong == low_rank.wrong == sums.wrong == ()
    dtypes = ("float32", "float16", "bfloat16")
    assert eight_bits.wrong == tuple(
        f"{step} of {dtype} by {number}" for number in ("int8", "e4m3") for dtype in dtypes
    )


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
