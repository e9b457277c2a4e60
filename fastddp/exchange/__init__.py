"""How gradients travel: what the reducer is told of its exchange, and what that takes of groups, machines and kernels.

:mod:`~fastddp.exchange.descriptions` is where to begin; the exchanges themselves are in C++ (``csrc/pipeline/``).
"""
