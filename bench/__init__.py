"""Benchmarks of fastddp, from the root of the repository: `python -m bench.step`, `compiled`, `kernels`, `training`."""
