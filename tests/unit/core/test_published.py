"""The published copy: what workers add up is the server's to the bit, near the parameters, and in few bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyps.core.arrays import Floats
from pyps.core.gradient import PayloadKind, PublishedReply, Reply
from pyps.core.recorder import Pulled
from pyps.core.shard import Shard
from pyps_wire.codecs import CODECS, DELTA, FLOAT32, INT8, Codec
from shards import Log, gradient, make_shard, pull, push, restored, roster

LENGTH = 100
PUBLISHED = [codec for codec in CODECS.values() if codec.published]


class Follower:
    """What a worker does with its pulls' answers."""

    def __init__(self, shard: Shard, codec: Codec = INT8):
        self.shard, self.codec = shard, codec
        self.version, self.held = -1, np.full(shard.length, np.nan, np.float32)
        self.num_bytes = 0

    def take(self, reply: PublishedReply, version: int | None) -> bool:
        if version is None:
            return False
        if reply.since_version is None:
            assert reply.codec is FLOAT32
            self.held[:] = FLOAT32.decode(reply.payloads[0], self.held.size)
        else:
            assert reply.since_version == self.version
            for payload in reply.payloads:
                self.codec.add_into(payload, self.held)
        self.version, self.num_bytes = version, reply.num_bytes
        return True

    def pull(self, *, min_version: int = 0) -> bool:
        reply = PublishedReply(self.codec, min_version=min_version)
        return self.take(reply, self.shard.pull(reply, held_version=self.version, worker_id="a"))

    def exchange(self, values: Floats, **fields: object) -> bool:
        reply = PublishedReply(self.codec)
        pushed = gradient(values, **{"base_version": self.version, "sequence": self.shard.version, **fields})
        made = self.shard.push(pushed, roster=roster("a", "b"), reply=reply, held_version=self.version)
        return self.take(reply, made.version)


def noise(seed: int, length: int = LENGTH) -> Floats:
    return np.asarray(np.random.default_rng(seed).standard_normal(length), np.float32)


def parameters_of(shard: Shard) -> Floats:
    return shard.state().parameters


@pytest.mark.parametrize("codec", PUBLISHED, ids=repr)
def test_a_first_pull_is_exact_and_later_ones_are_short(codec):
    shard = make_shard(noise(0))
    worker = Follower(shard, codec)
    assert worker.pull()
    np.testing.assert_array_equal(worker.held, parameters_of(shard))
    assert not worker.pull(), "nothing is newer"
    for seed in range(1, 20):
        assert worker.exchange(noise(seed))
        assert worker.version == seed
        assert worker.num_bytes <= codec.max_bytes(LENGTH)


@given(st.sampled_from(PUBLISHED), st.lists(st.tuples(st.floats(1e-6, 1e6), st.sampled_from("aabc")), max_size=40))
def test_all_hold_the_same_bits_one_step_of_quantisation_from_the_parameters(codec, pushes):
    shard = make_shard(noise(0))
    workers = {name: Follower(shard, codec) for name in "abc"}
    for worker in workers.values():
        worker.pull()
    published = {0: parameters_of(shard)}
    for number, (scale, name) in enumerate(pushes):
        worker, before = workers[name], workers[name].held.copy()
        newest = max(published)
        came = worker.exchange(np.float32(scale) * noise(number), worker_id=name)
        assert came, "whoever holds the newest makes the next"
        if worker.version > newest:
            theta = parameters_of(shard)
            # The encoding of this difference has lost no more than it loses of any such difference; rounding aside.
            difference = theta - published[newest]
            loss = np.abs(difference - codec.decode(codec.encode(difference), LENGTH)).max()
            assert np.abs(worker.held - theta).max() <= loss + 1e-6 * np.abs(theta).max()
            published[worker.version] = worker.held.copy()
        np.testing.assert_array_equal(worker.held, published[worker.version])
        assert before is not worker.held
    newest = max(workers.values(), key=lambda each: each.version)
    for worker in workers.values():
        worker.pull()
        np.testing.assert_array_equal(worker.held, newest.held)


def test_one_publication_serves_all_workers_and_a_slow_one_gets_several():
    shard = make_shard(noise(0))
    fast, slow, other = Follower(shard), Follower(shard), Follower(shard)
    for worker in (fast, slow, other):
        worker.pull()
    push(shard, noise(1))
    assert fast.pull()
    push(shard, noise(2), sequence=1)
    # The newest published parameters serve a worker that holds older ones.
    assert other.pull()
    assert other.version == fast.version == 1
    np.testing.assert_array_equal(other.held, fast.held)
    assert fast.pull()
    assert slow.pull()
    assert (slow.version, slow.num_bytes) == (2, 2 * INT8.max_bytes(LENGTH))
    np.testing.assert_array_equal(slow.held, fast.held)


