"""Shared memory of workers that hold a part of the model: their own vectors, and no other shard."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from pyps_wire import local_pb2 as local
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.errors import InvalidArgument, NotInitialized, ReplicaLost
from replicas import CUT, cut_run, push_tensors, vectors_of, whole_tensors
from support import AnyServer, Start, checksums, inspect, wait_until, workers_of
from wire_worker import LocalSocket, LocalWorker, local_worker, maps_of, refusal_of


@pytest.fixture
def server(start_server_process: Start) -> Iterator[AnyServer]:
    """A server that holds both parts of the cut model, the numbers of `whole_tensors` in it."""
    server = start_server_process()
    with cut_run([server]) as workers:
        push_tensors(workers, whole_tensors())
        yield server


@contextmanager
def replica(server: AnyServer, name: str = "r") -> Iterator[list[LocalWorker]]:
    """Both processes of a replica, which have joined, attached the vectors of their parts and pulled them."""
    with (
        LocalWorker(server.data, f"{name}/0", model=CUT, parts=[0], replica=name) as first,
        LocalWorker(server.data, f"{name}/1", model=CUT, parts=[1], replica=name) as second,
    ):
        second.sender.incarnation = first.sender.incarnation
        for process in (first, second):
            process.begin()
        yield [first, second]


def ids_of(worker: LocalWorker) -> list[int]:
    return [shard.shard_id for shard in worker.own.shards]


def test_each_process_of_a_replica_shares_the_vectors_of_its_part_alone(server):
    expected = vectors_of(whole_tensors())
    with replica(server) as processes:
        for part, process in enumerate(processes):
            (parameters,) = process.parameters
            np.testing.assert_array_equal(parameters, expected[part])
            process.gradients[0][0][:] = part + 1.0
            replies = process.exchange()
            assert [reply.receipt.shard_id for reply in replies] == ids_of(process)
            np.testing.assert_array_equal(parameters, expected[part] - np.float32(part + 1.0))
        found = workers_of(server.control)
        for part, process in enumerate(processes):
            info = found[f"r/{part}"]
            assert (info.replica, list(info.parts), info.transport) == ("r", [part], "shm")
            assert list(info.shards_pushed) == list(info.shards_pulled) == ids_of(process)
        assert not set(ids_of(processes[0])) & set(ids_of(processes[1]))


def test_a_shard_has_as_many_workers_as_declared_its_part(server):
    with replica(server) as (first, _):
        first.exchange()
        shards = inspect(server.control, "ListShards").shards
    # The worker that holds all parts has pushed to each; the replica's first process to those of part 0.
    assert {shard.shard_id: (shard.part, shard.num_workers) for shard in shards} == {
        shard.shard_id: (first.plan.part_of(shard.shard_id), 1 + (shard.shard_id in ids_of(first)))
        for shard in first.plan.shards
    }


def test_shards_of_other_parts_are_refused_in_the_words_of_grpc(server):
    with replica(server) as (first, second):
        theirs = ids_of(second)[0]
        status, name, words = refusal_of(first.push, first.push_request(1.0, theirs))
        assert (status, name) == ("INVALID_ARGUMENT", "InvalidArgument")
        assert f"shard {theirs} belongs to part 1" in words and "'r/0'" in words and "part 0" in words
        want = wire.PullRequest.Want(shard_id=theirs, held_version=-1)
        pull = wire.PullRequest(epoch=first.epoch, wants=[want])
        for request in (
            first.exchange_request([theirs]),
            first.exchange_request([*ids_of(first), theirs]),
            local.LocalRequest(pull=local.LocalPull(request=pull)),
        ):
            with pytest.raises(InvalidArgument) as refused:
                first.link.ask(request)
            assert str(refused.value) == words
        assert {reply.version for reply in first.exchange()} == {2}


def test_vectors_of_the_whole_model_are_too_many_for_a_part(server):
    with LocalWorker(server.data, "r/0", model=CUT, parts=[0], replica="r") as worker:
        worker.hello()
        link = LocalSocket(worker.offer.address)
        request = worker.attach_request(parameters=local.LocalVectors(codec=1, offsets=[4096, 8192]))
        with pytest.raises(InvalidArgument, match="names 2 vectors; the worker's parts of the model have 1 groups"):
            link.ask(request, worker.descriptor)
        link.close()


def test_a_worker_that_declares_other_parts_attaches_its_memory_anew(server):
    with local_worker(server.data, "solo", model=CUT, parts=[0]) as worker:
        worker.hello(parts=[0, 1])
        theirs = next(shard.shard_id for shard in worker.plan.shards if shard.shard_id not in ids_of(worker))
        with pytest.raises(NotInitialized, match="attach it again"):
            worker.link.ask(worker.exchange_request([theirs]))
        assert {reply.version for reply in worker.exchange()} == {2}


def test_the_memory_of_a_replica_that_lost_a_process_is_let_go_and_nothing_more_is_taken(server):
    with replica(server) as (first, second):
        before = checksums(server.control)
        assert maps_of(server.pid)
        second.leave(wire.LeaveRequest.CAUSE_FAILED)
        first.gradients[0][0][:] = 1.0
        # Refused, or cut off where the server has looked after its connections meanwhile.
        with pytest.raises((ReplicaLost, EOFError, ConnectionError)):
            first.exchange()
        _, name, words = refusal_of(first.push, first.push_request(1.0, ids_of(first)[0]))
        assert name == "ReplicaLost" and "'r/1'" in words
        wait_until(lambda: not maps_of(server.pid), what="the end of the replica's mappings")
        assert checksums(server.control) == before
