"""Optimizers that are sharded over the ranks of a model: note [Shards], ``csrc/bucket/sharding.h``."""
