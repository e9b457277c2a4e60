"""Bucket plans from measurements: ``bucket_cap_mb="auto"``, and predictions for other numbers of ranks.

Data flows one way: the first windows and the process group → :mod:`~fastddp.planning.link` and
:mod:`~fastddp.planning.planner` (what was measured) → :mod:`~fastddp.planning.model` (the plan) → ``ddp.py``, or a file
(:mod:`~fastddp.planning.profile`) → :mod:`~fastddp.tools.plan.scaling` → ``fastddp plan``.
"""
