"""The shortest way to a server: workers on its machine share their memory with it, and call over a Unix socket."""
