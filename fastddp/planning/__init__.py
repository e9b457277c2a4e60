"""Bucket plans: the given, the delayed, and from measurements (``bucket_cap_mb="auto"``).

:mod:`~fastddp.planning.link` and :mod:`~fastddp.planning.planner` measure, and
:mod:`~fastddp.planning.model` finds the plan.
"""
