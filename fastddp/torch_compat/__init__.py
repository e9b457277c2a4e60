"""The rest of torch's class, reducer and logger, and what other parts of torch expect of the wrapper."""
