"""Benchmarks for one GPU, from the root of the repository.

`python -m bench.gpu.first_run` runs everything, in order of worth; `python -m bench.gpu SECTION` measures one section.
"""
