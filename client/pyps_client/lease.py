"""A worker's lease on its servers: heartbeats keep it, a lost replica ends it, leaving gives it back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from pyps_client import leave
from pyps_client.launch import Launch
from pyps_client.log import logger
from pyps_client.replica.group import Group
from pyps_client.retry import LinkLost
from pyps_client.transport.connection import Connection
from pyps_wire.common_pb2 import Sender
from pyps_wire.errors import NotAllowed, NotAuthenticated, PypsError, ReplicaLost, Superseded
from pyps_wire.parameter_server_pb2 import HeartbeatReply, HeartbeatRequest, HelloReply, LeaveReply, LeaveRequest

# The heartbeats' interval where a server asks for none.
INTERVAL_SECONDS = 5.0

# A server that is silent for this long is named in the log.
SILENCE_SECONDS = 10.0

# How often heartbeats are sent once the worker is about to end.
HURRIED_SECONDS = 1.0

# All servers together: a program's end must not hang on a server that is gone.
LEAVE_SECONDS = 3.0

# For so long the thread that trains may stay away, once its replica is lost, before the process is ended.
GRACE_SECONDS = 10.0

# Gets a server's connection, its answer, and when the heartbeat was sent (time.monotonic).
Heard = Callable[[Connection, HeartbeatReply, float], None]


class Lease:
    """Sends heartbeats to each server from its first answer to a Hello until the worker leaves.

    When a server reports that the worker's replica is lost, it leaves all servers at once, so that nobody waits for the
    other parts, and the process ends, whatever its main thread waits for.
    """

    def __init__(
        self, sender: Sender, *, launch: Launch, peers: Group, request: Callable[[], HeartbeatRequest], heard: Heard
    ) -> None:
        self._sender = sender
        self._peers = peers
        self._lost = LostReplica()
        self._heartbeat = Heartbeat(launch=launch, request=request, heard=heard, refused=self._refused)
        self._met: dict[int, Connection] = {}
        # A second thread that leaves waits for the first.
        self._leaving = threading.Lock()
        self._left = False
        self.hurry = self._heartbeat.hurry
        self.check = self._lost.check

    def greeted(self, connection: Connection, reply: HelloReply) -> None:
        """Start heartbeats after a server's answer to a Hello; on any thread."""
        self._met.setdefault(connection.index, connection)
        self._heartbeat.keep(connection, reply.heartbeat_seconds or INTERVAL_SECONDS)

    def watch(self) -> None:
        """Let a process of a replica leave at SIGTERM even amid a collective call."""
        if self._peers.count > 1:
            leave.watch(self)

    def settle(self) -> None:
        """Do not end the process any more: it ends by itself."""
        self._lost.known.set()
        leave.watched.discard(self)

    def leave(self, cause: str, message: str) -> None:
        """End the heartbeats and say Leave to the servers, once; no retries, since leases run out."""
        request = LeaveRequest(sender=self._sender, cause=f"CAUSE_{cause.upper()}", message=message)
        with self._leaving:
            if self._left:
                return
            self._left = True
            self._heartbeat.end()
            begun: list[tuple[str, Callable[[], LeaveReply]]] = []
            for connection in list(self._met.values()):
                try:
                    if connection.channel.is_outdated:
                        connection.renew(connection.channel)
                    call = connection.channel.start("Leave", request, LeaveReply, timeout_seconds=LEAVE_SECONDS)
                    begun.append((connection.name, call))
                except (PypsError, LinkLost) as error:
                    # Closed, by another thread.
                    logger.debug("leaving %s: %s", connection.name, error)
            for name, answer in begun:
                try:
                    answer()
                except (NotAuthenticated, NotAllowed) as error:
                    logger.warning("%s does not take this worker's leave, and waits for its lease: %s", name, error)
                except (PypsError, LinkLost) as error:
                    logger.debug("leaving %s: %s", name, error)

    def terminate(self, error: BaseException) -> None:
        """Leave, and end the process, whose main thread does not come back."""
        self.leave(*leave.cause_of(error))
        leave.end_process(f"ended by {error} amid a call that did not return", leave.STATUS)

    def _refused(self, error: PypsError) -> None:
        """Act on a heartbeat's refusal: the thread that trains may never meet it."""
        if self._peers.name and isinstance(error, ReplicaLost | Superseded) and self._lost.note(error):
            self.leave(*leave.cause_of(error))


