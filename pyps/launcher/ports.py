"""Free ports for processes that find each other."""

from __future__ import annotations

import errno
import secrets
import socket
from collections.abc import Collection
from pathlib import Path

EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Well-known services are below.
LOWEST = 10_000
ATTEMPTS = 100


def free_port(*, but: Collection[int] = ()) -> int:
    """Return a port without a listener that is none of `but`.

    It is below the range that the system gives away, where there is room, so it stays free until it is used.
    """
    try:
        end = int(EPHEMERAL_RANGE.read_text(encoding="utf-8").split()[0])
    except (OSError, ValueError, IndexError):
        end = 0
    for _ in range(ATTEMPTS if end > LOWEST else 0):
        port = LOWEST + secrets.randbelow(end - LOWEST)
        if port not in but and _is_free(port):
            return port
    while True:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("0.0.0.0", 0))
            any_port: int = probe.getsockname()[1]
        if any_port not in but:
            return any_port


def _is_free(port: int) -> bool:
    """Return whether a listener on every address, as torch's store, could bind it."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind((address, port))
        except OSError as error:
            # A machine without IPv6 fails otherwise.
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
    return True
