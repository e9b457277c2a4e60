"""The version of fastddp: here alone."""

__version__ = "0.2.0"
