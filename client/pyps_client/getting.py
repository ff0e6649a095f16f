"""GET of ASGD (Zhang et al. 2013): a portion and the parameters in one call, of one moment under `mutex=whole`."""

from __future__ import annotations

import threading

from pyps_client.channel import Channel
from pyps_client.connection import Connection
from pyps_client.intake import Intake
from pyps_client.parking import Parking
from pyps_client.pulling import IncomingPull
from pyps_wire.common_pb2 import ROLE_WORKER, Sender
from pyps_wire.work_pb2 import LeaseReply, LeaseRequest


class GetCall:
    """Leases a portion as `RemoteQueue` asks for one, and brings the parameters that are newer."""

    def __init__(self, sender: Sender, intake: Intake, *, connection: Connection, lent: bool) -> None:
        self._sender = sender
        self._intake = intake
        self._connection = connection
        self._lent = lent

    def __call__(self, channel: Channel, request: LeaseRequest, stop: threading.Event) -> LeaseReply:
        pull = IncomingPull(
            *(self._sender, ROLE_WORKER, self._intake),
            connection=self._connection,
            min_versions={},
            # The request says itself how long its portion may be waited for.
            parking=Parking(0.0),
            lent=self._lent,
            portion=request,
        )
        pull(channel, stop)
        return pull.lease
