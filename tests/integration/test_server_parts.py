"""Replicas of several processes on a real server (Dean et al. 2012, section 3): what counts, who ends with whom."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import grpc
import pytest

from cut_model import CUT
from inspection import inspect
from pyps_wire import common_pb2 as common
from pyps_wire import parameter_server_pb2 as wire
from support import ServerProcess, wait_until
from wire_replica import WireProcess, join, replica
from wire_worker import (
    QUICK_LEASES,
    WireWorker,
    at_once,
    beating,
    configure,
    events_of,
    refusal_of,
    status_of,
    values_of,
    wait_for_event,
)

HARDSYNC = ("--protocol", "hardsync", "--staleness", "none")
FAILED = wire.LeaveRequest.CAUSE_FAILED


@contextlib.contextmanager
def two_replicas(server: ServerProcess) -> Iterator[list[list[WireProcess]]]:
    """Two replicas of two processes, members of a run that serves."""
    with contextlib.ExitStack() as stack:
        replicas = [replica(stack, server, name) for name in ("r", "s")]
        for processes in replicas:
            join(processes)
        yield replicas


def outcomes(receipts: list[common.Receipt]) -> list[tuple[str, int]]:
    return [(common.Outcome.Name(receipt.outcome)[8:], receipt.num_workers) for receipt in receipts]


def versions_of(server: ServerProcess) -> list[int]:
    """The versions of all shards: three of part 0, then two of part 1."""
    shards = inspect(server.control, "ListShards").shards
    return [shard.version for shard in sorted(shards, key=lambda shard: shard.shard_id)]


def test_a_round_of_a_part_is_complete_with_the_pushes_of_those_that_hold_it(start_server):
    server = start_server(*HARDSYNC, "--expected-workers", "2")
    with two_replicas(server) as ((r0, r1), (s0, s1)):
        assert {outcome for outcome, _ in outcomes(r0.push_own(1.0))} == {"PENDING"}
        assert outcomes(s0.push_own(1.0)) == [("APPLIED", 2)] * 3
        assert versions_of(server) == [1, 1, 1, 0, 0]
        s1.push_own(1.0)
        assert outcomes(r1.push_own(1.0)) == [("APPLIED", 2)] * 2
        assert versions_of(server) == [1, 1, 1, 1, 1]


def test_beside_replicas_a_worker_that_holds_all_parts_counts_for_each(start_server):
    server = start_server(*HARDSYNC, "--expected-workers", "2")
    with contextlib.ExitStack() as stack:
        r0, r1 = replica(stack, server, "r")
        join([r0, r1])
        whole = stack.enter_context(WireWorker(server.data, "a", model=CUT))
        whole.join()
        assert {outcome for outcome, _ in outcomes(whole.push_step(1.0))} == {"PENDING"}
        assert outcomes(r1.push_own(1.0)) == [("APPLIED", 2)] * 2
        assert outcomes(r0.push_own(1.0)) == [("APPLIED", 2)] * 3


def test_a_process_that_fails_takes_its_replica_out_of_the_rounds_of_all_parts(start_server):
    server = start_server(*HARDSYNC, "--expected-workers", "2")
    with two_replicas(server) as ((r0, r1), (s0, s1)):
        at_once([partial(process.push_own, 1.0) for process in (r0, r1, s0, s1)])
        assert versions_of(server) == [1] * 5
        for process in (r0, r1):
            process.push_own(1.0, base_version=1)
        s0.push_own(1.0, base_version=1)
        s1.leave(FAILED)
        # Part 1 does without s, whose process for part 0 had pushed already.
        assert versions_of(server) == [2] * 5
        assert outcomes(r0.push_own(1.0, base_version=2)) == [("APPLIED", 1)] * 3
        [event] = events_of(server, "replica")
        assert event == "replica s is out: its process s/1 failed: taken along s/0"
        for call in (s0.heartbeat, s0.hello, partial(s0.push_own, 1.0)):
            status, error, message = refusal_of(call)
            assert (status, error) == ("ABORTED", "ReplicaLost")
            assert "its process 's/1' failed" in message
        assert [member for member in status_of(server).roster if member.startswith("s")] == []


def test_a_process_that_falls_silent_holds_the_others_up_for_its_lease_at_most(start_server):
    server = start_server(*HARDSYNC, *QUICK_LEASES, "--expected-workers", "2")
    with two_replicas(server) as ((r0, r1), (s0, s1)):
        with beating([r0, r1, s0, s1]):
            at_once([partial(process.push_own, 1.0) for process in (r0, r1, s0, s1)])
        with beating([r0, r1]):
            for process in (r0, r1):
                process.push_own(1.0, base_version=1)
            # s/1 is dead; s/0 goes on until it is told.
            wait_until(lambda: refused_as_lost(s0), what="s/0 is told that its replica is lost")
            wait_until(lambda: versions_of(server) == [2] * 5, what="the rounds of both parts are complete")
        wait_for_event(server, "replica", "its process s/1 was lost")


def test_a_server_that_stood_still_for_longer_than_a_lease_loses_nobody(start_server):
    ahead_seconds = [0.0]
    server = start_server(*HARDSYNC, "--expected-workers", "2", clock=lambda: time.monotonic() + ahead_seconds[0])
    with two_replicas(server) as ((r0, r1), (s0, s1)):
        # Between two looks at its clock, as if its machine had slept.
        ahead_seconds[0] = 40.0
        wait_for_event(server, "standstill", "the server stood still")
        at_once([partial(process.push_own, 1.0) for process in (r0, r1, s0, s1)])
        assert versions_of(server) == [1] * 5
        assert events_of(server, "expired") == events_of(server, "replica") == []


def refused_as_lost(process: WireProcess) -> bool:
    try:
        process.heartbeat()
    except grpc.RpcError as error:
        return "replica 's' is out of the run: its process 's/1' was silent" in str(error.details())
    return False


def test_a_later_life_of_a_replica_takes_it_over_and_joins_the_rounds(start_server):
    server = start_server(*HARDSYNC, "--expected-workers", "2")
    with two_replicas(server) as ((r0, r1), (s0, s1)), contextlib.ExitStack() as stack:
        at_once([partial(process.push_own, 1.0) for process in (r0, r1, s0, s1)])
        later = replica(stack, server, "s")
        later[0].hello()
        assert refusal_of(s1.heartbeat)[:2] == ("ABORTED", "Superseded")
        later[1].hello()
        assert refusal_of(s0.heartbeat)[:2] == ("ABORTED", "Superseded")
        # One of an earlier life that comes too late changes nothing.
        assert refusal_of(s1.hello)[:2] == ("ABORTED", "Superseded")
        for process in later:
            process.push_own(1.0, base_version=1)
        assert outcomes(r0.push_own(1.0, base_version=1))[-1] == ("APPLIED", 2)
        assert outcomes(r1.push_own(1.0, base_version=1))[-1] == ("APPLIED", 2)
        [event] = events_of(server, "replica")
        assert event == "replica s is out: a later life of it has begun: taken along s/0, s/1"


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
        assert {reply.state for reply in replies} <= {common.RUN_STATE_INITIALIZING, common.RUN_STATE_READY}
        assert {float(number) for shard in processes[0].observe() for number in values_of(shard)} == {3.0}


def test_after_a_process_that_died_while_it_initialised_another_replica_is_elected(start_server):
    server = start_server(*QUICK_LEASES)
    with contextlib.ExitStack() as stack:
        r0, r1 = replica(stack, server, "r")
        s = replica(stack, server, "s")
        term = r0.hello().term
        r1.hello()
        assert r0.initialize(term, 5.0).state == common.RUN_STATE_INITIALIZING
        break_off(r1, term)
        r1.leave(FAILED)
        assert refusal_of(r0.initialize, term, 5.0)[:2] == ("ABORTED", "ReplicaLost")

        wait_until(lambda: s[1].hello().initialize, what="the other replica is elected")
        join(s, 7.0)
        assert s[0].hello().state == common.RUN_STATE_READY
        assert {float(number) for shard in s[0].observe() for number in values_of(shard)} == {7.0}


def break_off(process: WireProcess, term: int) -> None:
    """Begins to initialise and is cut off once the server has taken a shard."""
    sent, cut = threading.Event(), threading.Event()

    def messages() -> Iterator[wire.InitializeRequest]:
        for number, message in enumerate(process.initialize_messages(term, 5.0)):
            if number == 2:
                sent.set()
                assert cut.wait(60)
            yield message

    call = process.stub.Initialize.future(messages(), timeout=60)
    assert sent.wait(60)
    call.cancel()
    cut.set()
    with pytest.raises(grpc.FutureCancelledError):
        call.result()


def test_processes_of_a_replica_that_bring_different_models_are_refused(start_server):
    server = start_server()
    with contextlib.ExitStack() as stack:
        r0, r1 = replica(stack, server, "r")
        term = r0.hello().term
        r1.hello()
        r0.initialize(term)
        r1.model = type(CUT)(CUT.tensors, shard_size=160)
        status, error, message = refusal_of(r1.initialize, term)
        assert (status, error) == ("INVALID_ARGUMENT", "BadRequest")
        assert "shard_size is 80 in replica 'r' so far, but 160 in process 'r/1'" in message


def test_a_shard_of_a_part_that_was_not_declared_is_neither_pushed_nor_pulled(start_server):
    server = start_server()
    with two_replicas(server) as ((r0, r1), _):
        want = wire.PullRequest.Want(shard_id=3, held_version=-1)
        for call in (partial(r0.push, r0.push_request(1.0, 3)), partial(r0.pull, [want])):
            status, error, message = refusal_of(call)
            assert (status, error) == ("INVALID_ARGUMENT", "BadRequest")
            assert "shard 3 belongs to part 1 of the model, and worker 'r/0' declared part 0 in Hello" in message
        assert versions_of(server) == [0] * 5
        # A pull that names none brings its own, an observer's all.
        assert sorted(shard.shard_id for shard in r1.pull()) == [3, 4]
        assert sorted(shard.shard_id for shard in r1.observe()) == [0, 1, 2, 3, 4]


def test_replicas_take_turns_by_the_word_of_their_leaders(start_server):
    server = start_server("--protocol", "serial", "--staleness", "none", "--expected-workers", "2")
    with two_replicas(server) as replicas, ThreadPoolExecutor(2) as pool:
        turns = {pool.submit(processes[0].proceed, 0): processes for processes in replicas}
        # Nobody else has to ask for it.
        for version in range(2):
            [turn], _ = futures.wait(turns, 60, futures.FIRST_COMPLETED)
            processes = turns.pop(turn)
            for process in processes:
                assert {outcome for outcome, _ in outcomes(process.push_own(1.0, version))} == {"APPLIED"}
            assert versions_of(server) == [version + 1] * 5
            # That one process is done ends no turn; that the last is done ends it.
            processes[1].leave()
            assert not any(other.done() for other in turns)
            processes[0].leave()


def test_a_process_that_says_what_cannot_be_is_refused(start_server):
    with two_replicas(start_server()) as ((r0, _), _others):
        for change, message in (
            ({"parts": [2]}, "worker 'r/0' declares part 2; the run's model has 2, from 0"),
            ({"replica": "other"}, "a process of replica 'other': the names of its processes begin with 'other/'"),
            ({"parts": [0, 1]}, "declares all parts of the model, and 'r/1' of the same replica part 1"),
        ):
            status, error, text = refusal_of(r0.hello, **change)
            assert (status, error) == ("INVALID_ARGUMENT", "BadRequest")
            assert message in text


def test_a_protocol_of_one_mutex_takes_no_worker_of_a_part(start_server):
    server = start_server("--protocol", "asgd")
    with contextlib.ExitStack() as stack:
        r0, _ = replica(stack, server, "r")
        status, error, message = refusal_of(r0.hello)
        assert (status, error) == ("INVALID_ARGUMENT", "BadRequest")
        assert "worker 'r/0' holds only part 0 of it: take asgd:mutex=shard" in message


def test_beside_workers_of_parts_no_protocol_of_one_mutex_is_set(start_server):
    server = start_server()
    with two_replicas(server):
        status, error, message = refusal_of(configure, server, protocol="asgd")
        assert (status, error) == ("INVALID_ARGUMENT", "BadRequest")
        assert "holds only part" in message
        configure(server, protocol="asgd:mutex=shard")


def test_each_process_sends_the_learning_rates_of_its_own_shards(start_server):
    server = start_server()
    with two_replicas(server) as ((r0, r1), (s0, _)):
        for process, rate in ((r0, 0.5), (r1, 0.25)):
            assert {receipt.rate for receipt in process.push_own(1.0, learning_rate=rate)} == {rate}
        _, error, message = refusal_of(s0.push_own, 1.0, learning_rate=0.1)
        assert error == "ScheduleOwned"
        assert "worker 'r' owns the schedule" in message
        # The owner is gone with its replica.
        r1.leave(FAILED)
        assert {receipt.rate for receipt in s0.push_own(1.0, learning_rate=0.1)} == {0.1}
