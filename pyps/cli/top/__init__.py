"""`pyps top`: a live view of a run in the terminal."""
