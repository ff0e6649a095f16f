"""Looking at a run before joining it."""

from __future__ import annotations

import threading

from pyps_client.connection import Connection
from pyps_client.handshake import WITHOUT_PARAMETERS, Handshake
from pyps_client.launch import Launch
from pyps_wire.common_pb2 import OptimizerSettings
from pyps_wire.partition import Model


def model_of_run(launch: Launch) -> tuple[Model, OptimizerSettings] | None:
    """The run's whole model and its optimizer's settings, from server 0; None while the run has no parameters.

    Waits for the server. The caller is no worker by that.
    """
    connection = Connection(0, launch=launch)
    try:
        reply = Handshake(launch).hello_patiently(connection, threading.Event())
    finally:
        connection.close()
    if reply.state in WITHOUT_PARAMETERS:
        return None
    return Model.from_proto(reply.model), reply.optimizer