def test_a_worker_that_waited_for_a_version_gets_it_and_the_last_pull_of_a_run_the_last():
    shard = make_shard(noise(0))
    fast, slow = Follower(shard), Follower(shard)
    for worker in (fast, slow):
        worker.pull()
    for seed in range(3):
        push(shard, noise(seed), sequence=seed)
    fast.pull()
    push(shard, noise(3), sequence=3)
    assert slow.pull(min_version=4)
    assert slow.version == 4
    push(shard, noise(4), sequence=4)
    shard.finish()
    assert fast.pull()
    assert fast.version == 5


def test_what_does_not_reach_back_or_would_be_longer_is_sent_whole():
    shard = make_shard(noise(0))
    fast, slow = Follower(shard), Follower(shard)
    for worker in (fast, slow):
        worker.pull()
    for seed in range(5):
        fast.exchange(noise(seed))
    assert shard.published_bytes < 2 * 4 * LENGTH
    assert slow.pull()
    assert (slow.version, slow.num_bytes) == (5, 4 * LENGTH)
    np.testing.assert_array_equal(slow.held, fast.held)
    joiner = Follower(shard)
    assert joiner.pull()
    # Not the parameters, to which the next difference is none.
    assert joiner.num_bytes == 4 * LENGTH
    np.testing.assert_array_equal(joiner.held, fast.held)
    assert np.any(joiner.held != parameters_of(shard))
    fast.exchange(noise(6))
    assert joiner.pull()
    np.testing.assert_array_equal(joiner.held, fast.held)


def test_who_pulls_in_other_codecs_and_a_restored_shard_get_the_parameters():
    shard = make_shard(noise(0))
    worker = Follower(shard)
    worker.pull()
    worker.exchange(noise(1))
    memory = bytearray(4 * LENGTH)
    assert shard.pull(Reply(memory, 0, FLOAT32)) == 1
    assert memory == parameters_of(shard).tobytes()
    again = restored(shard, shard.state(), epoch=1)
    assert again.published_bytes == 0
    follower = Follower(again)
    assert follower.pull()
    np.testing.assert_array_equal(follower.held, parameters_of(shard))


def test_the_log_names_the_published_version_that_a_pull_brought():
    log = Log()
    shard = make_shard(noise(0), recorder=log)
    fast, slow = Follower(shard), Follower(shard)
    fast.pull()
    slow.pull()
    push(shard, noise(1))
    fast.pull()
    push(shard, noise(2), sequence=1)
    for _ in range(3):
        slow.pull()
    versions = [event.version for event in log.events[0] if isinstance(event, Pulled)]
    assert versions == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("codec", PUBLISHED, ids=repr)
def test_a_jump_too_far_for_a_difference_is_sent_whole(codec):
    shard = make_shard(np.full(LENGTH, 3e38))
    worker = Follower(shard, codec)
    worker.pull()
    # Between two pulls they move by twice as much, which is no float32.
    push(shard, np.full(LENGTH, 3e38))
    worker.exchange(np.full(LENGTH, 3e38))
    np.testing.assert_array_equal(worker.held, parameters_of(shard))
    worker.exchange(np.full(LENGTH, -3e38))
    assert np.isfinite(worker.held).all()


@pytest.mark.parametrize("codec", PUBLISHED, ids=repr)
def test_the_copy_stays_near_parameters_that_move_steadily(codec):
    shard = make_shard(noise(0, 2000))
    worker = Follower(shard, codec)
    worker.pull()
    for _ in range(200):
        worker.exchange(np.float32(0.01) * parameters_of(shard))
    theta = parameters_of(shard)
    assert np.linalg.norm(worker.held - theta) < 0.02 * np.linalg.norm(theta)


def test_a_published_copy_follows_what_the_rule_hands_out():
    settings = {"learning_rate": 1.0, "momentum": 0.5, "lookahead": 1.0}
    shard = make_shard(noise(0), rule="delayed_nesterov", settings=settings)
    worker = Follower(shard, DELTA)
    worker.pull()
    worker.exchange(noise(1))
    np.testing.assert_array_equal(worker.held, pull(shard)[1])
    assert np.any(worker.held != parameters_of(shard))


def test_buffers_come_exactly():
    shard = make_shard(noise(0), kind=PayloadKind.BUFFER)
    worker = Follower(shard)
    worker.pull()
    assert worker.exchange(noise(1), kind=PayloadKind.BUFFER)
    np.testing.assert_array_equal(worker.held, parameters_of(shard))
    assert not worker.pull()


def test_a_retry_brings_what_the_first_answer_would_have_brought():
    shard = make_shard(noise(0))
    worker, other = Follower(shard), Follower(shard)
    worker.pull()
    other.pull()
    reply = PublishedReply(INT8)
    first = shard.push(gradient(noise(1), sequence=7), roster=roster(), reply=reply, held_version=0)
    assert first.version == 1
    # It was lost, and the next one is of more.
    other.exchange(noise(2), worker_id="b")
    other.exchange(noise(3), worker_id="b")
    assert worker.exchange(noise(1), sequence=7)
    assert worker.version == other.version == 3
    np.testing.assert_array_equal(worker.held, other.held)
