"""The Triton kernel that writes a small table to the device: its words are the launch's parameters.

    write: target[i] = words[i] for i < count, in groups of GROUP

Launch signature::

    write_words  (target: int64*, count: int64, words: WORDS of int64)

    grid  = (1, 1, 1)
    block = (32, 1, 1)

A copy from the host would take the device's copy engine, for which a stream stops and starts again: several times as
long as this kernel. csrc/device/device_table.cpp launches it. A launch appends Triton's two scratch pointers, both
null.
"""

import triton
import triton.language as tl

WORDS = 256
"""How many a launch writes: 2 KiB of parameters, of which CUDA takes 4."""

GROUP = 32
"""Words that are written together: target has room for a multiple of them."""

WARPS = 1

_GROUP = tl.constexpr(GROUP)


@triton.jit(repr=lambda _: "fastddp_write_words", do_not_specialize=["target", "count", "words"])
def write_words_kernel(target, count: tl.int64, words):
    """Write the groups that have words.

    Example: for GROUP = 2, count = 3 and the words 7, 8, 9, 0, 0, 0, target is [7, 8, 9, 0].
    """
    for first in tl.static_range(0, len(words), _GROUP):
        if first < count:
            for i in tl.static_range(_GROUP):
                tl.store(target + (first + i), words[first + i])
