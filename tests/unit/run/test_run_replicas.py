"""A run over real shards whose workers are replicas, without a server: rounds, stalls, the gate, a restored run."""

from dataclasses import replace

import numpy as np
import pytest

from pyps.core.gradient import Gradient, PushPlan
from pyps.core.receipt import Outcome
from pyps.run.content import ReadyContent
from pyps.run.handshake import Greeting, Opening
from pyps_wire.codecs import FLOAT32
from pyps_wire.errors import InvalidArgument, ReplicaLost, Superseded
from pyps_wire.partition import partition
from replicas import CUT
from shards import Clock, RunDriver, make_run

PLAN = partition(CUT, num_servers=1)


class Replicas(RunDriver):
    def __init__(self, *names: str, **flags: str) -> None:
        self.clock = Clock()
        self.run = make_run(clock=self.clock, **{"protocol": "hardsync", **flags})
        self._sequence = 0
        for name in names:
            terms = [self.hello(name, part) for part in (0, 1)]
            for part in (0, 1):
                if terms[part]:
                    self.initialize(name, part, terms[part])

    def hello(self, name: str, part: int, life: int = 1) -> int:
        return self.greet(name, part, life, parts=(part,))

    def greet(self, name: str, index: int, life: int = 1, *, parts: tuple[int, ...]) -> int:
        greeting = Greeting(
            "r", f"{name}/{index}", life, 1, "test", False, 0, 1, CUT, None, "", "", 0, "", parts=parts, replica=name
        )
        return self.run.hello(greeting)

    def initialize(self, name: str, part: int, term: int, life: int = 1) -> None:
        opening = Opening("r", f"{name}/{part}", life, term, PLAN, None, 0, replica=name)
        initialization = self.run.begin_initialize(opening)
        for shard in PLAN.of_parts({part}).shards:
            initialization.add(shard.shard_id, FLOAT32, memoryview(np.zeros(shard.length, np.float32).tobytes()))
        self.run.commit(initialization)

    def push(self, name: str, part: int, version: int = 0, life: int = 1) -> list[Outcome]:
        self._sequence += 1
        outcomes = []
        for shard in PLAN.of_parts({part}).shards:
            payload = np.ones(shard.length, np.float32).tobytes()
            gradient = Gradient(f"{name}/{part}", life, self._sequence, version, 0, FLOAT32, payload, example_count=1)
            outcomes.append(self.run.push(PushPlan(shard.shard_id, gradient), run_id="r").receipt.outcome)
        return outcomes

    def round(self, *names: str, version: int = 0) -> None:
        for name in names:
            for part in (0, 1):
                self.push(name, part, version)

    def versions(self) -> list[int]:
        versions = [
            {self.run.content.shards[s.shard_id].version for s in PLAN.of_parts({part}).shards} for part in (0, 1)
        ]
        return [version for of_part in versions for version in of_part]


PROCESSES = ("a/0", "a/1", "b/0", "b/1")


def test_rounds_of_one_part_do_not_wait_for_the_pushes_to_another():
    replicas = Replicas("a", "b", expected_workers="2")
    for version in range(3):
        replicas.push("a", 0, version)
        assert set(replicas.push("b", 0, version)) == {Outcome.APPLIED}
    assert replicas.versions() == [3, 0]


def test_a_lost_process_completes_the_rounds_of_all_parts_without_its_replica():
    replicas = Replicas("a", "b", expected_workers="2")
    replicas.round("a", "b")
    replicas.round("a", version=1)
    assert replicas.versions() == [1, 1]

    replicas.pass_seconds(31, "a/0", "a/1", "b/0")

    assert replicas.versions() == [2, 2]
    assert replicas.events("replica") == ["replica b is out: its process b/1 was lost: taken along b/0"]
    assert replicas.events("round") == [
        "rounds were completed without a worker that others waited for: worker b, shards 5, workers 1"
    ]
    with pytest.raises(ReplicaLost):
        replicas.push("b", 0, 1)


def test_a_process_that_holds_others_up_stalls_with_its_replica_and_comes_back_by_its_pushes():
    replicas = Replicas("a", "b", expected_workers="2", stall_seconds="10")
    replicas.round("a", "b")
    replicas.round("a", version=1)
    replicas.push("b", 0, 1)

    replicas.pass_seconds(12, *PROCESSES)

    # b/1 alone was waited for.
    assert replicas.versions() == [2, 2]
    [message] = replicas.events("stalled")
    assert "worker b/1" in message
    assert replicas.run.membership.roster.workers == ("a",)
    replicas.round("a", "b", version=2)
    assert replicas.run.membership.roster.workers == ("a", "b")


