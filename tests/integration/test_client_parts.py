"""Several processes as one worker: each joins with its own parts of the model, and talks to its own shards alone.

They lose a server or one of themselves, and come back. The processes are threads here, with a session and connections
of their own each; the servers are real.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import pytest

from client_support import addresses, start_servers
from pyps.core.arrays import Floats
from pyps_client import Launch, ModelMismatch, Observer, PypsError, RunFinished, Session, Superseded
from pyps_client.data.queue import RemoteQueue
from pyps_client.push import Plan
from pyps_wire.errors import ReplicaLost
from pyps_wire.partition import Model, Tensor
from pyps_wire.work_pb2 import DataSpec, LeaseReply
from replicas import CUT, SGD, Meeting, ThreadPeers, on_all, session_of, vectors_of, whole_tensors
from support import ServerThread, server_port, wait_until, workers_of

T = TypeVar("T")

pytestmark = pytest.mark.usefixtures("nobody_hangs")
QUICK = ("--heartbeat-seconds", "0.1")


# Of shards that the parts of CUT make: those of part 0 lie on server 0 of two, those of part 1 on server 1.
SHARDS = ([0, 1, 2], [3, 4])


def in_replica(servers: str, work: Callable[[Session, ThreadPeers], T], name: str = "r") -> list[T]:
    """What the two processes of a replica, each with its session open, make of `work`."""

    def process(peers: ThreadPeers) -> T:
        with session_of(servers, peers) as session:
            return work(session, peers)

    return on_all(Meeting(name, 2), process)


def zeros_of(session: Session) -> list[Floats]:
    return [np.zeros(size, np.float32) for size in session.model.group_sizes]


def pulled(session: Session) -> list[Floats]:
    vectors = zeros_of(session)
    session.pull(vectors)
    return vectors


def ones(session: Session, value: float = 1.0) -> list[Floats]:
    return [np.full(size, value, np.float32) for size in session.model.group_sizes]


def snapshot(servers: str) -> dict[str, Floats]:
    with Observer(servers) as observer:
        return observer.snapshot()


def moved(by: float, seed: int = 1) -> dict[str, Floats]:
    """The first parameters after steps of plain SGD that sum up to `by` in every number."""
    return {name: values + np.float32(by) for name, values in whole_tensors(seed).items()}


def assert_equal(tensors: dict[str, Floats], expected: dict[str, Floats], **tolerance: float) -> None:
    assert tensors.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(tensors[name], values, err_msg=name, **({"rtol": 1e-6, "atol": 1e-6} | tolerance))


def error_of(call: Callable[[], object]) -> PypsError:
    with pytest.raises(PypsError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize("transport", ["grpc", "shm"])
def test_a_replica_creates_a_run_each_process_with_its_own_shards(start_server, transport):
    servers = start_servers(start_server, 2)
    told = addresses(servers)
    meeting = Meeting("r", 2)

    def work(peers: ThreadPeers) -> list[list[int]]:
        with session_of(told, peers, transport=transport) as session:
            lent = session.lend()
            session.pull(lent.parameters)
            np.testing.assert_array_equal(lent.parameters[0], vectors_of(whole_tensors())[peers.index])
            lent.gradients[0][0][:] = 1.0
            first = session.push(lent.gradients[0])
            second = session.exchange(Plan(lent.gradients[0], lent.parameters))
            np.testing.assert_allclose(lent.parameters[0], vectors_of(moved(-2.0))[peers.index], rtol=1e-6, atol=1e-6)
            assert session.transport == transport
            peers.all_gather("looked at")
            if peers.index == 0:
                check_contacts()
            peers.all_gather("done")
        return [[receipt.shard_id for receipt in receipts] for receipts in (first, second)]

    def check_contacts() -> None:
        on_0, on_1 = (workers_of(server.control) for server in servers)
        assert {name: list(worker.shards_pushed) for name, worker in on_0.items()} == {"r/0": SHARDS[0], "r/1": []}
        assert {name: list(worker.shards_pulled) for name, worker in on_0.items()} == {"r/0": SHARDS[0], "r/1": []}
        # Server 1 has never heard of process 0, which has nothing there.
        assert {name: list(worker.shards_pushed) for name, worker in on_1.items()} == {"r/1": SHARDS[1]}
        assert {name: list(worker.shards_pulled) for name, worker in on_1.items()} == {"r/1": SHARDS[1]}
        assert {(worker.replica, tuple(worker.parts)) for worker in on_0.values()} == {("r", (0,)), ("r", (1,))}
        assert len({worker.incarnation for worker in [*on_0.values(), *on_1.values()]}) == 1

    assert on_all(meeting, work) == [[SHARDS[0]] * 2, [SHARDS[1]] * 2]
    assert_equal(snapshot(told), moved(-2.0))
    wait_until(
        lambda: {w.state for s in servers for w in workers_of(s.control).values()} == {"finished"}, what="all left"
    )


def test_the_leader_joins_a_server_without_shards_too(start_server):
    """Somebody has to: a later worker would take a server that knows of no run for one that lost it."""
    model = Model((Tensor("a", (64,), 0, part=0), Tensor("b", (64,), 1, part=1)), shard_size=64)
    servers = start_servers(start_server, 3)
    told = addresses(servers)

    def work(peers: ThreadPeers) -> None:
        launch = Launch(servers=tuple(told.split(",")), worker_id="r")
        values = np.full(64, 1.0 + peers.index, np.float32)
        with Session(model, SGD, launch=launch, initial=lambda: [values], parts=[peers.index], peers=peers) as session:
            np.testing.assert_array_equal(pulled(session)[0], values)

    on_all(Meeting("r", 2), work)
    tensors = snapshot(told)
    assert (tensors["a"] == 1.0).all() and (tensors["b"] == 2.0).all()
    assert [sorted(workers_of(server.control)) for server in servers] == [["r/0", "r/1"], ["r/1"], ["r/0"]]


def test_replicas_and_a_worker_of_one_process_make_rounds_of_three(start_server):
    """Each shard's round takes the workers that hold its part: two processes of one part each, and one of both."""
    servers = start_servers(start_server, 2, "--protocol", "hardsync", "--expected-workers", "3")
    told = addresses(servers)
    replicas = [Meeting("r", 2), Meeting("s", 2)]

    def work(peers: ThreadPeers | None, value: float) -> int:
        with session_of(told, peers) as session:
            parameters = pulled(session)
            receipts = session.push(ones(session, value))
            if peers is not None:
                # Of one opinion, though the round may be over on one server and not on the other.
                assert len(set(peers.all_gather(session.pull_needed))) == 1
            session.pull(parameters)
            assert not session.pull_needed
            expected = vectors_of(moved(-3.0))
            expected = expected if peers is None else [expected[peers.index]]
            for got, wanted in zip(parameters, expected, strict=True):
                np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
            return len(receipts)

    with ThreadPoolExecutor(3) as pool:
        of_r = pool.submit(on_all, replicas[0], lambda peers: work(peers, 1.0))
        of_s = pool.submit(on_all, replicas[1], lambda peers: work(peers, 2.0))
        of_one = pool.submit(work, None, 6.0)
        assert (of_r.result(), of_s.result(), of_one.result()) == ([3, 2], [3, 2], 5)
    assert_equal(snapshot(told), moved(-3.0), atol=1e-5)


