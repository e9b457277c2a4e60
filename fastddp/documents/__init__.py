"""JSON files and messages that somebody else may have written, read within bounds as values of known types."""
