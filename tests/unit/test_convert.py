"""From messages to the core's values."""

from __future__ import annotations

import pytest

from pyps.service import convert
from pyps_wire import parameter_server_pb2 as wire


@pytest.mark.parametrize(("spare", "kept"), [(100, True), (1 << 20, False)])
def test_a_gradient_keeps_no_more_of_its_message_than_it_is_charged_for(spare: int, kept: bool) -> None:
    message = bytes(spare) + b"\x00\x00\x80\x3f" * 16
    gradient = convert.gradient_from(wire.PushRequest(codec=1, kind=1), memoryview(message)[spare:])
    assert bytes(gradient.payload) == message[spare:]
    assert (memoryview(gradient.payload).obj is message) == kept
