"""Tickets by which a worker that has said Hello is known again where it calls by another way."""

from __future__ import annotations

import hmac
import secrets
import time
from threading import Lock

from pyps_wire.errors import NotAllowed

TICKET_BYTES = 16
TICKET_SECONDS = 30.0
# Of one worker: several of its threads may say Hello at once, and each shows its own.
TICKETS_KEPT = 4


class Tickets:
    """Tickets of one use, for a short time, of one life of a worker. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        # Guarded by _lock. By worker: which life of it, the ticket, and until when it holds; the newest last.
        self._issued: dict[str, list[tuple[int, bytes, float]]] = {}

    def issue(self, worker_id: str, incarnation: int) -> bytes:
        """A new ticket; the worker's oldest goes where it has many."""
        now, ticket = time.monotonic(), secrets.token_bytes(TICKET_BYTES)
        with self._lock:
            self._issued = {name: issued for name, issued in self._issued.items() if issued and issued[-1][2] > now}
            kept = self._issued.get(worker_id, [])[1 - TICKETS_KEPT :]
            self._issued[worker_id] = [*kept, (incarnation, ticket, now + TICKET_SECONDS)]
        return ticket

    def redeem(self, ticket: bytes, worker_id: str, incarnation: int) -> None:
        """Uses a ticket up; NotAllowed for any other than one that this life of the worker was given."""
        with self._lock:
            issued = self._issued.get(worker_id, [])
            for index, (issued_to, known, until) in enumerate(issued):
                if hmac.compare_digest(ticket, known) and issued_to == incarnation and time.monotonic() < until:
                    del issued[index]
                    return
        raise NotAllowed(
            f"the ticket is not of worker {worker_id!r}, was used, or is older than {TICKET_SECONDS:g} s: say Hello, "
            "and show the one that it brings"
        )
