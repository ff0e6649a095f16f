"""What the protocol in force asks of a worker, from three kinds of messages."""

from __future__ import annotations

import time

import pytest

from pyps_client.terms import Terms, warn_of_differences
from pyps_wire.common_pb2 import Receipt
from pyps_wire.parameter_server_pb2 import HeartbeatReply, HelloReply


def test_receipts_tell_what_changes_from_step_to_step_and_heartbeats_all_that_may_change() -> None:
    terms = Terms()

    terms.greeted(HelloReply(protocol="hardsync", staleness="none", current_version_only=True, clip_norm=2.0))
    assert (terms.protocol, terms.current_version_only, terms.ask_to_proceed) == ("hardsync", True, False)

    terms.answered(Receipt(ask_to_proceed=True, batch_size=16))
    assert (terms.ask_to_proceed, terms.batch_size, terms.protocol) == (True, 16, "hardsync")

    terms.reminded(
        HeartbeatReply(protocol="asgd:accumulate=4", staleness="divide", accumulate=4, batch_size=8),
        asked_at=time.monotonic(),
    )
    assert (terms.protocol, terms.staleness, terms.accumulate) == ("asgd:accumulate=4", "divide", 4)
    assert (terms.current_version_only, terms.ask_to_proceed, terms.batch_size) == (False, False, 8)
    assert terms.clip_norm == 2.0


def test_a_heartbeat_that_tells_nothing_changes_nothing() -> None:
    terms = Terms()
    terms.greeted(HelloReply(protocol="hardsync", current_version_only=True))

    terms.reminded(HeartbeatReply(known=False), asked_at=time.monotonic())

    assert (terms.protocol, terms.current_version_only) == ("hardsync", True)


def test_a_late_heartbeat_leaves_alone_what_others_have_told_since_it_was_asked_for() -> None:
    terms = Terms()
    terms.greeted(HelloReply(protocol="async"))
    late = HeartbeatReply(protocol="hardsync", accumulate=2, batch_size=8)

    asked_at = time.monotonic()
    terms.answered(Receipt(ask_to_proceed=True, batch_size=16))
    terms.reminded(late, asked_at=asked_at)
    # What no receipt tells it does.
    assert (terms.protocol, terms.accumulate) == ("hardsync", 2)
    assert (terms.ask_to_proceed, terms.batch_size) == (True, 16)

    terms.greeted(HelloReply(protocol="ssp:clock_bound=2", batch_size=4))
    terms.granted(ask_to_proceed=True)
    terms.reminded(late, asked_at=asked_at)
    assert (terms.protocol, terms.accumulate, terms.batch_size) == ("ssp:clock_bound=2", 0, 4)
    assert terms.ask_to_proceed

    terms.reminded(late, asked_at=time.monotonic())
    assert (terms.protocol, terms.ask_to_proceed) == ("hardsync", False)


def test_servers_of_one_run_that_were_told_different_protocols_are_named(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_differences([HelloReply(protocol="hardsync", staleness="none")] * 2)
    assert caplog.messages == []

    warn_of_differences([HelloReply(protocol="hardsync"), HelloReply(protocol="async")])

    sentence = "server 1 goes by protocol async, server 0 by hardsync: give all servers the same --protocol."
    assert caplog.messages == [sentence]
