"""The wrapped module: its parameters and buffers on all ranks, and what stands in for them while it runs."""