class Heartbeat:
    """Sends heartbeats, to each server on a daemon thread and a connection of its own.

    So none waits for a slow server, nor for a gradient on a slow link, and comes too late to keep the lease.
    """

    def __init__(
        self,
        *,
        launch: Launch,
        request: Callable[[], HeartbeatRequest],
        heard: Heard,
        refused: Callable[[PypsError], None] = lambda error: None,
    ) -> None:
        """`request` makes the next message, `heard` gets each answer and `refused` each refusal, on those threads."""
        self._launch = launch
        self._request = request
        self._heard = heard
        self._refused = refused
        self._hurried = threading.Event()
        self._ended = threading.Event()
        # How long a server may be silent to a worker that ends; None before.
        self._end_seconds: float | None = None
        self._lock = threading.Lock()
        # Guarded by _lock. The connections for heartbeats, by the servers' indices.
        self._ways: dict[int, Connection] = {}

    def keep(self, connection: Connection, interval_seconds: float) -> None:
        """Start heartbeats to a server; `heard` gets this connection. A second call for it does nothing."""
        with self._lock:
            if self._ended.is_set() or connection.index in self._ways:
                return
            self._ways[connection.index] = way = Connection(connection.index, launch=self._launch)
        beat = (connection, way, interval_seconds)
        threading.Thread(target=self._keep, args=beat, name="pyps-heartbeat", daemon=True).start()

    def hurry(self, seconds: float) -> None:
        """Cancel calls to servers that are silent for so long from now on.

        A call's own deadline leaves room for a slow link, on which heartbeats pass in parallel.
        """
        with self._lock:
            self._end_seconds = seconds
            ways = list(self._ways.values())
        self._hurried.set()
        for way in ways:
            # A call under way may wait longer.
            way.cut()

    def end(self) -> None:
        with self._lock:
            self._ended.set()
            ways = list(self._ways.values())
        self._hurried.set()
        for way in ways:
            way.close()

    def _keep(self, connection: Connection, way: Connection, interval_seconds: float) -> None:
        is_shut_out = False
        while not self._ended.wait(HURRIED_SECONDS if self._hurried.wait(interval_seconds) else 0):
            began = time.monotonic()
            # A slow answer delays the next by a call's deadline at most.
            seconds = self._end_seconds or max(2 * interval_seconds, 5.0)
            try:
                channel = way.channel
                try:
                    reply = channel.call("Heartbeat", self._request(), HeartbeatReply, timeout_seconds=seconds)
                except LinkLost as lost:
                    # Else it was closed here: by the thread that ends the worker, or by `hurry`.
                    if way.renew(channel):
                        self._report_silence(connection, str(lost), began)
                    continue
                connection.outage.heard(connection.name)
                is_shut_out = False
                self._heard(connection, reply, began)
            except LinkLost as lost:
                self._report_silence(connection, str(lost), began)
            except PypsError as error:
                if self._ended.is_set():
                    return
                if type(error) in (NotAuthenticated, NotAllowed):
                    # Pushes and pulls go on by transports that are open already.
                    if not is_shut_out:
                        is_shut_out = True
                        logger.warning(
                            "%s refuses this worker's calls from now on: %s. Training goes on by what is open "
                            "(streams, a lane, shared memory); new connections are refused until that is mended",
                            *(connection.name, error),
                        )
                else:
                    # The next push or pull meets it too, on the caller's thread, where it can be acted upon.
                    logger.debug("heartbeat: %s", error)
                self._refused(error)

    def _report_silence(self, connection: Connection, problem: str, began: float) -> None:
        if self._ended.is_set():
            return
        outage, name = connection.outage, connection.name
        silent = time.monotonic() - outage.note(name, problem, at=began)
        outage.tell(name, first_seconds=SILENCE_SECONDS)
        if self._end_seconds is not None and silent >= self._end_seconds:
            connection.cut(problem)


class LostReplica:
    """The replica's end, as a heartbeat learned it, until the thread that trains learns it too.

    That thread, which makes this, may wait for a lost process: torch's collective calls then end late or never.
    """

    def __init__(self) -> None:
        # Set where the process ends by itself.
        self.known = threading.Event()
        self._owner = threading.get_ident()
        self._lock = threading.Lock()
        # Guarded by _lock.
        self._error: PypsError | None = None

    def note(self, error: PypsError) -> bool:
        """Note the end; return whether this is the first note."""
        with self._lock:
            if self._error is not None:
                return False
            self._error = error
        threading.Thread(target=self._end_process, args=(error,), name="pyps-lost-replica", daemon=True).start()
        return True

    def check(self) -> None:
        error = self._error
        if error is None:
            return
        if threading.get_ident() == self._owner:
            self.known.set()
        raise type(error)(str(error))

    def _end_process(self, error: PypsError) -> None:
        if not self.known.wait(GRACE_SECONDS):
            leave.end_process(str(error), 1)
