"""The shortest way to a server: workers on its machine share their memory with it, and call over a Unix socket."""

from pyps.service.local.local_server import LocalServer

__all__ = ["LocalServer"]
