"""Where the time of a step went, on this rank and compared between ranks."""
