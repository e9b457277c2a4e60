"""Which gradients to compress, and how, by what was measured: :func:`fastddp.comm_hooks.auto_hook`."""
