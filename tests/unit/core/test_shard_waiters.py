"""Who waits for a version is called once, and never under the shard's lock."""

from __future__ import annotations

import threading

from shards import JOIN_SECONDS, crew, gradient, make_shard, pull, push, run_together


def test_a_waiter_is_called_once_when_the_version_is_reached_or_at_once_where_it_is_there() -> None:
    shard = make_shard([0.0])
    calls: list[int] = []
    shard.when_version(2, lambda: calls.append(shard.version))
    for sequence in range(3):
        push(shard, [1.0], sequence=sequence)
    assert calls == [2]
    cancel = shard.when_version(2, lambda: calls.append(9))
    assert (calls, cancel()) == ([2, 9], False)


def test_a_cancelled_waiter_is_never_called_and_its_equal_goes_on_waiting() -> None:
    shard = make_shard([0.0])
    calls: list[int] = []

    def callback() -> None:
        calls.append(1)

    shard.when_version(1, callback)
    assert shard.when_version(1, callback)() is True
    push(shard, [1.0])
    assert calls == [1]


def test_a_waiter_may_read_the_shard() -> None:
    shard = make_shard([0.0])
    seen: list[int] = []
    shard.when_version(1, lambda: seen.append(pull(shard)[0]))
    pusher = threading.Thread(target=push, args=(shard, [1.0]), daemon=True)
    pusher.start()
    pusher.join(JOIN_SECONDS)
    assert seen == [1]


def test_finishing_calls_those_who_wait_for_what_never_comes() -> None:
    shard = make_shard([0.0])
    calls: list[bool] = []
    shard.when_version(100, lambda: calls.append(shard.finished))
    shard.finish()
    assert calls == [True]


def test_each_of_many_waiters_is_called_once_while_many_push() -> None:
    shard = make_shard([0.0])
    workers, pushes = 4, 50
    calls = [0] * (workers * pushes)

    def count(version: int) -> None:
        calls[version - 1] += 1

    def worker(index: int) -> None:
        for sequence in range(pushes):
            shard.when_version(index * pushes + sequence + 1, lambda v=index * pushes + sequence + 1: count(v))
            shard.push(gradient([1.0], worker_id=str(index), sequence=sequence), roster=crew(workers))

    run_together([lambda index=index: worker(index) for index in range(workers)])
    assert calls == [1] * (workers * pushes)
