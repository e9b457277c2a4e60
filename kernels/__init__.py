"""The Triton kernels of fastddp. Tensors in, tensors out: no process groups, no policy.

Read in this order:

    pack_kernels    gradients to wire and back, the tables word by word, and the launch signatures
    pack_reference  the same in plain torch

    low_rank_kernels       PowerSGD's products, their tables and launch signatures
    orthogonalise_kernels  its bases made orthonormal
    low_rank_reference     the same in plain torch

    block8_kernels    gradients as numbers of 8 bits: encoded, added up, decoded; tables and launch signatures
    block8_numbers    the numbers themselves
    block8_reference  the same in plain torch

    sum_shards_kernels    what ranks sent of a wire of 16 bits, added up
    sum_shards_reference  the same in plain torch

    ahead_of_time   all of them compiled for the launchers in C++, which also make the tables
    compiling_once  by one process of a node

Importing this package imports none of them, so that Triton is loaded only where it is used.
"""
