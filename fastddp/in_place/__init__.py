"""A module that is replicated in place: :func:`fastddp.replicate`."""
