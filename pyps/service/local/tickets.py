"""What shows that a caller at the socket is the worker whom Hello has answered."""

from __future__ import annotations

import hmac
import secrets

from pyps_wire.errors import NotAllowed

TICKET_BYTES = 16


class Tickets:
    """Makes and recognises tickets; it remembers none of them."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def of(self, worker_id: str, incarnation: int) -> bytes:
        """The ticket of one life of a worker."""
        return hmac.digest(self._key, f"{incarnation} {worker_id}".encode(), "sha256")[:TICKET_BYTES]

    def check(self, ticket: bytes, *, worker_id: str, incarnation: int) -> None:
        """Refuses any other ticket than that of this life."""
        if not hmac.compare_digest(ticket, self.of(worker_id, incarnation)):
            raise NotAllowed(
                f"the ticket is not worker {worker_id!r}'s: attach with the one that its last Hello brought"
            )
