"""What the ranks of this machine are doing, read from their pages (``fastddp ps``, docs/watch.md)."""
