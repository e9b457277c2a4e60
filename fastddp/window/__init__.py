"""Windows from beginning to end: what is known when one is over, who has what when one is not, ranks without inputs.

A window is all backward passes since the last synchronisation.
"""
