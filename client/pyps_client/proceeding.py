"""Asking server 0 whether the next step may begin: protocols that give turns, or that bound a lead."""

from __future__ import annotations

import threading

from pyps_client.channel import Channel
from pyps_client.connection import CALL_SECONDS
from pyps_client.parking import Parking
from pyps_client.retry import LinkLost
from pyps_wire.common_pb2 import Sender
from pyps_wire.errors import WaitTimedOut
from pyps_wire.parameter_server_pb2 import ProceedReply, ProceedRequest


class Proceeding:
    """One question, asked again after a loss: the same clock tells the server that it is the same question."""

    def __init__(self, sender: Sender, *, clock: int, parking: Parking) -> None:
        self._sender = sender
        self._clock = clock
        self._parking = parking

    def __call__(self, channel: Channel, stop: threading.Event) -> ProceedReply:
        held = 0
        while True:
            seconds = self._parking.call_seconds
            request = ProceedRequest(sender=self._sender, clock=self._clock, wait_milliseconds=round(seconds * 1000))
            try:
                return channel.call("Proceed", request, ProceedReply, timeout_seconds=seconds + CALL_SECONDS)
            except WaitTimedOut as unanswered:
                self._parking.go_on(unanswered, stop=stop)
                held += 1
            except LinkLost as lost:
                lost.answered = held
                raise
