"""`pyps top`: a run as it goes on, in a terminal or a browser."""
