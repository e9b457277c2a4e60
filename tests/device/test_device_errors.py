"""What the driver answers, on the simulated device: errors of launches are the kernel's, all others the device's."""

from __future__ import annotations

import warnings

import pytest
import torch

import fake_cuda
from fastddp import _C
from fastddp.kernel_loading import proofs
from fastddp.kernel_loading.launching import load_kernels
from on_device import DEVICE, Case, batch
from on_ranks import on_ranks

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

# A kernel that is given up stays so. No other test of these ranks trains in these dtypes on this device.
HERE = torch.device("privateuseone", 1)  # named before it is renamed
OF_LAUNCHES = {
    1: (FP32, FP16, "CUDA_ERROR_INVALID_VALUE"),
    2: (FP32, BF16, "CUDA_ERROR_OUT_OF_MEMORY"),
    200: (FP16, FP32, "CUDA_ERROR_INVALID_IMAGE"),
    209: (FP16, FP16, "CUDA_ERROR_NO_BINARY_FOR_GPU"),
    218: (FP16, BF16, "CUDA_ERROR_INVALID_PTX"),
    400: (BF16, FP32, "CUDA_ERROR_INVALID_HANDLE"),
    500: (BF16, FP16, "CUDA_ERROR_NOT_FOUND"),
    701: (BF16, BF16, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"),
}
OF_DEVICES = {
    214: "CUDA_ERROR_ECC_UNCORRECTABLE",
    700: "CUDA_ERROR_ILLEGAL_ADDRESS",
    702: "CUDA_ERROR_LAUNCH_TIMEOUT",
    710: "CUDA_ERROR_ASSERT",
    714: "CUDA_ERROR_HARDWARE_STACK_ERROR",
    715: "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    716: "CUDA_ERROR_MISALIGNED_ADDRESS",
    717: "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    718: "CUDA_ERROR_INVALID_PC",
    719: "CUDA_ERROR_LAUNCH_FAILED",
    999: "CUDA_ERROR_UNKNOWN",
    12345: "unknown",  # of a driver to come
}
OF_CALLS = {201: "CUDA_ERROR_INVALID_CONTEXT", 901: "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"}


def packed(gradient: torch.dtype, wire: torch.dtype, fault: object) -> list[float]:
    """The wire, after a launch that the driver answers with this."""
    sent = torch.zeros(3, dtype=wire, device=HERE)
    given = torch.tensor([2.0, 4.0, 6.0], dtype=gradient, device=HERE)
    fake_cuda.break_kernels("fastddp_pack_", str(fault))
    try:
        _C.Kernels(HERE).pack([given], [sent], 0.5)
    finally:
        fake_cuda.break_kernels("", "none")
    return sent.tolist()


@on_ranks(1, pool="simulated_ranks")
def test_errors_of_launches_go_to_operators_and_all_others_are_raised_by_name(rank: int) -> None:
    fake_cuda.schedule()
    load_kernels([(HERE, gradient, wire) for gradient, wire, _ in OF_LAUNCHES.values()])
    load_kernels([(HERE, FP64, FP64)])
    for code, (gradient, wire, name) in OF_LAUNCHES.items():
        with warnings.catch_warnings(action="ignore"):
            assert packed(gradient, wire, code) == [1, 2, 3], name
        reasons = [reason for *_, reason in _C.kernels_given_up()]
        assert any(f"launching a kernel failed with CUDA error {code} ({name})" in reason for reason in reasons)
    given_up = len(_C.kernels_given_up())
    for code, name in OF_CALLS.items():
        said = rf"launching a kernel failed with CUDA error {code} \({name}\)"
        with pytest.raises(RuntimeError, match=said) as raised:
            packed(FP64, FP64, code)
        assert not isinstance(raised.value, torch.AcceleratorError)
    for code, name in OF_DEVICES.items():
        said = rf"failed with CUDA error {code} \({name}\).*ran earlier on the device.*CUDA_LAUNCH_BLOCKING=1.*FD045"
        with pytest.raises(torch.AcceleratorError, match="launching a kernel " + said) as raised:
            packed(FP64, FP64, code)
        assert raised.value.error_code == code  # type: ignore[attr-defined]
        # A kernel that is loaded then is not at fault either.
        if code == 700:
            with pytest.raises(torch.AcceleratorError, match="loading a kernel " + said):
                load_kernels([(HERE, FP16, FP16)], corruption=True)
        fake_cuda.schedule()
    assert len(_C.kernels_given_up()) == given_up
    assert packed(FP64, FP64, "none") == [1, 2, 3]
    assert fake_cuda.launches() == ["fastddp_pack_fp64_to_fp64"]


@on_ranks(1, pool="simulated_ranks")
def test_the_first_call_of_a_kernel_does_not_take_the_devices_error_for_its_own(rank: int) -> None:
    fake_cuda.schedule()
    trusted, proofs.proof_of = proofs.proof_of, lambda kernel, device: None
    load_kernels([(HERE, FP64, FP64)], corruption=True)
    proofs.proof_of = trusted
    given_up = len(_C.kernels_given_up())
    fake_cuda.break_kernels("fastddp_pack_measuring_fp64", "719")
    gradient, wire = torch.ones(3, dtype=FP64, device=HERE), torch.zeros(3, dtype=FP64, device=HERE)
    with pytest.raises(torch.AcceleratorError, match="CUDA_ERROR_LAUNCH_FAILED"):
        _C.Kernels(HERE).pack_measuring([gradient], [wire], 0.5)
    fake_cuda.break_kernels("", "none")
    fake_cuda.schedule()
    assert len(_C.kernels_given_up()) == given_up


@on_ranks(1, pool="simulated_ranks")
def test_a_device_that_failed_in_backward_is_not_repaired_by_the_next_forward(rank: int) -> None:
    fake_cuda.schedule()
    case = Case()
    model, inputs = case.wrapped(rank, DEVICE), batch(rank, 0).to(DEVICE)
    case.backward(model, inputs)
    fake_cuda.break_kernels("fastddp_pack_fp32_to_fp32", "700")
    for _ in range(2):
        model.zero_grad()
        with pytest.raises(torch.AcceleratorError, match=r"CUDA_ERROR_ILLEGAL_ADDRESS.*Do not use the gradients"):
            case.backward(model, inputs)
        fake_cuda.break_kernels("", "none")
        assert model.reducer.state == "failed"
    fake_cuda.schedule()  # as in a new process
    with pytest.warns(UserWarning, match=r"raised \(fastddp: launching a kernel failed with CUDA error 700"):
        case.backward(model, inputs)
