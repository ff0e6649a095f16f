"""What a worker waits for, and what it pushes, after pushes that came in time, too late, or both."""

from __future__ import annotations

import threading
from collections.abc import ItemsView
from typing import Any

import numpy as np
import pytest

from pyps_client.launch import Launch
from pyps_client.pull import Held, Holdings, IncomingPull, LongPoll, Receiver
from pyps_client.transport import Parts, Take
from pyps_client.transport.connection import Connection
from pyps_wire.codecs import FLOAT32, INT8, Int8
from pyps_wire.common_pb2 import (
    OUTCOME_PENDING,
    OUTCOME_REJECTED,
    REASON_REPEATED,
    REASON_STALE,
    ROLE_OBSERVER,
    Receipt,
    Sender,
)
from pyps_wire.errors import WrongSize
from pyps_wire.parameter_server_pb2 import Differences, Parameters
from pyps_wire.partition import Model, Tensor, partition

PLAN = partition(Model((Tensor("a", (4 * 1024,)),), shard_size=1024), num_servers=2)
ON_FIRST = [shard.shard_id for shard in PLAN.of_server(0)]


def holdings_at(version: int) -> Holdings:
    holdings = Holdings(PLAN)
    for held in holdings.of_server:
        held.versions = dict.fromkeys(held.versions, version)
    return holdings


def pending(shard_id: int, min_version: int) -> Receipt:
    return Receipt(shard_id=shard_id, outcome=OUTCOME_PENDING, min_version=min_version)


def stale(shard_id: int, version: int) -> Receipt:
    return Receipt(shard_id=shard_id, outcome=OUTCOME_REJECTED, reason=REASON_STALE, version_before=version)


def test_a_push_in_time_is_waited_for_and_nothing_is_left_out_of_the_next():
    holdings = holdings_at(5)

    holdings.note([pending(shard.shard_id, 6) for shard in PLAN.shards])

    assert holdings.awaited(0) == dict.fromkeys(ON_FIRST, 6)
    assert holdings.settled(0) == set()


def test_a_push_that_was_late_for_one_shard_waits_for_none_and_makes_that_one_good_alone():
    holdings = holdings_at(5)
    late, early = ON_FIRST

    holdings.note([stale(late, 7), *(pending(shard.shard_id, 6) for shard in PLAN.shards if shard.shard_id != late)])

    assert holdings.awaited(0) == holdings.awaited(1) == {}
    assert holdings.settled(0) == {early}
    assert holdings.settled(1) == {shard.shard_id for shard in PLAN.of_server(1)}
    # A pull is due, of the late shard at least.
    assert holdings.of_server[0].wanted == {late: 7, early: 6}


def test_once_the_late_shard_is_made_good_all_rounds_are_waited_for():
    holdings = holdings_at(5)
    late, early = ON_FIRST
    holdings.note([stale(late, 7), pending(early, 6)])
    holdings.of_server[0].versions[late] = 7

    holdings.note([pending(late, 8)])

    assert holdings.awaited(0) == {late: 8, early: 6}
    assert holdings.settled(0) == set()


def test_a_second_gradient_for_a_round_waits_for_its_end():
    holdings = holdings_at(5)
    refusal = Receipt(shard_id=ON_FIRST[0], outcome=OUTCOME_REJECTED, reason=REASON_REPEATED, min_version=6)

    holdings.note([refusal])

    assert holdings.awaited(0) == {ON_FIRST[0]: 6}


SHARDS = partition(Model((Tensor("a", (64,)),), shard_size=32), num_servers=1).of_server(0)


def held_at(version: int) -> Held:
    held = Held(SHARDS)
    held.versions = dict.fromkeys(held.versions, version)
    return held


