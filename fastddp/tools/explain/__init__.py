"""``fastddp explain``: what an error's code means."""
