"""Whether training goes well: hangs, wrong numbers, slow ranks."""
