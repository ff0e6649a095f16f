"""The first parameters on their way in: memory is for one model, and others are answered meanwhile."""

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pyps.core.rule_settings import RuleSettings
from pyps.core.store import Store
from pyps.run.content import listed
from pyps.run.handshake import Greeting, Opening
from pyps.run.initialization import Initialization
from pyps.run.run import Run
from pyps.run_header import RunHeader
from pyps.storage.folder import CheckpointFolder
from pyps.storage.update_log import UpdateLogError
from pyps_wire.codecs import FLOAT32
from pyps_wire.errors import InvalidArgument, Superseded
from pyps_wire.partition import Partition, partition
from replicas import CUT
from shards import MODEL, Log, adagrad_shards, make_run, push, restored_run, write_checkpoint
from support import DEADLINE_SECONDS


def greeting_of(worker_id: str) -> Greeting:
    return Greeting("r", worker_id, 1, 1, "test", False, 0, 1, MODEL, None, "", "", 0, "")


def opening_of(worker_id: str, term: int) -> Opening:
    return Opening("r", worker_id, 1, term, partition(MODEL, num_servers=1), None, 0)


def begun(run: Run, opening: Opening) -> Initialization:
    initialization = run.begin_initialize(opening)
    assert initialization is not None
    return initialization


def fill(initialization: Initialization, plan: Partition) -> None:
    for shard in plan.shards:
        initialization.add(shard.shard_id, FLOAT32, memoryview(bytes(4 * shard.length)))


def test_an_initialisation_begun_anew_takes_the_place_of_the_one_before() -> None:
    run = make_run()
    term = run.hello(greeting_of("a"))
    first, second = begun(run, opening_of("a", term)), begun(run, opening_of("a", term))
    with pytest.raises(Superseded, match="'b' is not"):
        begun(run, opening_of("b", term))
    with pytest.raises(Superseded, match="again"):
        fill(first, first.partition)
    fill(second, second.partition)
    run.commit(second)
    assert run.content.shards


def test_a_worker_may_leave_before_there_is_a_run_and_leaves_no_turn_behind() -> None:
    run = make_run()
    run.hello(greeting_of("a"))
    run.rounds.complete_rounds()
    assert run.leave("r", "a", 1, failed=False, message="") == 0
    run.rounds.complete_rounds()
    assert run.hello(greeting_of("b")), "its turn is over"
    assert [event.kind for event in run.events] == ["joined", "left", "joined"]


def test_shards_are_listed_in_words_the_first_eight_of_many() -> None:
    words = {
        0: "no shards",
        1: "shard 0",
        8: "shards 0, 1, 2, 3, 4, 5, 6, 7",
        10: "shards 0, 1, 2, 3, 4, 5, 6, 7 and 2 more",
    }
    assert {count: listed(range(count)) for count in words} == words


class FullDisk(Log):
    """A log whose disk is full at first."""

    fails = True

    def begin(self, header: RunHeader, shards: Mapping[int, Store]) -> None:
        if self.fails:
            raise UpdateLogError("no space left on device")


def test_a_replica_whose_first_parameters_could_not_be_taken_sends_them_again_in_the_same_turn() -> None:
    log = FullDisk()
    run = make_run(recorder=log)
    plan = partition(CUT, num_servers=1)

    def send(part: int, term: int) -> None:
        initialization = begun(run, Opening("r", f"r/{part}", 1, term, plan, None, 0, replica="r"))
        fill(initialization, plan.of_parts({part}))
        run.commit(initialization)

    term, _ = [
        run.hello(Greeting("r", f"r/{i}", 1, 1, "", False, 0, 1, CUT, None, "", "", 0, "", parts=(i,), replica="r"))
        for i in (0, 1)
    ]
    send(0, term)
    with pytest.raises(UpdateLogError, match="no space"):
        send(1, term)
    assert not run.is_ready
    assert run.incoming is None
    log.fails = False
    send(0, term)
    send(1, term)
    assert run.is_ready


class SlowLog(Log):
    """A recorder whose disk takes nothing until it is told to."""

    def __init__(self) -> None:
        self.asked, self.goes_on = threading.Event(), threading.Event()

    def begin(self, header: RunHeader, shards: Mapping[int, Store]) -> None:
        self.asked.set()
        assert self.goes_on.wait(DEADLINE_SECONDS)


def test_others_are_answered_while_an_update_log_takes_the_first_parameters() -> None:
    log = SlowLog()
    run = make_run(recorder=log)
    initialization = begun(run, opening_of("a", run.hello(greeting_of("a"))))
    fill(initialization, initialization.partition)
    with ThreadPoolExecutor(2) as pool:
        committing = pool.submit(run.commit, initialization)
        assert log.asked.wait(DEADLINE_SECONDS)
        try:
            assert not pool.submit(run.hello, greeting_of("b")).result(DEADLINE_SECONDS)
            assert not run.content.shards
        finally:
            log.goes_on.set()
        committing.result(DEADLINE_SECONDS)
    assert run.content.shards


def test_a_server_whose_clock_is_set_back_goes_on_taking_lives_of_the_present(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of its own workers, and of new ones, whose clocks are right; after a restore too."""
    now, days = time.time_ns(), 24 * 3600 * 10**9
    run = make_run()
    first = replace(greeting_of("a"), incarnation=now)
    assert run.hello(first)
    monkeypatch.setattr("time.time_ns", lambda: now - 2 * days)
    run.hello(first)
    run.hello(replace(greeting_of("b"), incarnation=now + 10**9))
    with pytest.raises(InvalidArgument, match="days ahead of this server's clock"):
        run.hello(replace(greeting_of("c"), incarnation=now + 2 * days))

    folder = CheckpointFolder(tmp_path)
    shards = adagrad_shards()
    push(shards[0], np.ones(16), epoch=3, incarnation=now)
    write_checkpoint(folder, shards)
    restored = restored_run(folder)
    assert restored.content.origin == "resumed from a checkpoint at update 3"
    adagrad = RuleSettings.make("adagrad", ({"learning_rate": 0.1},))
    restored.hello(replace(greeting_of("a"), run_id="run-1", incarnation=now, optimizer=adagrad))
    with pytest.raises(InvalidArgument, match="days ahead of this server's clock"):
        make_run().hello(first)
