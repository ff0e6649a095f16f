"""What a worker waits for, and what it says of it."""

from __future__ import annotations

import threading

import pytest

from pyps_client.intake import Held
from pyps_client.parking import PARK_SECONDS, Parking
from pyps_wire.errors import RunFinished, WaitTimedOut
from pyps_wire.partition import Model, Tensor, partition

SHARDS = partition(Model((Tensor("a", (64,)),), shard_size=32), num_servers=1).of_server(0)
NAMED = WaitTimedOut("after 0 s: a waits for version 1 of shard 0; it waits for b")


def held_at(version: int) -> Held:
    held = Held(SHARDS)
    held.versions = dict.fromkeys(held.versions, version)
    return held


def test_a_version_is_wanted_until_it_has_arrived() -> None:
    held = held_at(3)

    held.want(0, 4, epoch=0)
    held.want(1, 0, epoch=0)
    assert held.wanted == {0: 4}

    held.versions[0] = 5
    assert held.wanted == {}


def test_the_newest_version_named_is_the_one_to_wait_for() -> None:
    held = held_at(3)

    for version in (5, 4):
        held.want(0, version, epoch=0)

    assert held.wanted == {0: 5}


def test_nothing_is_wanted_of_an_epoch_that_is_over() -> None:
    held = held_at(3)
    held.want(0, 4, epoch=0)

    held.enter(1)
    assert held.wanted == {}
    # A receipt of the epoch before, read late.
    held.want(0, 4, epoch=0)
    assert held.wanted == {}

    held.want(0, 4, epoch=1)
    assert held.wanted == {0: 4}


def test_a_wait_that_a_finished_server_answered_is_over_though_the_version_never_came() -> None:
    held = held_at(3)
    held.want(0, 4, epoch=0)
    waited_for = held.wanted

    # Noted by another thread while the pull was under way.
    held.want(1, 4, epoch=0)
    held.answered(waited_for)

    assert held.wanted == {1: 4}


def test_a_wait_ends_at_its_deadline_with_the_names_that_the_server_gave() -> None:
    parking = Parking(0.0)
    assert parking.call_seconds == 0.0

    with pytest.raises(WaitTimedOut, match=r"it waits for b\. Raise wait_seconds \(PYPS_WAIT_SECONDS\)"):
        parking.go_on(NAMED, stop=threading.Event())


def test_a_long_wait_is_asked_for_in_parts_and_goes_on() -> None:
    parking = Parking(10 * PARK_SECONDS)

    assert parking.call_seconds == PARK_SECONDS
    parking.go_on(NAMED, stop=threading.Event())


def test_a_wait_is_given_up_when_another_server_failed() -> None:
    stop = threading.Event()
    stop.set()

    with pytest.raises(RunFinished, match="closed while it waited"):
        Parking(600).go_on(NAMED, stop=stop)
