"""Whether memory can be shared with a server: looked at before a worker that insists on it joins anything."""

from __future__ import annotations

import os
import socket
import struct

from pyps_client.segment import HEAD_BYTES, Segment
from pyps_wire.errors import ServerUnavailable
from pyps_wire.parameter_server_pb2 import HelloReply, LocalTransport

PROBE_SECONDS = 10.0
NO_OFFER = "it offers no shared memory"
# Linux's struct ucred: process, user, group.
_PEER = struct.Struct("3i")


def cannot_share(server: str, reason: str) -> ServerUnavailable:
    """The error for a worker that insists on shared memory which a server does not share."""
    return ServerUnavailable(
        f"transport is 'shm', but no memory can be shared with {server}: {reason}. Run worker and "
        "server on one machine, as one user, with the server's --local-socket where both see it; or set "
        "transport (PYPS_TRANSPORT) to 'auto'."
    )


def check_shareable(server: str, reply: HelloReply) -> None:
    """Raises ServerUnavailable where no memory can be shared with the server that gave this reply."""
    reason = _hindrance(reply.local) if reply.HasField("local") else NO_OFFER
    if reason:
        raise cannot_share(server, reason)


def _hindrance(offer: LocalTransport) -> str:
    """Why the offer cannot be taken; empty where nothing speaks against it."""
    try:
        Segment(HEAD_BYTES)
    except OSError as error:
        return f"memory to share cannot be had ({error})"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_SECONDS)
        try:
            probe.connect("\0" + offer.address[1:] if offer.address.startswith("@") else offer.address)
            _, user, _ = _PEER.unpack(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        except OSError as error:
            return error.strerror or str(error)
    # The rule of servers.
    if os.geteuid() not in (0, user):
        return f"it runs as user {user}, this worker as user {os.geteuid()}"
    return ""
