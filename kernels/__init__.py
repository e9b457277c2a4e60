"""The Triton kernels of fastddp. Tensors in, tensors out: no process groups, no policy.

Read in this order:

    pack_kernels    gradients to wire and back, the tables word by word, and the launch signatures
    pack_reference  the same in plain torch

    low_rank_kernels       PowerSGD's products, their tables and launch signatures
    orthogonalise_kernels  makes PowerSGD's bases orthonormal
    low_rank_reference     the same in plain torch

    block8_kernels    gradients as numbers of 8 bits: encoded, added up, decoded; tables and launch signatures
    block8_numbers    the numbers themselves
    block8_reference  the same in plain torch

    sum_shards_kernels    adds up shards of a 16-bit wire from all ranks
    sum_shards_reference  the same in plain torch

    ahead_of_time   compiles all kernels for the launchers in C++, which also make the tables
    compiling_once  lets one process of a node compile for all

Importing this package imports none of these, so Triton is loaded only where it is used.
"""
