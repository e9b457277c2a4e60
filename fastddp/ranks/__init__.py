"""Which ranks there are, in which groups, and what they do together outside of windows."""
