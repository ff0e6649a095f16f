"""A lane's messages, as they come a part at a time."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable

import pytest

from pyps_wire.lane import Lane, SecureLane


class Late(Exception):
    pass


def raise_late() -> None:
    raise Late


@pytest.mark.parametrize(
    "take",
    [
        lambda end: Lane(end, waited=raise_late).receive(header_bytes_max=10),
        lambda end: Lane(end, waited=raise_late).receive_into(memoryview(bytearray(10))),
        lambda end: SecureLane(
            end, ssl.create_default_context(), server_hostname="localhost", waited=raise_late
        ).handshake(),
    ],
    ids=["a header", "a payload", "a record"],
)
def test_who_receives_looks_at_its_deadline_whenever_a_part_has_come(take: Callable[[socket.socket], object]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        dripping = socket.create_connection(listening.getsockname())
        end, _ = listening.accept()
    with dripping, end:
        dripping.sendall(b"\x16\x03")
        # There is no more to wait for: whoever does not look finds the lane closed.
        dripping.shutdown(socket.SHUT_WR)
        with pytest.raises(Late):
            take(end)
