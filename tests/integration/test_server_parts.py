"""Replicas of several processes on a real server (Dean et al. 2012, section 3): what counts, who ends with whom."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

from pyps_wire import common_pb2 as common
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.partition import partition
from replicas import CUT
from support import AnyServer, ServerProcess, configure, events_of, inspect, status_of
from wire_worker import HARDSYNC, WireWorker, at_once, refusal_of, values_of

FAILED = wire.LeaveRequest.CAUSE_FAILED


@contextlib.contextmanager
def two_replicas(server: ServerProcess) -> Iterator[list[list[WireWorker]]]:
    """Two replicas of two processes, members of a run that serves."""
    with contextlib.ExitStack() as stack:
        replicas = [replica(stack, server, name) for name in ("r", "s")]
        for process in (*replicas[0], *replicas[1]):
            process.join()
        yield replicas


def outcomes(receipts: list[common.Receipt]) -> list[tuple[str, int]]:
    return [(common.Outcome.Name(receipt.outcome)[8:], receipt.num_workers) for receipt in receipts]


def versions_of(server: ServerProcess) -> list[int]:
    shards = inspect(server.control, "ListShards").shards
    return [shard.version for shard in sorted(shards, key=lambda shard: shard.shard_id)]


def test_a_process_that_fails_takes_its_replica_out_of_the_rounds_of_all_parts(start_server):
    server = start_server(*HARDSYNC, "--expected-workers", "2")
    with two_replicas(server) as ((r0, r1), (s0, s1)):
        at_once([partial(process.push_step, 1.0) for process in (r0, r1, s0, s1)])
        assert versions_of(server) == [1] * 5
        for process in (r0, r1):
            process.push_step(1.0, base_versions=1)
        s0.push_step(1.0, base_versions=1)
        s1.leave(FAILED)
        # Part 1 does without s, whose process for part 0 had pushed already.
        assert versions_of(server) == [2] * 5
        assert outcomes(r0.push_step(1.0, base_versions=2)) == [("APPLIED", 1)] * 3
        [event] = events_of(server, "replica")
        assert event == "replica s is out: its process s/1 failed: taken along s/0"
        for call in (s0.heartbeat, s0.hello, partial(s0.push_step, 1.0)):
            status, error, message = refusal_of(call)
            assert (status, error) == ("ABORTED", "ReplicaLost")
            assert "its process 's/1' failed" in message
        assert [member for member in status_of(server).roster if member.startswith("s")] == []


def test_the_processes_of_the_elected_replica_initialise_their_own_shards(start_server):
    server = start_server()
    with contextlib.ExitStack() as stack:
        processes, others = (replica(stack, server, name) for name in ("r", "s"))
        replies = [process.hello() for process in processes]
        assert [reply.initialize for reply in replies] == [True, True]
        assert replies[0].term == replies[1].term
        assert [process.hello().initialize for process in others] == [False, False]

        first = processes[1].initialize(replies[1].term, 2.0)
        again = processes[1].initialize(replies[1].term, 2.0)
        assert (first.state, again.state) == (common.RUN_STATE_INITIALIZING,) * 2
        second = processes[0].initialize(replies[0].term, 1.0)
        assert second.state == common.RUN_STATE_READY
        # What is sent again after that is no error.
        assert processes[1].initialize(replies[1].term, 2.0).state == common.RUN_STATE_READY

        numbers = {shard.shard_id: values_of(shard)[0] for shard in processes[0].observe()}
        assert numbers == {0: 1.0, 1: 1.0, 2: 1.0, 3: 2.0, 4: 2.0}


def test_processes_that_initialise_at_once_make_one_run(start_server):
    server = start_server()
    with contextlib.ExitStack() as stack:
        processes = replica(stack, server, "r")
        [term] = {process.hello().term for process in processes}
        replies = at_once([partial(process.initialize, term, 3.0) for process in processes * 2])
        assert processes[0].hello().state == common.RUN_STATE_READY
        # The last process finds the run begun.
        states = {reply.state for reply in replies}
        assert common.RUN_STATE_READY in states <= {common.RUN_STATE_INITIALIZING, common.RUN_STATE_READY}
        assert {float(number) for shard in processes[0].observe() for number in values_of(shard)} == {3.0}


def test_processes_of_a_replica_that_bring_different_models_are_refused(start_server):
    server = start_server()
    with contextlib.ExitStack() as stack:
        r0, r1 = replica(stack, server, "r")
        term = r0.hello().term
        r1.hello()
        r0.initialize(term)
        r1.plan = partition(type(CUT)(CUT.tensors, shard_size=160), num_servers=1)
        status, error, message = refusal_of(r1.initialize, term)
        assert (status, error) == ("INVALID_ARGUMENT", "InvalidArgument")
        assert (
            "the shards of replica 'r' so far have other lengths, or other servers, than those of process 'r/1'"
            in message
        )


def test_a_shard_of_a_part_that_was_not_declared_is_neither_pushed_nor_pulled(start_server):
    server = start_server()
    with two_replicas(server) as ((r0, r1), _):
        want = wire.PullRequest.Want(shard_id=3, held_version=-1)
        for call in (partial(r0.push, r0.push_request(1.0, 3)), partial(r0.pull, [want])):
            status, error, message = refusal_of(call)
            assert (status, error) == ("INVALID_ARGUMENT", "InvalidArgument")
            assert "shard 3 belongs to part 1 of the model, and worker 'r/0' declared part 0 in Hello" in message
        assert versions_of(server) == [0] * 5
        # A pull that names none brings its own, an observer's all.
        assert sorted(shard.shard_id for shard in r1.pull()) == [3, 4]
        assert sorted(shard.shard_id for shard in r1.observe()) == [0, 1, 2, 3, 4]


def test_a_process_that_says_what_cannot_be_is_refused(start_server):
    with two_replicas(start_server()) as ((r0, _), _others):
        for change, message in (
            ({"parts": [2]}, "worker 'r/0' declares part 2; the run's model has 2, from 0"),
            ({"replica": "other"}, "a process of replica 'other': the names of its processes begin with 'other/'"),
            ({"parts": [0, 1]}, "declares all parts of the model, and 'r/1' of the same replica part 1"),
        ):
            status, error, text = refusal_of(r0.hello, **change)
            assert (status, error) == ("INVALID_ARGUMENT", "InvalidArgument")
            assert message in text


def test_one_mutex_for_the_whole_model_and_workers_of_parts_refuse_each_other(start_server):
    with contextlib.ExitStack() as stack:
        r0, _ = replica(stack, start_server("--protocol", "asgd"), "r")
        status, error, message = refusal_of(r0.hello)
        assert (status, error) == ("INVALID_ARGUMENT", "InvalidArgument")
        assert "worker 'r/0' holds only part 0 of it: take asgd:mutex=shard" in message
    server = start_server()
    with two_replicas(server):
        assert "holds only part" in refusal_of(configure, server, protocol="asgd")[2]
        configure(server, protocol="asgd:mutex=shard")


def test_each_process_sends_the_learning_rates_of_its_own_shards(start_server):
    server = start_server()
    with two_replicas(server) as ((r0, r1), (s0, _)):
        for process, rate in ((r0, 0.5), (r1, 0.25)):
            assert {receipt.rate for receipt in process.push_step(1.0, learning_rate=rate)} == {rate}
        _, error, message = refusal_of(s0.push_step, 1.0, learning_rate=0.1)
        assert error == "ScheduleOwned"
        assert "worker 'r' owns the schedule" in message
        # The owner is gone with its replica.
        r1.leave(FAILED)
        assert {receipt.rate for receipt in s0.push_step(1.0, learning_rate=0.1)} == {0.1}


def replica(stack: contextlib.ExitStack, server: AnyServer, name: str) -> list[WireWorker]:
    """A life of a replica: its process of part 0, which leads, and that of part 1."""
    leader, other = (
        stack.enter_context(WireWorker(server.data, f"{name}/{part}", model=CUT, parts=[part], replica=name))
        for part in (0, 1)
    )
    other.sender.incarnation = leader.sender.incarnation
    return [leader, other]
