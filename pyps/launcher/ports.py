"""Ports for processes that are to find each other."""

from __future__ import annotations

import errno
import secrets
import socket
from collections.abc import Collection
from pathlib import Path

EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Below are the services that everybody knows the ports of.
LOWEST = 10_000
ATTEMPTS = 100
_FAMILIES = ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::"))


def free_port(*, but: Collection[int] = ()) -> int:
    """A port that nobody listens at and that is none of `but`.

    One below those that the system gives to whoever asks for any: so it is still free when, seconds later, the
    process that it is meant for asks for it. Where there is no room below, any free port.
    """
    first_ephemeral = _first_ephemeral_port()
    for _ in range(ATTEMPTS if first_ephemeral > LOWEST else 0):
        port = LOWEST + secrets.randbelow(first_ephemeral - LOWEST)
        if port not in but and _is_free(port):
            return port
    return _any_free_port(but)


def _first_ephemeral_port() -> int:
    try:
        return int(EPHEMERAL_RANGE.read_text(encoding="utf-8").split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def _is_free(port: int) -> bool:
    """Whether a listener on every address could have it, as that of torch's store is one."""
    for family, address in _FAMILIES:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind((address, port))
        except OSError as error:
            # A machine without IPv6 fails otherwise, and nobody listens there.
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
    return True


def _any_free_port(but: Collection[int]) -> int:
    while True:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("0.0.0.0", 0))
            port: int = probe.getsockname()[1]
        if port not in but:
            return port
