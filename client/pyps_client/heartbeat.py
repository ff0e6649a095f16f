"""The threads that keep a worker's leases and bring what the servers want of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import grpc

from pyps_client.channel import translate
from pyps_client.connection import Connection
from pyps_client.launch import Launch
from pyps_client.log import logger
from pyps_client.retry import LinkLost
from pyps_wire.errors import PypsError
from pyps_wire.parameter_server_pb2 import HeartbeatReply, HeartbeatRequest

# A server that is silent for this long is named in the log.
SILENCE_SECONDS = 10.0

# How often servers are asked once the worker is about to end.
HURRIED_SECONDS = 1.0


class _Beat:
    """The signs of life to one server, over a connection of their own."""

    def __init__(self, connection: Connection, way: Connection, interval_seconds: float) -> None:
        self.connection = connection
        self.way = way
        self.interval_seconds = interval_seconds


class Heartbeat:
    """Sends heartbeats to servers, to each on a daemon thread of its own.

    So none waits for a server that is slow, nor for a gradient on its way over a slow link: it would come too late to
    keep the lease.
    """

    def __init__(
        self,
        *,
        launch: Launch,
        request: Callable[[], HeartbeatRequest],
        heard: Callable[[Connection, HeartbeatReply, float], None],
        refused: Callable[[PypsError], None] | None = None,
    ) -> None:
        """`request` makes the next message; `refused` gets each refusal, and `heard` each answer.

        With the answer comes when it was asked for (time.monotonic). All are called on those threads.
        """
        self._launch = launch
        self._request = request
        self._heard = heard
        self._refused = refused
        self._hurried = threading.Event()
        self._ended = threading.Event()
        # How long a server may be silent to a worker that ends; None before.
        self._end_seconds: float | None = None
        self._lock = threading.Lock()
        # Guarded by _lock. The ways to those that are kept, by the servers' indices.
        self._ways: dict[int, Connection] = {}

    def keep(self, connection: Connection, interval_seconds: float) -> None:
        """Gives a server signs of life from now on, and `heard` its connection. A second call for it does nothing."""
        with self._lock:
            if self._ended.is_set() or connection.index in self._ways:
                return
            self._ways[connection.index] = way = Connection(connection.index, launch=self._launch)
        beat = _Beat(connection, way, interval_seconds)
        threading.Thread(target=self._keep, args=(beat,), name="pyps-heartbeat", daemon=True).start()

    def hurry(self, seconds: float) -> None:
        """Looks from now on whether servers are there at all, and cuts the calls to those that are silent for so long.

        A call's own deadline leaves room for a slow link, where signs of life pass beside it.
        """
        with self._lock:
            self._end_seconds = seconds
            ways = list(self._ways.values())
        self._hurried.set()
        for way in ways:
            # What is under way may wait longer.
            way.cut()

    def end(self) -> None:
        """Stops the threads; calls under way are given up."""
        with self._lock:
            self._ended.set()
            ways = list(self._ways.values())
        self._hurried.set()
        for way in ways:
            way.close()

    def _keep(self, beat: _Beat) -> None:
        while not self._ended.wait(HURRIED_SECONDS if self._hurried.wait(beat.interval_seconds) else 0):
            try:
                self._send(beat)
            except PypsError as error:
                if self._ended.is_set():
                    return
                # The next push or pull meets it too, on the caller's thread, where it can be acted upon.
                logger.debug("heartbeat: %s", error)
                if self._refused is not None:
                    self._refused(error)

    def _send(self, beat: _Beat) -> None:
        """One heartbeat; a slow answer delays the next by a call's deadline at most."""
        began, channel = time.monotonic(), beat.way.channel
        deadline = self._end_seconds or max(2 * beat.interval_seconds, 5.0)
        try:
            reply = channel.start("Heartbeat", self._request(), HeartbeatReply, timeout_seconds=deadline).result()
        except (ValueError, grpc.FutureCancelledError):
            # Closed by the thread that ends the session, or by `hurry`.
            return
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.CANCELLED:
                return
            verdict = translate(error, beat.connection.address)
            if isinstance(verdict, PypsError):
                raise verdict from None
            if error.code() == grpc.StatusCode.UNAVAILABLE:
                beat.way.renew(channel)
            self._report_silence(beat, verdict, began=began)
            return
        except LinkLost as lost:
            beat.way.renew(channel)
            self._report_silence(beat, lost, began=began)
            return
        beat.connection.outage.heard(beat.connection.name)
        try:
            self._heard(beat.connection, reply, began)
        except LinkLost as lost:
            self._report_silence(beat, lost, began=began)

    def _report_silence(self, beat: _Beat, lost: LinkLost, *, began: float) -> None:
        outage, name = beat.connection.outage, beat.connection.name
        silent = time.monotonic() - outage.note(name, str(lost), at=began)
        if self._ended.is_set():
            return
        outage.tell(name, first_seconds=SILENCE_SECONDS)
        if self._end_seconds is not None and silent >= self._end_seconds:
            beat.connection.cut(str(lost))
