"""The Triton kernel that writes a small table to the device: its words are the launch's parameters.

    write: target[i] = words[i]

Launch signature::

    write_words  (target: int64*, words: WORDS of int64)

    grid  = (1, 1, 1)
    block = (32, 1, 1)

A copy from the host would take the device's copy engine, for which a stream stops and starts again: several times as
long as this kernel. csrc/device/device_table.cpp launches it. A launch appends Triton's two scratch pointers, both null.
"""

import triton
import triton.language as tl

WORDS = 256
"""How many a launch writes: 2 KiB of parameters, of which CUDA takes 4."""

WARPS = 1


@triton.jit(repr=lambda _: "fastddp_write_words", do_not_specialize=["target", "words"])
def write_words_kernel(target, words):
    """Write all words.

    Example: for WORDS = 3 and the words 7, 8, 9, target is [7, 8, 9].
    """
    for i in tl.static_range(len(words)):
        tl.store(target + i, words[i])
