"""Decides by measurement which gradients to compress, and how: :func:`fastddp.comm_hooks.auto_hook`."""
