"""The Triton kernels of fastddp. Tensors in, tensors out: no process groups, no policy.

Read in this order:

    layout          where gradients lie in a wire, and how it is cut into chunks
    address_table   where the gradients are right now, uploaded only when that changes
    pack_kernels    the device side, the tables word by word, and the launch signature
    pack            the host side
    pack_reference  the same in plain torch

    low_rank_kernels       PowerSGD's products, their tables and launch signatures
    orthogonalise_kernels  its bases made orthonormal
    low_rank_reference     the same in plain torch

    ahead_of_time   all of the device side compiled for a launcher in C++
    compiling_once  by one process of a node

Importing this package imports none of them, so that Triton is loaded only where it is used.
"""
