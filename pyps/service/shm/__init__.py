"""Shared memory: workers on the server's machine share their memory with it, and call over a Unix socket."""