def test_versions_and_epochs_are_read_of_one_moment_though_another_thread_pulls():
    holdings = holdings_at(5)
    held = holdings.of_server[0]
    restored = threading.Thread(target=held.enter_epoch, args=(1,))

    class Read(dict[int, int]):
        """Versions amid whose reading a server's restore becomes known."""

        def copy(self) -> Read:
            self._restore()
            return Read(self)

        def items(self) -> ItemsView[int, int]:  # type: ignore[override]
            self._restore()
            return super().items()

        def _restore(self) -> None:
            if restored.ident is None:
                restored.start()
                restored.join(0.05)

    held.versions = Read(held.versions)
    versions = holdings.versions
    restored.join()

    assert versions.epochs == (0, 0)
    assert versions[ON_FIRST[0]] == 5
    assert (holdings.versions.epochs, holdings.versions[ON_FIRST[0]]) == ((1, 0), -1)


def test_a_version_is_wanted_until_it_has_arrived():
    held = held_at(3)

    held.want(0, 4, epoch=0)
    held.want(1, 0, epoch=0)
    assert held.wanted == {0: 4}

    held.versions[0] = 5
    assert held.wanted == {}


def test_nothing_is_wanted_of_an_epoch_that_is_over():
    held = held_at(3)
    held.want(0, 4, epoch=0)

    held.enter_epoch(1)
    assert held.wanted == {}
    # A receipt of the epoch before, read late.
    held.want(0, 4, epoch=0)
    assert held.wanted == {}

    held.want(0, 4, epoch=1)
    assert held.wanted == {0: 4}


def test_a_pulls_late_answer_does_not_undo_a_restore_that_a_heartbeat_reported():
    connection = Connection(0, launch=Launch(servers=("one:1", "two:1")))
    values = np.ones(4 * 1024, np.float32)
    receiver = Receiver([values], Holdings(PLAN).of_server[0], codec=FLOAT32, name="server 0")
    pull = IncomingPull(
        Sender(), ROLE_OBSERVER, receiver, connection=connection, awaited=lambda _: {}, poll=LongPoll(0.0)
    )

    class Channel:
        def round(self, method: str, parts: Parts, take: Take) -> bool:
            # A heartbeat's.
            connection.epoch = 2
            for shard in PLAN.of_server(0):
                header = Parameters(shard_id=shard.shard_id, epoch=1, version=3, codec=FLOAT32)
                take(header, values[: shard.length].view(np.uint8).data)
            return True

    channel: Any = Channel()
    assert pull(channel, threading.Event()) == set(ON_FIRST)
    assert (receiver.held.epoch, connection.epoch) == (1, 2)


def test_a_wait_that_a_finished_server_answered_is_over_though_the_version_never_came():
    held = held_at(3)
    held.want(0, 4, epoch=0)
    waited_for = held.wanted

    # Noted by another thread while the pull was under way.
    held.want(1, 4, epoch=0)
    held.answered(waited_for)

    assert held.wanted == {1: 4}


def test_differences_are_added_once_to_what_they_are_of_and_an_error_amid_them_leaves_no_version():
    shard_id, values = ON_FIRST[0], np.zeros(4 * 1024, np.float32)
    receiver = Receiver([values], Holdings(PLAN).of_server[0], codec=INT8, name="server 0")
    place, versions, ones = values[:1024], receiver.held.versions, np.ones(1024, np.float32)
    assert receiver.write(shard_id, Parameters(codec=FLOAT32, version=3), ones.view(np.uint8).data)
    versions[shard_id] = 3

    payload = bytes(INT8.encode(ones))
    reply = Parameters(codec=INT8, version=5, differences=Differences(since_version=3, sizes=[len(payload)] * 2))
    assert receiver.write(shard_id, reply, memoryview(2 * payload))
    assert versions[shard_id] == 5
    np.testing.assert_allclose(place, 3 * ones, rtol=0.01)
    held = place.copy()
    # The answer to an earlier request comes late.
    assert not receiver.write(shard_id, reply, memoryview(2 * payload))
    np.testing.assert_array_equal(place, held)
    with pytest.raises(WrongSize, match="sent 1055 bytes of differences of shard 0, of \\[1056, 1056\\] bytes"):
        receiver.write(shard_id, reply, memoryview(payload)[1:])

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    reply.differences.since_version = 5
    with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Int8, "add_into", interrupted)
        receiver.write(shard_id, reply, memoryview(2 * payload))
    assert versions[shard_id] == -1
