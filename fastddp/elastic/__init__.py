"""Replicas that come and go, by torchft: the one place that knows it (``pip install fastddp[elastic]``)."""

from fastddp.elastic.wrapper import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
