"""Benchmarks of fastddp: `python -m bench.step` and `python -m bench.kernels`, from the root of the repository."""
