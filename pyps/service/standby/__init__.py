"""A server and its standby: what goes from one to the other, who takes over when, and who gives way."""
