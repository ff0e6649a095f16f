"""The thread that keeps a worker's leases and brings what the servers want of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from pyps_client.channel import Channel, translate
from pyps_client.connection import Connection
from pyps_client.launch import Launch
from pyps_client.log import logger
from pyps_client.retry import LinkLost
from pyps_wire.errors import PypsError
from pyps_wire.parameter_server_pb2 import HeartbeatReply, HeartbeatRequest

# A server that is silent for this long is named in the log, and again at this interval.
SILENCE_SECONDS = 10.0


class Heartbeat:
    """Sends a heartbeat to all servers at an interval, on a daemon thread and over connections of its own.

    Behind a gradient on its way over a slow link a heartbeat would come too late to keep the lease.
    """

    def __init__(
        self,
        connections: Sequence[Connection],
        interval_seconds: float,
        *,
        launch: Launch,
        request: Callable[[], HeartbeatRequest],
        heard: Callable[[Connection, HeartbeatReply], None],
        refused: Callable[[PypsError], None] | None = None,
    ) -> None:
        """`request` makes the next message; `heard` gets each answer and `refused` each refusal, on this thread.

        `connections` tell which servers, and are handed to `heard`.
        """
        self._connections = connections
        self._ways = [Connection(connection.index, launch=launch) for connection in connections]
        self._interval_seconds = interval_seconds
        self._request = request
        self._heard = heard
        self._refused = refused
        self._ended = threading.Event()
        self._reported_at = dict.fromkeys((connection.index for connection in connections), time.monotonic())
        self._thread = threading.Thread(target=self._beat_until_ended, name="pyps-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Stops the thread; a call under way is given up."""
        self._ended.set()
        for way in self._ways:
            way.close()

    def _beat_until_ended(self) -> None:
        while not self._ended.wait(self._interval_seconds):
            try:
                self._beat()
            except PypsError as error:
                # The next push or pull meets it too, on the caller's thread, where it can be acted upon.
                logger.debug("heartbeat: %s", error)
                if self._refused is not None:
                    self._refused(error)

    def _beat(self) -> None:
        """One heartbeat to all servers at once; a slow one delays the next by a call's deadline at most."""
        request = self._request()
        began = time.monotonic()
        timeout_seconds = max(2 * self._interval_seconds, 5.0)
        calls = []
        for connection, way in zip(self._connections, self._ways, strict=True):
            channel = way.channel
            try:
                future = channel.start("Heartbeat", request, HeartbeatReply, timeout_seconds=timeout_seconds)
            except ValueError:
                # Closed by the thread that ends the session.
                return
            calls.append((connection, way, channel, future))
        for connection, way, channel, future in calls:
            if self._ended.is_set():
                return
            self._collect(connection, way, channel, future, began=began)

    def _collect(self, connection: Connection, way: Connection, channel: Channel, future: Any, *, began: float) -> None:
        try:
            reply = future.result()
        except grpc.FutureCancelledError:
            return
        except grpc.RpcError as error:
            verdict = translate(error, connection.address)
            if isinstance(verdict, PypsError):
                raise verdict from None
            if error.code() == grpc.StatusCode.UNAVAILABLE:
                way.renew(channel)
            self._report_silence(connection, verdict, began=began)
            return
        connection.silence.end()
        try:
            self._heard(connection, reply)
        except LinkLost as lost:
            self._report_silence(connection, lost, began=began)

    def _report_silence(self, connection: Connection, lost: LinkLost, *, began: float) -> None:
        now = time.monotonic()
        silent = now - connection.silence.begin(began)
        if not self._ended.is_set() and silent >= SILENCE_SECONDS <= now - self._reported_at[connection.index]:
            self._reported_at[connection.index] = now
            logger.warning("%s has not answered for %.0f s (%s)", connection.name, silent, lost)
