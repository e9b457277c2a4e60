"""What else torch's class, its reducer and its logger have, and what the wrapper owes to other parts of torch."""
