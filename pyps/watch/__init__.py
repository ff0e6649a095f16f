"""What is known of a run from outside: servers' answers, their history, and what holds the run back."""
