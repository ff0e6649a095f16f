"""What the protocol in force asks of a worker, from three kinds of messages."""

import time

import pytest

from pyps_client.run_state import View, warn_of_differences
from pyps_wire.common_pb2 import Receipt, ShardVersion
from pyps_wire.parameter_server_pb2 import HeartbeatReply, HelloReply


def terms(view, *names):
    return tuple(getattr(view.state.terms, name) for name in names)


def test_receipts_change_some_terms_and_heartbeats_most():
    view = View()

    view.note_hello(0, HelloReply(protocol="hardsync", staleness="none", current_version_only=True, clip_norm=2.0))
    assert terms(view, "protocol", "current_version_only", "ask_to_proceed") == ("hardsync", True, False)

    view.note_receipts(0, [Receipt(ask_to_proceed=True, batch_size=16)], sent_at=time.monotonic())
    assert terms(view, "ask_to_proceed", "batch_size", "protocol") == (True, 16, "hardsync")

    view.note_heartbeat(
        0,
        HeartbeatReply(protocol="asgd:accumulate=4", staleness="divide", accumulate=4, batch_size=8),
        asked_at=time.monotonic(),
    )
    assert terms(view, "protocol", "staleness", "accumulate") == ("asgd:accumulate=4", "divide", 4)
    assert terms(view, "current_version_only", "ask_to_proceed", "batch_size") == (False, False, 8)
    assert view.state.terms.clip_norm == 2.0


def test_an_empty_heartbeat_changes_nothing():
    view = View()
    view.note_hello(0, HelloReply(protocol="hardsync", current_version_only=True))

    view.note_heartbeat(0, HeartbeatReply(known=False), asked_at=time.monotonic())

    assert terms(view, "protocol", "current_version_only") == ("hardsync", True)


def test_a_late_heartbeat_changes_no_term_reported_since_it_was_sent():
    view = View()
    view.note_hello(0, HelloReply(protocol="async"))
    late = HeartbeatReply(protocol="hardsync", accumulate=2, batch_size=8)

    asked_at = time.monotonic()
    view.note_receipts(0, [Receipt(ask_to_proceed=True, batch_size=16)], sent_at=asked_at)
    view.note_heartbeat(0, late, asked_at=asked_at)
    # What no receipt tells it does.
    assert terms(view, "protocol", "accumulate") == ("hardsync", 2)
    assert terms(view, "ask_to_proceed", "batch_size") == (True, 16)

    view.note_hello(0, HelloReply(protocol="ssp:clock_bound=2", batch_size=4))
    view.note_proceed(ask_to_proceed=True)
    view.note_heartbeat(0, late, asked_at=asked_at)
    assert terms(view, "protocol", "accumulate", "batch_size") == ("ssp:clock_bound=2", 0, 4)
    assert view.state.terms.ask_to_proceed

    view.note_heartbeat(0, late, asked_at=time.monotonic())
    assert terms(view, "protocol", "ask_to_proceed") == ("hardsync", False)


@pytest.mark.parametrize("other", ["greeted", "granted", "reminded"])
def test_a_late_receipt_changes_no_term_reported_since_its_push_was_sent(other):
    view = View()
    view.note_hello(0, HelloReply(protocol="async"))

    sent_at = time.monotonic()
    if other == "greeted":
        view.note_hello(0, HelloReply(ask_to_proceed=True))
    elif other == "granted":
        view.note_proceed(ask_to_proceed=True)
    else:
        view.note_heartbeat(0, HeartbeatReply(protocol="serial", ask_to_proceed=True), asked_at=time.monotonic())
    view.note_receipts(0, [Receipt(ask_to_proceed=False)], sent_at=sent_at)
    assert view.state.terms.ask_to_proceed

    # What only said the same leaves it to the receipt.
    sent_at = time.monotonic()
    view.note_heartbeat(0, HeartbeatReply(protocol="serial", ask_to_proceed=True), asked_at=time.monotonic())
    view.note_receipts(0, [Receipt(ask_to_proceed=False)], sent_at=sent_at)
    assert not view.state.terms.ask_to_proceed


def test_a_late_answer_leaves_alone_the_rates_of_later_versions_and_epochs():
    view = View()

    def receipt(epoch: int, version: int, rate: float) -> None:
        late = Receipt(shard_id=0, epoch=epoch, version_after=version, next_rate=rate)
        view.note_receipts(0, [late], sent_at=time.monotonic())

    receipt(0, 5, 0.5)
    receipt(0, 4, 0.4)
    assert view.state.next_rates == {0: 0.5}
    receipt(0, 5, 0.25)
    assert view.state.next_rates == {0: 0.25}, "set while the version stayed"

    restored = HelloReply(epoch=1, shards=[ShardVersion(shard_id=0, version=3, next_rate=0.3)])
    view.note_hello(0, restored)
    receipt(0, 6, 0.6)
    assert view.state.next_rates == {0: 0.3}
    receipt(1, 4, 0.1)
    view.note_hello(0, restored)
    assert view.state.next_rates == {0: 0.1}


def test_servers_with_different_protocols_are_named(caplog):
    warn_of_differences([HelloReply(protocol="hardsync", staleness="none")] * 2)
    assert caplog.messages == []

    warn_of_differences([HelloReply(protocol="hardsync"), HelloReply(protocol="async")])

    sentence = "server 1 goes by protocol async, server 0 by hardsync: give all servers the same --protocol."
    assert caplog.messages == [sentence]
