"""Reads what the ranks of this machine are doing from their pages (``fastddp ps``, docs/watch.md)."""
