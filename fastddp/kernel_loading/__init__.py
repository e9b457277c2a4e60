"""Triton kernels for C++: compiled, tried on a device with made-up numbers, and loaded."""