def test_a_refusal_of_the_leader_is_raised_on_all_processes(start_server):
    told = addresses(start_servers(start_server, 2))
    in_replica(told, lambda session, peers: None)
    other = Model((*CUT.tensors[:2], Tensor("shift", (8,), 0), *CUT.tensors[3:]), shard_size=80)

    errors = on_all(Meeting("s", 2), lambda peers: error_of(session_of(told, peers, model=other).connect))

    assert [type(error) for error in errors] == [ModelMismatch] * 2
    assert str(errors[0]) == str(errors[1])
    assert "'scale'" in str(errors[0]) and "'shift'" in str(errors[0])


def test_an_error_of_one_process_is_raised_on_all(start_server_process):
    """Here one server cannot be reached: only process 1 has to do with it once the run is there."""
    servers = start_servers(start_server_process, 2)
    told = addresses(servers)
    in_replica(told, lambda session, peers: None)
    servers[1].kill()

    errors = on_all(Meeting("s", 2), lambda peers: error_of(session_of(told, peers, start_wait_seconds=0.3).connect))
    assert "server 1" in str(errors[0])
    assert str(errors[0]) == str(errors[1])


def test_the_norm_that_is_clipped_to_is_of_all_processes(start_server):
    servers = start_servers(start_server, 2, "--clip-norm", "1.0")
    told = addresses(servers)
    in_replica(told, lambda session, peers: session.exchange(Plan(ones(session), pulled(session))))
    assert_equal(snapshot(told), moved(-1 / np.sqrt(CUT.num_parameters)))


def test_all_processes_know_of_the_runs_end_by_the_same_push(start_server):
    servers = start_servers(start_server, 2, "--stop-after", "updates=3", *QUICK)
    told = addresses(servers)

    def work(session: Session, peers: ThreadPeers) -> list[bool]:
        seen, parameters = [], pulled(session)
        while not session.finished:
            session.exchange(Plan(ones(session), parameters))
            seen.append(session.finished)
        with pytest.raises(RunFinished):
            session.push(ones(session))
        peers.all_gather("done")
        return seen

    first, second = in_replica(told, work)
    assert first == second
    assert_equal(snapshot(told), moved(-3.0))


