"""Sending a run's first parameters: by the elected worker, each process of its replica those of its parts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Protocol

from pyps_client.channel import Channel
from pyps_client.connection import ADVICE, CALL_SECONDS, Connection
from pyps_client.initialization import Initialization, Lease
from pyps_client.log import logger
from pyps_client.peers import Peers, agreed, led
from pyps_client.retry import LinkLost, RetryPolicy
from pyps_wire.errors import LimitExceeded, PypsError, RunMismatch, ServerUnavailable, Superseded
from pyps_wire.parameter_server_pb2 import HelloReply


class Greets(Protocol):
    """What says Hello; pyps_client.handshake.Handshake does."""

    def hello(self, connection: Connection, channel: Channel, timeout_seconds: float) -> HelloReply: ...

    def hello_patiently(
        self, connection: Connection, stop: threading.Event, *, asks_only: bool = False
    ) -> HelloReply: ...


class Founding:
    """One elected replica's turn. Its leader keeps the election's lease meanwhile."""

    def __init__(self, handshake: Greets, *, peers: Peers, start: RetryPolicy, stop: threading.Event) -> None:
        self._handshake = handshake
        self._peers = peers
        self._start = start
        self._stop = stop

    def run(self, turn: Initialization, connections: Sequence[Connection], *, term: int, lease_seconds: float) -> str:
        """Sends all servers their shards, server 0 last, once all processes have sent the others theirs.

        Returns what went wrong where trying again may help.
        """
        first, *others = connections
        lease = Lease(term, lease_seconds, lambda: self._handshake.hello(first, first.channel, CALL_SECONDS))
        with lease if self._peers.index == 0 else contextlib.nullcontext():
            agreed(self._peers, lambda: self._compare_limits(others))
            try:
                agreed(self._peers, lambda: self._send_others(turn, others, lease))
                agreed(self._peers, lambda: self._send_first(turn, first, lease))
            except (Superseded, RunMismatch):
                problem = led(self._peers, lambda: _loss(lease))
                if not problem:
                    raise
                return problem
        return ""

    def _compare_limits(self, connections: Sequence[Connection]) -> None:
        """Asks servers for their limits before anything is sent to any: LimitExceeded, as `hello`."""
        for connection in connections:
            try:
                # Not as a member: what one that did not finish has left is replaced only where no worker is.
                self._handshake.hello_patiently(connection, self._stop, asks_only=True)
            except (LimitExceeded, ServerUnavailable):
                raise
            except PypsError as error:
                # Initialize has the verdict.
                logger.debug("before the first parameters: %s", error)

    def _send_others(self, turn: Initialization, others: Sequence[Connection], lease: Lease) -> None:
        for connection in reversed(others):
            self._send(turn, connection, lease)

    def _send_first(self, turn: Initialization, first: Connection, lease: Lease) -> None:
        # The run's name is to come to server 0 even where that holds nothing.
        if self._peers.index == 0 or turn.has_shards_for(first):
            self._send(turn, first, lease)

    def _send(self, turn: Initialization, connection: Connection, lease: Lease) -> None:
        """Sends a server its first parameters, waiting for it where it is not there yet."""
        wait = self._start.begin(connection.name, stop=self._stop, advice=ADVICE)
        while True:
            lease.check()
            channel = connection.channel
            try:
                turn.send_to(connection, channel)
            except LinkLost as lost:
                connection.renew(channel)
                wait.pause(str(lost))
            else:
                wait.end()
                return


def _loss(lease: Lease) -> str:
    """Why the turn is over; empty where it is not."""
    try:
        return "" if lease.held() else "another worker was elected to initialise the run meanwhile"
    except LinkLost as lost:
        return str(lost)
