"""Files and messages in JSON that somebody else may have written: read within bounds, as values of known types."""
