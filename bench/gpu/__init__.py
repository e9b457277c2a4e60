"""Benchmarks for one GPU: `python -m bench.gpu --help`, from the root of the repository.

Sections, each in a process of its own: `ceilings` of the device, `kernels` (pack and unpack), `step` (training steps
with the process group of one GPU), `wire` (the same steps with a process group that only pretends to have other ranks).
"""
