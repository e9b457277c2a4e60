"""The fake libcuda loads real binaries, refuses what a driver refuses, and runs kernels right."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest
import torch
from fastddp.kernels import ahead_of_time, pack_reference
from fastddp.kernels.pack_kernels import CHUNK_WORDS
from torch import Tensor

import fake_cuda
from fastddp import _C
from ranks import RankPool
from test_fake_cuda_device import DEVICE, ORDERS, message_of, stream

PARAMETERS = 6
INVALID_VALUE, INVALID_CONTEXT, NO_BINARY, INVALID_HANDLE, NOT_FOUND = 1, 201, 209, 400, 500


class Driver:
    """The fake libcuda, called as a launcher calls the real one."""

    def __init__(self, device: int = 0) -> None:
        self.library = ctypes.CDLL(str(fake_cuda.LIBRARY))
        assert self.library.cuInit(0) == 0
        self.bind(device)

    def bind(self, device: int) -> None:
        context = ctypes.c_void_p()
        assert self.library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
        assert self.library.cuCtxSetCurrent(context) == 0

    def load(self, kernel: ahead_of_time.CompiledKernel) -> ctypes.c_void_p | int:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        error = self.library.cuModuleLoadData(ctypes.byref(module), kernel.cubin)
        error = error or self.library.cuModuleGetFunction(ctypes.byref(function), module, kernel.name.encode())
        return error or function

    def parameters(self, function: ctypes.c_void_p) -> list[tuple[int, int]]:
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        found = []
        while (
            self.library.cuFuncGetParamInfo(
                function, ctypes.c_size_t(len(found)), ctypes.byref(offset), ctypes.byref(size)
            )
            == 0
        ):
            found.append((offset.value, size.value))
        return found

    def launch(
        self,
        function: ctypes.c_void_p,
        wire: int,
        table: int,
        chunks: int,
        scale: float = 1.0,
        scratch: int = 0,
        programs: int = 1,
        threads: int = 256,
        shared: int = 0,
        stream: int = 0,
    ) -> int:
        pointer = ctypes.c_void_p
        values = [pointer(wire), pointer(table), pointer(chunks), ctypes.c_double(scale), pointer(scratch), pointer(0)]
        addresses = (pointer * PARAMETERS)(*(ctypes.addressof(value) for value in values))
        return self.library.cuLaunchKernel(
            function, programs, 1, 1, threads, 1, 1, shared, pointer(stream), addresses, None
        )


@pytest.fixture(scope="module")
def pack_kernel() -> ahead_of_time.CompiledKernel:
    return ahead_of_time.compile_pack("pack", torch.float32, torch.bfloat16, 90)


def loaded_parameters(rank: int, kernel: ahead_of_time.CompiledKernel) -> list[tuple[int, int]]:
    fake_cuda.set_capability(kernel.capability)
    try:
        driver = Driver()
        function = driver.load(kernel)
        assert isinstance(function, ctypes.c_void_p)
        return driver.parameters(function)
    finally:
        fake_cuda.set_capability(90)


@pytest.mark.parametrize("form", ["pack", "unpack"])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_binaries_take_the_parameters_that_launchers_pass(
    simulated_ranks: RankPool, form: ahead_of_time.Form, capability: int
) -> None:
    kernel = ahead_of_time.compile_pack(form, torch.float32, torch.float32, capability)
    assert simulated_ranks.run(loaded_parameters, 1, kernel) == [
        [(8 * i, 8) for i in range(kernel.parameters + kernel.scratch_parameters)]
    ]


def refusals(rank: int, kernel: ahead_of_time.CompiledKernel, older: ahead_of_time.CompiledKernel) -> dict[str, object]:
    fake_cuda.schedule()
    driver = Driver()
    function = driver.load(kernel)
    memory = torch.zeros(64, dtype=torch.int64, device=DEVICE).data_ptr()

    def launch(**arguments: Any) -> int:
        return driver.launch(function, memory, memory, memory, **arguments)

    codes: dict[str, object] = {
        "too few threads": launch(threads=128),
        "no programs": launch(programs=0),
        "shared memory": launch(shared=50_000),
        "scratch memory": launch(scratch=memory),
        "another device's stream": launch(stream=fake_cuda.stream_handle(stream(1))),
    }
    driver.library.cuFuncSetAttribute(function, 8, 60_000)
    codes["shared memory that was asked for"] = launch(shared=50_000)
    driver.bind(1)
    codes["another device's context"] = launch()
    driver.bind(0)
    codes["an older binary"] = driver.load(older)
    in_thread = []
    thread = threading.Thread(target=lambda: in_thread.append(launch()))
    thread.start()
    thread.join()
    codes["a thread without a context"] = in_thread[0]
    fake_cuda.schedule()
    return codes


def test_the_driver_refuses_what_a_driver_refuses(
    simulated_ranks: RankPool, pack_kernel: ahead_of_time.CompiledKernel
) -> None:
    older = ahead_of_time.compile_pack("pack", torch.float32, torch.bfloat16, 80)
    assert simulated_ranks.run(refusals, 1, pack_kernel, older) == [
        {
            "too few threads": INVALID_VALUE,
            "no programs": INVALID_VALUE,
            "shared memory": INVALID_VALUE,
            "scratch memory": INVALID_VALUE,
            "another device's stream": INVALID_HANDLE,
            "shared memory that was asked for": 0,
            "another device's context": INVALID_HANDLE,
            "an older binary": NO_BINARY,
            "a thread without a context": INVALID_CONTEXT,
        }
    ]


def launched_pack(rank: int, kernel: ahead_of_time.CompiledKernel, order: str) -> tuple[list[str], bool]:
    fake_cuda.schedule(order)
    gradients = [torch.randn(300, 20), None, torch.randn(7, 5).t(), torch.randn(3)]

    def views(wire: Tensor) -> list[Tensor]:
        large, undefined, transposed, small = wire.split([6000, 9, 35, 3])
        return [large.view(300, 20), undefined, transposed.view(5, 7), small]

    expected = torch.empty(6047, dtype=torch.bfloat16)
    pack_reference.pack(gradients, views(expected), 0.5)
    there = [None if gradient is None else gradient.to(DEVICE, non_blocking=True) for gradient in gradients]
    assert there[2] is not None
    assert there[2].stride() == (1, 5)
    shape = [2, 7, 5, 5, 1]  # two dims, the wire's innermost first: 7 elements 5 apart, 5 of these 1 apart
    rows = [there[0].data_ptr(), 0, 0, 0, there[2].data_ptr(), 8, there[3].data_ptr(), 0, *shape]
    wire = torch.empty(6047, dtype=torch.bfloat16, device=DEVICE)
    words, _, _ = _C.pack_tables(there, views(wire), kernel.tile[0], False)
    assert words["addresses"] == rows
    table = torch.tensor(rows).to(DEVICE, non_blocking=True)
    chunks = torch.tensor(words["chunks"]).to(DEVICE, non_blocking=True)
    driver = Driver()
    function = driver.load(kernel)
    programs = len(words["chunks"]) // CHUNK_WORDS
    code = driver.launch(function, wire.data_ptr(), table.data_ptr(), chunks.data_ptr(), 0.5, programs=programs)
    assert code == 0
    del there, table, chunks  # freed in the order of the stream, behind the launch
    return fake_cuda.launches(), torch.equal(wire.cpu(), expected)


@pytest.mark.parametrize("order", ORDERS)
def test_a_launched_kernel_does_what_its_reference_does(
    simulated_ranks: RankPool, pack_kernel: ahead_of_time.CompiledKernel, order: str
) -> None:
    result = simulated_ranks.run(launched_pack, 1, pack_kernel, order)
    assert result == [(["fastddp_pack_fp32_to_bf16"], True)]


def illegal_launches(rank: int, kernel: ahead_of_time.CompiledKernel) -> list[str]:
    fake_cuda.schedule()
    driver = Driver()
    function = driver.load(kernel)
    host = torch.zeros(64, dtype=torch.int64)
    wire = torch.zeros(64, device=DEVICE)
    chunks = torch.tensor([[0, 0, 0, 10]], device=DEVICE)
    messages = []
    for table in (host, host.to(DEVICE), torch.tensor([host.data_ptr(), 0], device=DEVICE)):
        code = driver.launch(function, wire.data_ptr(), table.data_ptr(), chunks.data_ptr())
        messages.append(f"{code} {message_of(torch.accelerator.synchronize)}")
    return messages


def test_illegal_addresses_are_errors_of_the_next_wait(
    simulated_ranks: RankPool, pack_kernel: ahead_of_time.CompiledKernel
) -> None:
    table_on_host, zeros, gradient_on_host = simulated_ranks.run(illegal_launches, 1, pack_kernel)[0]
    assert "illegal memory access" in table_on_host
    assert "the table of addresses" in table_on_host
    assert zeros == "0 "
    assert "illegal memory access: kernel fastddp_pack_fp32_to_bf16 touches 40 bytes" in gradient_on_host
