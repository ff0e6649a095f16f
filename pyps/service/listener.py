"""Listening sockets whose callers show a ticket of Hello: lanes and shared memory."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping

from pyps import logs
from pyps.service.transport import Host, Transport
from pyps_wire.common_pb2 import Sender
from pyps_wire.errors import NotAllowed, ServerUnavailable

AUTO, OFF = "auto", "off"
TICKET_BYTES = 16
TICKET_SECONDS = 30.0
# Of each worker: several of its threads may say Hello at the same time, and each shows its own ticket.
TICKETS_KEPT = 4
# How often connections are checked, to close those whose worker is gone or holds the server up.
CHECK_SECONDS = 1.0
# Where more workers are noted as users of a transport, those that the run no longer lists are dropped.
USED_KEPT = 256

log = logs.get("pyps.service")


class Tickets:
    """Tickets of one use, for a short time, of one life of a worker. For the event loop."""

    def __init__(self) -> None:
        # By worker: its incarnation, the ticket, and the ticket's last moment; the newest last.
        self._issued: dict[str, list[tuple[int, bytes, float]]] = {}

    def issue(self, worker_id: str, incarnation: int) -> bytes:
        """Return a new ticket. If a worker has too many, its oldest ends."""
        now, ticket = time.monotonic(), secrets.token_bytes(TICKET_BYTES)
        self._issued = {name: issued for name, issued in self._issued.items() if issued and issued[-1][2] > now}
        kept = self._issued.get(worker_id, [])[1 - TICKETS_KEPT :]
        self._issued[worker_id] = [*kept, (incarnation, ticket, now + TICKET_SECONDS)]
        return ticket

    def redeem(self, ticket: bytes, worker_id: str, incarnation: int) -> None:
        """Use a ticket up; NotAllowed unless it was issued to this life of the worker."""
        issued = self._issued.get(worker_id, [])
        for index, (issued_to, known, until) in enumerate(issued):
            if hmac.compare_digest(ticket, known) and issued_to == incarnation and time.monotonic() < until:
                del issued[index]
                return
        raise NotAllowed(
            f"the ticket is not of worker {worker_id!r}, was used, or is older than {TICKET_SECONDS:g} s: say Hello, "
            "and show the one that it brings"
        )


class Caller(ABC):
    """A connection at a listening socket."""

    # The caller's address, if it is known.
    peer = ""

    @property
    @abstractmethod
    def worker(self) -> tuple[str, int] | None:
        """Return the worker and its incarnation; None until it has shown its ticket."""

    @abstractmethod
    def is_overdue(self, now: float) -> bool:
        """Return whether the caller has held the server up for too long, by `time.monotonic`."""

    @property
    def is_gone(self) -> bool:
        """Return whether the caller has hung up, though the connection is not closed."""
        return False

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Return whether no request is under way."""

    @abstractmethod
    def shut(self) -> None:
        """End the connection at once."""

    @abstractmethod
    async def finish(self, seconds: float) -> None:
        """Take no more requests, and wait at most `seconds` for the answers to those under way."""


