"""Asynchronous aggregation; how a shard obeys other protocols is in test_shard.py."""

from __future__ import annotations

import pytest

from pyps.core.aggregation import PROTOCOLS, Apply, Arrival, Contribution, Part, parse
from pyps.core.staleness import Weighing
from pyps_wire.errors import BadRequest
from shards import crew, gradient


def test_async_applies_each_gradient_alone_and_whole() -> None:
    contribution = Contribution(gradient([1.0]), staleness=7, weighing=Weighing())
    arrival = Arrival(contribution, pending=(), version=9, roster=crew(4))
    assert parse("async").decide(arrival) == Apply((Part(contribution, share=1.0),))


def test_a_protocol_is_found_under_its_own_name() -> None:
    assert [kind.name for kind in PROTOCOLS.values()] == list(PROTOCOLS)


def test_an_unknown_protocol_is_refused_with_those_there_are() -> None:
    with pytest.raises(BadRequest, match="'sandblaster' is unknown; expected one of asgd, async, backup"):
        parse("sandblaster")
