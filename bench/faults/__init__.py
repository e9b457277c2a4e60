"""Faults in real runs, and what is said about them: `python -m bench.faults`.

`entries` are the faults, `rank` the script that a rank runs, `forking` starts its processes, `launch` runs one fault
and judges what was said, `network` makes two machines and a cable of this one, `scale` measures a report about many
ranks, `__main__` is the command.
"""
