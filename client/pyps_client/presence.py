"""A worker's life as its servers know it: where it said Hello, that it lives, that it leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pyps_client import departure, termination
from pyps_client.connection import Connection
from pyps_client.hard_end import end_process
from pyps_client.heartbeat import Heartbeat
from pyps_client.launch import Launch
from pyps_client.lost_replica import LostReplica
from pyps_client.peers import Peers
from pyps_wire.common_pb2 import Sender
from pyps_wire.errors import PypsError, ReplicaLost, Superseded
from pyps_wire.parameter_server_pb2 import HeartbeatReply, HeartbeatRequest, HelloReply

# The heartbeats' interval where a server asks for none.
INTERVAL_SECONDS = 5.0


class Presence:
    """Gives signs of life to every server from the first Hello that it answered until the worker leaves.

    Where a server tells that the worker's replica is lost, it leaves all servers at once, so that nobody waits for the
    other parts, and the process ends, whatever its main thread waits for.
    """

    def __init__(
        self,
        sender: Sender,
        *,
        launch: Launch,
        peers: Peers,
        request: Callable[[], HeartbeatRequest],
        heard: Callable[[Connection, HeartbeatReply, float], None],
    ) -> None:
        """`request` and `heard` as for Heartbeat; `sender` may still learn the run's name."""
        self._sender = sender
        self._peers = peers
        self._lost = LostReplica()
        self._heartbeat = Heartbeat(launch=launch, request=request, heard=heard, refused=self._refused)
        self._met: dict[int, Connection] = {}
        # Whoever leaves meanwhile waits until that is said.
        self._leaving = threading.Lock()
        self._left = False

    def greeted(self, connection: Connection, reply: HelloReply) -> None:
        """Notes a server's answer to a Hello; on any thread."""
        self._met.setdefault(connection.index, connection)
        self._heartbeat.keep(connection, reply.heartbeat_seconds or INTERVAL_SECONDS)

    def hurry(self, seconds: float) -> None:
        """Cuts from now on the connections to servers that give no sign of life for so long."""
        self._heartbeat.hurry(seconds)

    def watch(self) -> None:
        """Sees to it that a process among others takes leave at SIGTERM even amid a collective call."""
        if self._peers.count > 1:
            termination.watch(self)

    def check(self) -> None:
        """Raises what a server told of the replica's end."""
        self._lost.check()

    def settle(self) -> None:
        """Leaves the process alone: it ends by itself."""
        self._lost.settle()
        termination.unwatch(self)

    def leave(self, cause: str, message: str) -> None:
        """Ends the signs of life and says Leave wherever a Hello was answered, once."""
        with self._leaving:
            if self._left:
                return
            self._left = True
            self._heartbeat.end()
            departure.leave(list(self._met.values()), self._sender, cause, message)

    def terminate(self, error: BaseException) -> None:
        """Leaves and ends the process, whose main thread does not come back."""
        self.leave(*departure.cause_of(error))
        end_process(f"ended by {error} amid a call that did not return", termination.STATUS)

    def _refused(self, error: PypsError) -> None:
        """Acts on a heartbeat's refusal: the thread that trains may not meet it by itself, nor ever come back."""
        if self._peers.name and isinstance(error, ReplicaLost | Superseded) and self._lost.note(error):
            self.leave(*departure.cause_of(error))
