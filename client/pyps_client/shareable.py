"""Moved: pyps_client.transport."""

from pyps_client.transport import named
from pyps_wire.parameter_server_pb2 import HelloReply


def check_shareable(server: str, reply: HelloReply) -> None:
    """As the transport's own."""
    named("shm").check_shareable(server, reply)
