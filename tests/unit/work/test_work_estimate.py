"""How long a pass still takes: from measured speeds, whoever has become slow (algorithm notes, E5)."""

from __future__ import annotations

import pytest

from pyps.work.estimate import Occupation, seconds_left
from shards import plain_queue


def test_what_is_pending_flows_to_whoever_is_free():
    assert seconds_left(100, [Occupation(10.0)], copy_seconds=None) == 10.0
    assert seconds_left(100, [Occupation(10.0), Occupation(30.0)], copy_seconds=None) == 2.5
    # The second is free after 2 s, when 20 are done; the rest takes both.
    assert seconds_left(100, [Occupation(10.0), Occupation(10.0, 20)], copy_seconds=None) == 2.0 + 80 / 20


def test_the_last_portion_counts_where_there_are_no_copies():
    slow = Occupation(1.0, 50)
    assert seconds_left(10, [Occupation(10.0), slow], copy_seconds=None) == 50.0
    assert seconds_left(10, [Occupation(10.0), slow], copy_seconds=5.0) == 1.0 + 5.0


def test_a_worker_that_is_late_takes_as_long_again():
    assert seconds_left(0, [Occupation(10.0, 50, 2.0)], copy_seconds=None) == 3.0
    assert seconds_left(0, [Occupation(10.0, 50, 40.0)], copy_seconds=None) == 40.0


def test_nobody_is_there():
    assert seconds_left(10, [], copy_seconds=None) == -1.0


def test_nothing_is_known_before_the_first_portion_and_nothing_is_left_at_the_end():
    queue = plain_queue(6, 3)
    assert queue.progress(0.0).seconds_left == -1.0
    answer = queue.lease("a", 1, now=0.0)
    assert queue.progress(1.0).seconds_left == -1.0
    queue.deliver("a", 1, [answer.lease_id], example_count=3, now=3.0)
    assert queue.progress(3.0).seconds_left == pytest.approx(3.0)
    assert queue.progress(3.0).workers[0].examples_per_second == 1.0
    answer = queue.lease("a", 1, now=3.0)
    assert queue.progress(4.0).seconds_left == pytest.approx(2.0)
    queue.deliver("a", 1, [answer.lease_id], example_count=3, now=6.0)
    assert queue.progress(6.0).seconds_left == 0.0
