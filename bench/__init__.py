"""Benchmarks of fastddp, from the root of the repository: `python -m bench.step`, `network`, `kernels`, `training`."""
