"""How gradients travel: descriptions of exchanges, made into the ways that the reducer takes.

Begin with :mod:`~fastddp.exchange.descriptions`. The buckets' trips are in C++ (``csrc/trip/``).
"""
