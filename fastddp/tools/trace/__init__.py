"""Where the time of a step goes: from traces of profilers to one report (``fastddp trace``).

Data flows one way: file → :mod:`~fastddp.tools.trace.recording` (the same for each recorder) → report
(:mod:`~fastddp.tools.trace.report`) → table, page, picture, JSON.
"""
