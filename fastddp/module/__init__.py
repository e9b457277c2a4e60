"""The wrapped module: its parameters and buffers on all ranks, and the stand-ins for them while it runs."""
