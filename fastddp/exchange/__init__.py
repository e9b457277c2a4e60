"""How gradients travel: descriptions of exchanges, of which C++ makes the objects that the reducer takes.

Begin with :mod:`~fastddp.exchange.descriptions`. The exchanges themselves are in C++ (``csrc/pipeline/``).
"""
