"""Compiles a kernel of each kind for three architectures with the Triton that is found first; prints what they use.

A process of its own, so that a test can try another release of Triton than the one that it has imported.
"""

import json
from collections.abc import Iterator

import torch
import triton
from fastddp.kernels import ahead_of_time as ahead
from fastddp.kernels import block8_kernels
from fastddp.kernels.ahead_of_time import CompiledKernel


def kernels(capability: int) -> Iterator[CompiledKernel]:
    for form in ("pack", "unpack", "pack_measuring"):
        yield ahead.compile_pack(form, torch.float32, torch.bfloat16, capability)  # type: ignore[arg-type]
    yield ahead.compile_measure(torch.float32, capability)
    yield ahead.compile_measure_gradients(torch.bfloat16, capability)
    for number in block8_kernels.NUMBERS:
        yield from ahead.compile_block8(torch.bfloat16, number, 256, number == "e4m3", capability)
    yield from ahead.compile_low_rank(torch.float32, 4, capability)
    yield from ahead.compile_low_rank(torch.bfloat16, 8, capability)
    yield ahead.compile_sum_shards(torch.bfloat16, capability)
    yield ahead.compile_write_words(capability)


def main() -> None:
    used = [(k.name, k.capability, ahead.resources(k).stack_bytes) for c in (80, 90, 100) for k in kernels(c)]
    print(json.dumps({"triton": triton.__version__, "kernels": used}))


if __name__ == "__main__":
    main()
