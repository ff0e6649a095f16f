"""Frames for Pull: shared by pulls of the same version, within bounds, and dropped in time."""

import numpy as np
import pytest

from kernel_values import WORDS
from pyps.core.recorder import Pulled
from pyps.core.shard import Shard
from pyps.service.executor import INLINE_PARAMETERS_MAX
from pyps.service.serializations import ReplyFrame, Serializations, Wanted
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.codecs import FLOAT16, FLOAT32, INT8
from shards import Log, make_shard, pull, push, run_together

# The shortest shard whose frames are kept.
LENGTH = INLINE_PARAMETERS_MAX


def large_shard(shard_id: int = 0, length: int = LENGTH, **others: object) -> Shard:
    return make_shard(np.linspace(-1, 1, length), shard_id=shard_id, **others)


def take(cache: Serializations, shard: Shard, *, worker_id: str = "a", **wants: object) -> ReplyFrame | None:
    return cache.take(Wanted(shard, **{"codec": FLOAT32, **wants}), worker_id=worker_id)  # type: ignore[arg-type]


def test_two_pullers_of_one_version_get_the_same_bytes():
    for codec in WORDS:
        cache, shard = Serializations(), large_shard(length=2 * LENGTH, epoch=3)
        push(shard, np.ones(2 * LENGTH), epoch=3)
        first = take(cache, shard, codec=codec)
        assert take(cache, shard, worker_id="b", codec=codec) is first is not None, codec
        message = wire.Parameters.FromString(first.whole)
        assert (message.shard_id, message.version, message.epoch, message.codec) == (0, 1, 3, codec)
        assert message.payload == bytes(first.payload) == bytes(codec.encode(pull(shard)[1])), codec


def test_pulls_at_the_same_time_make_one_frame():
    cache, shard = Serializations(), large_shard()
    frames: list[ReplyFrame | None] = []
    run_together([lambda: frames.append(take(cache, shard))] * 8)
    assert len({id(frame) for frame in frames}) == 1


def test_another_version_or_codec_is_another_frame():
    cache, shard = Serializations(), large_shard(length=2 * LENGTH)
    first = take(cache, shard)
    assert take(cache, shard, codec=FLOAT16) is not first
    push(shard, np.ones(2 * LENGTH))
    second = take(cache, shard)
    assert second is not first
    # Of each codec the newest alone is kept.
    assert cache.bytes_held == pytest.approx(2 * LENGTH * (4 + 2), abs=200)


def test_a_pull_of_the_version_held_gets_nothing_and_small_frames_are_not_kept():
    cache, shard, small = Serializations(), large_shard(), make_shard()
    assert take(cache, shard, held_version=0) is None
    assert take(cache, small) is not take(cache, small)
    assert cache.bytes_held == 0


def test_the_bound_is_kept_and_what_was_made_first_goes_first():
    frame_bytes = LENGTH * 4 + 60
    cache = Serializations(round_bytes_max=4 * frame_bytes, recent_bytes_max=2 * frame_bytes)
    shards = [large_shard(shard_id) for shard_id in range(8)]
    frames = [take(cache, shard, min_version=1) for shard in shards]
    assert cache.bytes_held <= 4 * frame_bytes
    assert [
        take(cache, shard, min_version=1) is frame for shard, frame in zip(shards[4:], frames[4:], strict=True)
    ] == ([True] * 4)
    assert take(cache, shards[0], min_version=1) is not frames[0]
    # Pulls that do not wait for a round have less room.
    take(cache, shards[1])
    assert cache.bytes_held <= 2 * frame_bytes


def test_tidying_drops_frames_of_old_versions_and_of_a_run_that_was_reset():
    cache, shards = Serializations(), {shard_id: large_shard(shard_id) for shard_id in range(3)}
    frames = {shard_id: take(cache, shard) for shard_id, shard in shards.items()}
    push(shards[0], np.ones(LENGTH))
    cache.tidy({0: shards[0], 1: shards[1], 2: large_shard(2)})
    assert cache.bytes_held == 4 * LENGTH
    assert take(cache, shards[1]) is frames[1]
    # The run was reset: another holds the same numbers.
    cache.tidy({})
    assert cache.bytes_held == 0


def test_a_shared_frame_is_recorded_for_each_worker_that_takes_it():
    cache, log = Serializations(), Log()
    shard = large_shard(recorder=log)
    for worker_id in ("a", "b", ""):
        take(cache, shard, worker_id=worker_id)
    assert log.events[0] == [Pulled(0, "a", 0), Pulled(0, "b", 0)]


def test_workers_follow_the_published_copy_and_observers_get_the_parameters():
    cache, shard = Serializations(), make_shard(np.linspace(-1, 1, 100))
    take(cache, shard, codec=INT8)
    push(shard, np.linspace(-1, 0.3, 100))
    followed = take(cache, shard, codec=INT8, held_version=0)
    assert wire.Parameters.FromString(followed.whole).differences.since_version == 0
    observed = wire.Parameters.FromString(take(cache, shard, worker_id="", codec=INT8).whole)
    assert observed.payload == bytes(INT8.encode(pull(shard)[1]))
    assert not observed.HasField("differences")
