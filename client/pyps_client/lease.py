"""A worker's lease on its servers: heartbeats keep it, a lost replica ends it, leaving gives it back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from pyps_client import leave
from pyps_client.launch import Launch
from pyps_client.log import logger
from pyps_client.replica.group import ALONE, Group
from pyps_client.retry import LinkLost
from pyps_client.transport.connection import Connection
from pyps_wire.common_pb2 import Sender
from pyps_wire.errors import NotAllowed, NotAuthenticated, PypsError, ReplicaLost, Superseded
from pyps_wire.parameter_server_pb2 import HeartbeatReply, HeartbeatRequest, HelloReply, LeaveReply, LeaveRequest

# The heartbeats' interval where a server names none.
INTERVAL_SECONDS = 5.0

# A server that is silent for this long is named in the log.
SILENCE_SECONDS = 10.0

# The heartbeats' interval once the worker is about to end.
HURRIED_SECONDS = 1.0

# All servers together: a program's end must not hang on a server that is gone.
LEAVE_SECONDS = 3.0

# How long the thread that trains may stay in a call, once its replica is lost, before the process is ended.
GRACE_SECONDS = 10.0


class Lease:
    """Sends heartbeats to each server from its first answer to a Hello until the worker leaves.

    Each server has a thread and a connection for them: so none waits for a slow server, or behind a gradient on a slow
    link, and comes too late to keep the lease.

    When a server reports that the worker's replica is lost, the worker leaves all servers at once, so that nobody waits
    for the other parts, and the process ends, whatever its main thread waits for.
    """

    def __init__(
        self,
        sender: Sender,
        *,
        launch: Launch,
        peers: Group = ALONE,
        request: Callable[[], HeartbeatRequest],
        on_reply: Callable[[Connection, HeartbeatReply, float], None],
    ) -> None:
        """`request` makes the next heartbeat.

        `on_reply` gets a server's connection, its answer, and when the heartbeat was sent (time.monotonic).
        """
        self._sender = sender
        self._launch = launch
        self._peers = peers
        self._request = request
        self._on_reply = on_reply
        self._lost = LostReplica()
        self.check = self._lost.check
        # A second thread that leaves waits for the first.
        self._leaving = threading.Lock()
        self._left = False
        self._hurried = threading.Event()
        self._ended = threading.Event()
        # How long a server may be silent to a worker that ends; None before.
        self._end_seconds: float | None = None
        self._lock = threading.Lock()
        # Guarded by _lock: for each server's index the worker's connection, and the one for heartbeats.
        self._met: dict[int, tuple[Connection, Connection]] = {}

    def greeted(self, connection: Connection, reply: HelloReply) -> None:
        """Start heartbeats after a server's first answer to a Hello; on any thread."""
        with self._lock:
            if self._ended.is_set() or connection.index in self._met:
                return
            own = Connection(connection.index, launch=self._launch, beside=connection)
            self._met[connection.index] = connection, own
        arguments = (connection, own, reply.heartbeat_seconds or INTERVAL_SECONDS)
        threading.Thread(target=self._keep, args=arguments, name="pyps-heartbeat", daemon=True).start()

    def watch(self) -> None:
        """Let a process of a replica leave at SIGTERM even during a collective call."""
        if self._peers.count > 1:
            leave.watch(self)

    def hurry(self, seconds: float) -> None:
        """Cancel calls to servers that are silent for so long from now on.

        A call's own deadline leaves room for a slow link, on which heartbeats pass in parallel.
        """
        with self._lock:
            self._end_seconds = seconds
            met = list(self._met.values())
        self._hurried.set()
        for _, own in met:
            # A call under way may wait longer.
            own.cancel()

    def disarm(self) -> None:
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
            begun: list[tuple[str, Callable[[], LeaveReply]]] = []
            for connection in self.end():
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
        leave.end_process(f"ended by {error} during a call that did not return", leave.STATUS)

    def end(self) -> list[Connection]:
        """End the heartbeats; return the worker's connections."""
        with self._lock:
            self._ended.set()
            met = list(self._met.values())
        self._hurried.set()
        for _, own in met:
            own.close()
        return [connection for connection, _ in met]

    def _keep(self, connection: Connection, own: Connection, interval_seconds: float) -> None:
        is_shut_out = False
        while not self._ended.wait(HURRIED_SECONDS if self._hurried.wait(interval_seconds) else 0):
            began = time.monotonic()
            # A slow answer delays the next by a call's deadline at most.
            least_seconds = 0.5 if connection.has_standby else 5.0
            seconds = self._end_seconds or max(2 * interval_seconds, least_seconds)
            try:
                channel = own.channel
                try:
                    reply = channel.call("Heartbeat", self._request(), HeartbeatReply, timeout_seconds=seconds)
                except LinkLost as lost:
                    # Else it was closed here: by the thread that ends the worker, or by `hurry`.
                    if own.renew(channel):
                        self._report_silence(connection, str(lost), began)
                    continue
                if connection.moved(own, reply.epoch):
                    own.renew(channel)
                    continue
                connection.outage.note_answer(connection.name)
                is_shut_out = False
                self._on_reply(connection, reply, began)
            except LinkLost as lost:
                self._report_silence(connection, str(lost), began)
            except PypsError as error:
                if self._ended.is_set():
                    return
                if type(error) not in (NotAuthenticated, NotAllowed):
                    # The next push or pull gets it too, on the caller's thread.
                    logger.debug("heartbeat: %s", error)
                elif not is_shut_out:
                    # Pushes and pulls go on by transports that are open already.
                    is_shut_out = True
                    logger.warning(
                        "%s refuses this worker's calls from now on: %s. Training goes on by what is open "
                        "(streams, a lane, shared memory); new connections are refused until that is mended",
                        *(connection.name, error),
                    )
                self._refused(error)

    def _refused(self, error: PypsError) -> None:
        """Act on a heartbeat's refusal: the thread that trains may never get it."""
        if self._peers.name and isinstance(error, ReplicaLost | Superseded) and self._lost.note(error):
            self.leave(*leave.cause_of(error))

    def _report_silence(self, connection: Connection, problem: str, began: float) -> None:
        if self._ended.is_set():
            return
        outage, name = connection.outage, connection.name
        silent = time.monotonic() - outage.note_failure(name, problem, at=began)
        outage.log(name, first_seconds=SILENCE_SECONDS)
        if self._end_seconds is not None and silent >= self._end_seconds:
            connection.cancel(problem)


class LostReplica:
    """The error that a heartbeat got when the replica was lost, until the thread that trains gets it too.

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
        """Note the loss, and end the process after GRACE_SECONDS; return whether this is the first note."""
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
