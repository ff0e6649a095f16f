"""Every push of a real job logged: each shard's log replayed gives its final bits (U4), and obeys 1.3's law."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from client_support import addresses, gradients_like, make_client, start_servers
from inspection import checksums, shell
from pyps.update_log import Completed, Ended, LoggedPush, Pulled, ShardLog, Updated, log_paths, replay
from pyps.update_log.lines import decode, encode
from shards import JOIN_SECONDS, run_together
from support import ServerThread, wait_until
from wire_worker import WireWorker

NUM_WORKERS = 4
STEPS = 12


@dataclass
class Job:
    """A finished job: its logs, and what the servers said of their shards at its end."""

    folder: Path
    final: dict[int, tuple[int, str]] = field(default_factory=dict)


@pytest.fixture
def job(start_server: Callable[..., ServerThread], tmp_path: Path) -> Job:
    """Two servers that log gradients, four workers that start to pull and push at once."""
    servers = start_servers(start_server, 2, "--update-log", str(tmp_path), "--log-gradients")
    pulled = threading.Barrier(NUM_WORKERS)

    def work(index: int) -> None:
        with make_client(addresses(servers), worker_id=f"worker-{index}", run_id="logged") as client:
            for step in range(STEPS):
                parameters = client.pull()
                if step == 0:
                    # All compute on the same parameters once, so that there is staleness.
                    pulled.wait(JOIN_SECONDS)
                client.push(gradients_like(parameters, seed=100 * index + step))

    run_together([partial(work, index) for index in range(NUM_WORKERS)])
    finished = Job(tmp_path)
    for server in servers:
        finished.final |= checksums(server.control)
        assert server.stop() == 0
    return finished


def test_four_workers_on_two_servers_replay_to_the_final_bits_and_obey_the_law(job: Job) -> None:
    paths = log_paths(job.folder)
    assert len(paths) == len(job.final) >= 4
    staleness_sum = 0
    for path in paths:
        replayed = replay(path)
        assert replayed.ended and not replayed.difference
        assert (replayed.version, replayed.checksum) == job.final[replayed.shard_id]
        assert replayed.updates == NUM_WORKERS * STEPS
        staleness_sum += check_conservation_law(path)
    assert staleness_sum >= len(paths) * sum(range(NUM_WORKERS)), "the law was not put to the test"

    shown = shell("replay", str(job.folder))
    for _, checksum in job.final.values():
        assert checksum in shown
    assert shown.count("yes") == len(paths)

    first = next(event for event in ShardLog(paths[0]).events() if isinstance(event, LoggedPush) and event.checksum)
    tamper(paths[0], first.checksum)
    words = " ".join(shell("replay", str(job.folder), status=1).split())
    assert f"{paths[0]}: update 1, by push" in words
    assert f"logged as 00000000, replayed it is {first.checksum} at version 1" in words
    assert f"1 of {len(paths)} logs do not replay" in words

    paths[1].write_bytes(paths[1].read_bytes()[:-50] + b"x" * 49 + b"\n")
    words = " ".join(shell("replay", str(job.folder), status=1).split())
    assert f"{paths[1]} is damaged" in words
    assert f"1 of {len(paths)} logs do not replay to what was logged; 1 could not be replayed" in words


def tamper(path: Path, checksum: str) -> None:
    """Writes another checksum for the update that has this one."""
    lines = [decode(line) for line in path.read_bytes().splitlines(keepends=True)]
    changed = [{**line, "checksum": "0" * 8} if line.get("checksum") == checksum else line for line in lines if line]
    path.write_bytes(b"".join(map(encode, changed)))


def check_conservation_law(path: Path) -> int:
    """The conservation law in integers, on one shard's log in its order; returns the sum of staleness.

    SUM_l SUM_k (T_push - T_pull) = SUM_l (T_lastpush - T_firstpull) - SUM_l SUM_k (T_pull[k+1] - T_push[k]),
    T read before the push's own update.
    """
    pulls: dict[str, list[int]] = {}
    pushes: dict[str, list[int]] = {}
    staleness_sum = version = 0
    for event in ShardLog(path).events():
        if isinstance(event, Pulled):
            held, pushed = pulls.setdefault(event.worker_id, []), pushes.get(event.worker_id, [])
            if len(held) > len(pushed):
                # The worker looked again before it pushed: the later look is what its gradient is of.
                held[-1] = event.version
            else:
                held.append(event.version)
            assert event.version == version
        elif isinstance(event, LoggedPush):
            worker, receipt = event.gradient.worker_id, event.receipt
            # U1: the version grows by exactly one with each update; staleness is never negative.
            assert (receipt.version_before, receipt.version_after) == (version, version + 1)
            version += 1
            assert event.gradient.base_version == pulls[worker][-1]
            assert receipt.staleness == receipt.version_before - event.gradient.base_version >= 0
            staleness_sum += receipt.staleness
            pushes.setdefault(worker, []).append(receipt.version_before)
    assert len(pushes) == NUM_WORKERS
    boundary = sum(pushes[worker][-1] - pulls[worker][0] for worker in pushes)
    between = 0
    for worker, versions in pushes.items():
        # A pull after the last push belongs to no gradient.
        taken = pulls[worker][: len(versions)]
        assert len(taken) == len(versions) == STEPS
        between += sum(later - earlier for later, earlier in zip(taken[1:], versions, strict=False))
    assert staleness_sum == boundary - between
    # Every push triggered an update of its own: so many, at least, lie between a push and the next pull.
    assert between >= sum(len(versions) - 1 for versions in pushes.values())
    return staleness_sum


def test_a_round_that_a_worker_left_is_replayed_to_the_final_bits(
    start_server: Callable[..., ServerThread], tmp_path: Path
) -> None:
    server = start_server("--protocol", "hardsync", "--update-log", str(tmp_path), "--log-gradients")
    with WireWorker(server.data, "a") as a, WireWorker(server.data, "b") as b:
        a.join()
        b.join()
        a.push(a.push_request(1.0))
        # From here on both count, and both are waited for.
        b.push(b.push_request(0.7, base_version=1))
        a.push(a.push_request(0.1, base_version=1))
        a.push(a.push_request(0.3, base_version=2))
        b.leave()
        wait_until(lambda: checksums(server.control)[0][0] == 3, what="the round without the worker that left")
        final = checksums(server.control)[0]
        assert server.stop() == 0
    (path,) = log_paths(tmp_path)
    replayed = replay(path)
    assert (replayed.difference, replayed.ended, replayed.updates) == ("", True, 3)
    assert (replayed.version, replayed.checksum) == final
    assert [type(event) for event in ShardLog(path).events()][-3:] == [Completed, Updated, Ended]


def test_a_log_without_gradients_is_not_taken_for_a_damaged_one(
    start_server: Callable[..., ServerThread], tmp_path: Path
) -> None:
    server = start_server("--update-log", str(tmp_path))
    with WireWorker(server.data) as worker:
        worker.join()
        worker.push(worker.push_request(1.0))
    words = " ".join(shell("replay", str(tmp_path), status=1).split())
    assert "holds no gradients: a server keeps them with --log-gradients" in words
    assert "could not be replayed, so nothing is said of what they hold" in words and "do not replay" not in words
