"""How gradients travel: descriptions of exchanges for the reducer, and the groups, machines and kernels they need.

Begin with :mod:`~fastddp.exchange.descriptions`. The exchanges themselves are in C++ (``csrc/pipeline/``).
"""