class Listener(Transport):
    """A transport with a listening socket of its own."""

    # The socket's name in logs.
    place: str
    # How many callers without a ticket may be connected; one more ends the oldest of them.
    unauthenticated_max: int

    def __init__(self, host: Host):
        super().__init__(host)
        self._tickets = Tickets()
        self._socket: socket.socket | None = None
        # The earliest first.
        self._callers: dict[Caller, None] = {}
        # Workers whose last transport this was, with the incarnation that used it. Read from any thread.
        self._used: dict[str, int] = {}
        # Logged once a check.
        self._warnings = logs.Crowd(log)
        self._checking: asyncio.Task[None] | None = None

    @abstractmethod
    def _connect(self, end: socket.socket) -> Caller:
        """Begin a connection. NotAllowed or RuntimeError if that cannot be."""

    def used_by(self, worker_id: str, incarnation: int) -> bool:
        return self._used.get(worker_id) == incarnation

    async def start(self, services: Mapping[str, object], address: str) -> None:
        if self._socket is not None:
            self._listen()
            self._checking = asyncio.create_task(self._keep_checking())

    async def stop(self, seconds: float) -> None:
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        if self._checking is not None:
            self._checking.cancel()
        callers = list(self._callers)
        await asyncio.gather(*(caller.finish(seconds) for caller in callers))
        for caller in callers:
            caller.shut()

    def _connected(self, worker_id: str) -> list[Caller]:
        return [caller for caller in self._callers if caller.worker is not None and caller.worker[0] == worker_id]

    def _note_hello(self, worker_id: str) -> None:
        """Note that a worker without a connection uses another transport now, unless it connects again."""
        if not self._connected(worker_id):
            self._used.pop(worker_id, None)
        if len(self._used) > USED_KEPT:
            listed = {member.worker_id for member in self._host.run.membership.all()}
            self._used = {name: incarnation for name, incarnation in self._used.items() if name in listed}

    def _require_admitted(self, caller: Caller, sender: Sender, ticket: bytes) -> None:
        """Refuse a caller that does not show its own secret, run and ticket."""
        if caller not in self._callers:
            raise ServerUnavailable("the caller was cut off before it showed its ticket")
        try:
            self._host.run.membership.require_own(sender.worker_id, sender.incarnation, sender.secret)
            self._host.run.require_named(sender.run_id)
            self._tickets.redeem(ticket, sender.worker_id, sender.incarnation)
        except NotAllowed as error:
            event = f"callers at {self.place} showed what is not theirs, or was used"
            self._warnings.note(event, newest=caller.peer, reason=error)
            raise

    def _take_over(self, sender: Sender) -> None:
        """End a worker's earlier connection, which is lost though the system has not said so yet."""
        for earlier in self._connected(sender.worker_id):
            earlier.shut()
        self._used[sender.worker_id] = sender.incarnation

    def _on_caller(self) -> None:
        assert self._socket is not None
        try:
            end, _ = self._socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            # No descriptors are left, most likely: none is accepted until the next check.
            log.warning(f"a caller at {self.place} could not be accepted", reason=error.strerror)
            asyncio.get_running_loop().remove_reader(self._socket)
            return
        try:
            caller = self._connect(end)
        except (RuntimeError, NotAllowed) as error:
            log.warning(f"a caller at {self.place} could not be accepted", reason=str(error))
            end.close()
            return
        unauthenticated = [earlier for earlier in self._callers if earlier.worker is None]
        if len(unauthenticated) >= self.unauthenticated_max:
            self._cut(unauthenticated[0])
        self._callers[caller] = None

    def _cut(self, caller: Caller) -> None:
        """End the connection of a caller that holds the server up."""
        if caller.worker is None:
            event = f"callers at {self.place} that showed no ticket were cut off"
            self._warnings.note(event, newest=caller.peer)
            self._callers.pop(caller, None)
        else:
            event = f"workers at {self.place} sent or took too little for too long and were cut off"
            self._warnings.note(event, newest=caller.worker[0])
        caller.shut()

    def _forget(self, caller: Caller) -> None:
        self._callers.pop(caller, None)

    async def _keep_checking(self) -> None:
        """Close the connections of callers that are silent for too long, or gone."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            now = time.monotonic()
            for caller in list(self._callers):
                if caller.is_overdue(now):
                    self._cut(caller)
                elif caller.is_gone or (caller.idle and self._is_forgotten(caller)):
                    caller.shut()
            self._warnings.tell()
            self._listen()

    def _is_forgotten(self, caller: Caller) -> bool:
        if caller.worker is None:
            return False
        worker_id, incarnation = caller.worker
        member = self._host.run.membership.get(worker_id)
        return member is None or not member.alive or member.incarnation != incarnation

    def _listen(self) -> None:
        assert self._socket is not None
        asyncio.get_running_loop().add_reader(self._socket, self._on_caller)


def peer_of(end: socket.socket) -> str:
    """Return the address of a caller at a port; empty if it has gone again."""
    try:
        return str(end.getpeername()[0])
    except OSError:
        return ""
