"""The Triton kernels of fastddp. Tensors in, tensors out: no process groups, no policy.

Each kernel has a host side (:mod:`.pack`), a device side (:mod:`.pack_kernels`) and a reference in plain torch
(:mod:`.pack_reference`). :mod:`.ahead_of_time` compiles the device side for a launcher in C++.
"""

from .address_table import AddressTable
from .layout import BucketLayout
from .pack import pack, unpack

__all__ = ["AddressTable", "BucketLayout", "pack", "unpack"]