def test_two_replicas_take_turns_under_serial(start_server):
    servers = start_servers(start_server, 2, "--protocol", "serial", "--expected-workers", "2")
    told = addresses(servers)

    def work(session: Session, peers: ThreadPeers) -> None:
        for step in range(3):
            session.clock = step
            session.proceed()
            session.pull(zeros_of(session))
            session.push(ones(session))
        session.clock = 3

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(in_replica, told, work, name) for name in ("r", "s")]:
            future.result()
    assert_equal(snapshot(told), moved(-6.0))


def test_a_portion_is_a_replicas_and_its_processes_must_mean_the_same_data(start_server):
    told = addresses(start_servers(start_server, 2))

    def work(session: Session, peers: ThreadPeers) -> tuple[str, LeaseReply]:
        queue = RemoteQueue(session)
        queue.open(DataSpec(num_examples=8, portion_examples=4))
        other = DataSpec(num_examples=8, portion_examples=4, seed=peers.index)
        refusal = str(error_of(lambda: queue.open(other)))
        leased = queue.lease()
        assert queue.deliver([leased.portion.lease_id], example_count=4).accepted
        return refusal, leased

    first, second = in_replica(told, work)
    assert first == second
    assert first[0].startswith("worker 'r/1' says seed 1 of the data set, but the run's has 0")
    assert first[1].outcome == LeaseReply.OUTCOME_LEASED


def test_a_server_comes_back_from_its_checkpoint_and_both_processes_go_on(start_server, tmp_path):
    ports = [server_port(), server_port()]

    def start(index: int, *flags: str) -> ServerThread:
        folder = str(tmp_path / f"server-{index}")
        return start_server("--port", str(ports[index]), "--checkpoint-dir", folder, *QUICK, *flags)

    servers = [start(0), start(1)]
    told = addresses(servers)

    def work(session: Session, peers: ThreadPeers) -> None:
        parameters = pulled(session)
        session.exchange(Plan(ones(session), parameters))
        peers.all_gather("before")
        if peers.index == 0:
            for index in (0, 1):
                servers[index].stop()
                start(index, "--resume")
        peers.all_gather("after")
        # The first push after a restore may be refused as one of another epoch; then all processes pull.
        for _ in range(10):
            receipts = session.exchange(Plan(ones(session), parameters))
            taken = peers.all_reduce([float(all(receipt.version_after == 2 for receipt in receipts))])[0]
            if session.pull_needed:
                session.pull(parameters)
            if taken == 2:
                break
        np.testing.assert_allclose(parameters[0], vectors_of(moved(-2.0))[peers.index], rtol=1e-6, atol=1e-6)

    in_replica(told, work)
    assert_equal(snapshot(told), moved(-2.0))


@pytest.mark.parametrize("failing", [0, 1])
def test_a_process_whose_sibling_failed_learns_of_it_by_its_next_call(start_server, failing):
    """Process 1 pushes and pulls on server 1 alone, which knows nothing of process 0: its heartbeat brings the news."""
    servers = start_servers(start_server, 2, *QUICK)
    told = addresses(servers)
    meeting = Meeting("r", 2)

    def work(peers: ThreadPeers) -> str:
        session = session_of(told, peers)
        session.connect()
        parameters = pulled(session)
        peers.all_gather("joined")
        if peers.index == failing:
            session.close("failed", "out of memory")
            return ""

        def lost() -> bool:
            try:
                session.pull(parameters, wait_seconds=0)
            except ReplicaLost:
                return True
            return False

        wait_until(lost, what="the news of the lost process")
        error = error_of(lambda: session.push(ones(session)))
        session.close("failed", str(error))
        return str(error)

    said = on_all(meeting, work)[1 - failing]
    assert f"'r/{failing}'" in said and "out of memory" in said
    with session_of(told) as session:
        assert len(session.exchange(Plan(ones(session), pulled(session)))) == 5


def test_a_later_life_of_a_replica_takes_over_as_a_whole(start_server):
    servers = start_servers(start_server, 2, *QUICK)
    told = addresses(servers)
    old = on_all(Meeting("r", 2), lambda peers: session_of(told, peers).__enter__())

    def work(session: Session, peers: ThreadPeers) -> int:
        # Of one part or the other: a later life of one process is one of all.
        wait_until(lambda: is_out(old[peers.index]), what="the end of the older life")
        peers.all_gather("alone")
        return len(session.exchange(Plan(ones(session), pulled(session))))

    try:
        assert in_replica(told, work) == [3, 2]
    finally:
        for session in old:
            session.close("failed")
    assert_equal(snapshot(told), moved(-1.0))


def is_out(session: Session) -> bool:
    """Whether a session has learned that it is of a life that is over."""
    try:
        session.pull(zeros_of(session), wait_seconds=0)
    except (Superseded, ReplicaLost):
        return True
    return False