def test_the_gate_counts_replicas_part_by_part():
    replicas = Replicas("a", "b", expected_workers="2", stall_seconds="10")
    replicas.round("a")
    replicas.push("b", 0)
    assert replicas.versions() == [1, 0]
    assert replicas.run.content.shards[3].waiting_for(replicas.run.rounds.roster_of(3)) == ("b/1",)

    replicas.pass_seconds(12, *PROCESSES)

    assert replicas.versions() == [1, 1]
    assert "waited for b/1" in replicas.events("stalled")[0]


def test_a_replica_takes_its_turn_as_one_worker():
    replicas = Replicas("a", "b", expected_workers="2", protocol="serial")

    def asks(name: str, clock: int) -> bool:
        return replicas.run.may_proceed("r", f"{name}/0", 1, clock=clock, wake=lambda: None)

    assert not asks("a", 0)
    assert replicas.run.rounds.waited_for_by("a/0") == ("b",)
    asks("b", 0)
    assert asks("a", 0)
    assert not asks("b", 0)
    assert replicas.run.rounds.waited_for_by("b/0") == ("a",)

    replicas.run.leave("r", "a/1", 1, failed=True, message="")

    assert asks("b", 0)


def test_a_restored_run_waits_for_as_many_replicas_as_had_pushed():
    replicas = Replicas("a", "b", expected_workers="2")
    replicas.round("a", "b")
    replicas.round("a", version=1)
    contributors = {worker_id for shard in replicas.run.content.shards.values() for worker_id in shard.contributors()}
    assert contributors == {"a/0", "a/1"}

    content = replicas.run.content
    assert isinstance(content, ReadyContent)
    for told, missing in (("0", 1), ("3", 3)):
        again = Replicas(protocol="hardsync", expected_workers=told)
        again.run.rounds.begin(replace(content, initializer=None))
        assert again.run.membership.roster.missing == missing, told
        # Those that live have said so by then.
        again.pass_seconds(31)
        assert again.run.membership.roster.missing == 0, told


def test_a_backup_that_leaves_nobody_for_a_part_is_refused_before_anything_changes():
    replicas = Replicas("a", "b", protocol="async")
    for name, part in (("a", 0), ("b", 0), ("a", 1)):
        replicas.push(name, part)

    with pytest.raises(InvalidArgument, match="waits for none of 1 workers"):
        replicas.run.configure(protocol="backup:b=1")

    assert replicas.run.rounds.behaviour.aggregation.text == "async"


def test_parts_are_named_once_in_ascending_order_and_a_replica_as_none_of_its_processes_could_be():
    replicas = Replicas()
    for parts in ((1, 0), (0, 0)):
        with pytest.raises(
            InvalidArgument, match=f"declares the parts {parts[0]}, {parts[1]}: name each once, in ascend"
        ):
            replicas.greet("a", 0, parts=parts)
    for name, what in {" ": "blank", "a/0": "what follows a '/'"}.items():
        with pytest.raises(InvalidArgument, match=what):
            replicas.hello(name, 0)
        with pytest.raises(InvalidArgument, match=what):
            replicas.initialize(name, 0, 1)


def test_nobody_brings_a_run_of_replicas_under_sandblaster():
    replicas = Replicas("a", "b", protocol="async")
    with pytest.raises(InvalidArgument, match="trains by async, and sandblaster would end each of its workers"):
        replicas.run.configure(protocol="sandblaster")
    assert set(replicas.push("a", 0)) == {Outcome.APPLIED}


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_replica_that_is_lost_before_there_are_parameters_loses_its_turn_and_what_it_sent(is_silent):
    replicas = Replicas(lease_seconds="8")
    [term] = {replicas.hello("a", part) for part in (0, 1)}
    replicas.initialize("a", 0, term)
    if is_silent:
        # The leader goes on saying Hello, which keeps its turn and not the life of another process.
        with pytest.raises(ReplicaLost, match="'a/1' was silent"):
            for _ in range(10):
                replicas.clock.now += 1.0
                replicas.run.tick()
                replicas.hello("a", 0)
        assert replicas.events("replica") == ["replica a is out: its process a/1 was lost: taken along a/0"]
    else:
        replicas.run.leave("r", "a/1", 1, failed=True, message="")

    # Nobody waits for the end of its turn.
    later = replicas.hello("b", 0)
    replicas.hello("b", 1)
    assert later == term + 1
    replicas.initialize("b", 1, later)
    assert not replicas.run.content.shards

    with pytest.raises(ReplicaLost, match="'a/1' was silent" if is_silent else "'a/1' failed"):
        replicas.initialize("a", 1, term)
    replicas.hello("c", 0)
    with pytest.raises(Superseded):
        replicas.initialize("c", 0, term)
    replicas.initialize("b", 0, later)
    assert len(replicas.run.content.shards) == 5
    assert replicas.run.incoming is None
