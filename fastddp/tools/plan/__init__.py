"""Predicts a step on other numbers of ranks, from what a job has measured (``fastddp plan``)."""
