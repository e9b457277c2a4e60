"""Windows: what is known after one, which rank has what in an unfinished one, and ranks without inputs.

A window is all backward passes between two synchronisations.
"""
