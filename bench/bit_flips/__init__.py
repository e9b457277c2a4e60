"""Flipped bits in real runs, and which of them are noticed: `python -m bench.bit_flips`.

`flips` are the bits and where they lie, `training` the run of a rank in which one flips, `flipping` the process group
that flips those that travel, `judging` what was said about it, `__main__` is the command.
"""
