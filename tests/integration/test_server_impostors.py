"""A worker is nobody else: who knows the token, a name and an incarnation, but not the secret, speaks for no worker."""

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message import Message

from client_support import Clock, gradients_like, make_client, small_model
from pyps_client import NameHeld, NotAllowed
from pyps_wire import common_pb2 as common
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire import vector_machine_pb2, work_pb2
from pyps_wire.contract import PROTOCOL_VERSION, stub_of
from support import DEADLINE_SECONDS, ServerThread, events_of, inspect, wait_until, workers_of
from wire_worker import QUICK_LEASES, SMALL, LocalSocket, LocalWorker, WireWorker, crew, refusal_of, sgd, values_of

# What the calls that workers make say besides their sender, so that nothing else speaks against them; of a call that
# is not here, as one that is new, the sender alone.
GRADIENT: dict[str, Any] = {
    "sequence": 99,
    "codec": common.CODEC_FLOAT32,
    "learning_rate": 7.0,
    "num_shards": 1,
    "payload": np.ones(37, np.float32).tobytes(),
}
FIELDS: Mapping[str, Mapping[str, Any]] = {
    "Hello": {
        "protocol_version": PROTOCOL_VERSION,
        "role": common.ROLE_WORKER,
        "num_servers": 1,
        "model": SMALL.to_proto(),
        "optimizer": sgd(),
    },
    "Initialize": {"term": 1, "model": SMALL.to_proto(), "num_servers": 1},
    "Push": GRADIENT,
    "Exchange": GRADIENT,
    "Pull": {"wants": [wire.PullRequest.Want(shard_id=0, held_version=-1)]},
    "Proceed": {"clock": 99},
    "Heartbeat": {"clock": 99, "scalars": {"loss": 99.0}},
    "Leave": {"cause": wire.LeaveRequest.CAUSE_FAILED, "message": "so they say"},
    "Open": {"data": work_pb2.DataSpec(name="train", num_examples=8, portion_examples=2)},
    "Claim": {"lease_id": 1},
    "Deliver": {"lease_ids": [1], "example_count": 2},
    "Stage": {"num_shards": 1, "codec": common.CODEC_FLOAT32, "payload": GRADIENT["payload"]},
}
# In a coordinator's name, which is no worker's: see test_vector_machine.py. AwaitPass tells what anybody may know.
COORDINATORS = {"Attach", "Execute", "BeginPass", "AwaitPass", "EndWork"}


def workers_calls() -> Iterator[Any]:
    """Every call that is made in a worker's name, from the services' own descriptors."""
    for file in (wire, work_pb2, vector_machine_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            yield from (method for method in service.methods if method.name not in COORDINATORS)


def ask(channel: grpc.Channel, method: Any, sender: common.Sender, fields: Mapping[str, Any]) -> list[Message]:
    request = method.input_type._concrete_class(sender=sender, **fields)
    call = getattr(stub_of(method.containing_service.full_name, channel), method.name)
    answer = call(iter([request]) if method.client_streaming else request, timeout=DEADLINE_SECONDS)
    return list(answer) if method.server_streaming else [answer]


class StoppedClock(Clock):
    """A server's clock that stands still, so that what renews a lease is seen in it."""

    def __call__(self) -> float:
        return 1000.0 + self._ahead_seconds


def state_of(server: ServerThread) -> list[Any]:
    """All that a call could change: workers with their leases, parameters, the schedule, portions, events."""
    return [
        [worker.SerializeToString(deterministic=True) for worker in workers_of(server.control).values()],
        inspect(server.control, "ListShards").SerializeToString(deterministic=True),
        inspect(server.control, "GetWork", work_pb2.GetWorkRequest()).SerializeToString(deterministic=True),
        [events_of(server, kind) for kind in ("joined", "left", "owner", "counts", "back")],
    ]


def lies_about(sender: common.Sender, other: common.Sender) -> Iterator[common.Sender]:
    """Whom an impostor could say that it is: that worker without a secret, with a guess or with another's."""
    for secret in (b"", b"0" * 16, other.secret, sender.secret[:-1]):
        yield common.Sender(
            run_id=sender.run_id, worker_id=sender.worker_id, incarnation=sender.incarnation, secret=secret
        )


def test_no_call_in_another_workers_name_is_taken_or_changes_anything(start_server):
    clock = StoppedClock()
    server = start_server("--protocol", "ssp:s=9", clock=clock)
    with crew(server, 2) as (victim, impostor):
        for worker in (victim, impostor):
            worker.push_step(1.0)
        data = FIELDS["Open"]["data"]
        calls = {method.name: method for method in workers_calls()}
        ask(victim.channel, calls["Open"], victim.sender, {"data": data})
        ask(victim.channel, calls["Lease"], victim.sender, {})
        clock._ahead_seconds += 0.5
        before = state_of(server)

        for name, method in calls.items():
            assert "sender" in method.input_type.fields_by_name, f"{name} does not say who calls"
            for lie in lies_about(victim.sender, impostor.sender):
                refused = refusal_of(ask, impostor.channel, method, lie, FIELDS.get(name, {}))
                assert refused[:2] == ("PERMISSION_DENIED", "NotAllowed"), (name, lie, refused)
                assert "'w0'" in refused[2] and "secret" in refused[2], refused
            # As an earlier or a later life of it: a heartbeat and a Leave learn that the server does not know it.
            for lives in (-1, 1):
                lie.incarnation = victim.sender.incarnation + lives
                with contextlib.suppress(grpc.RpcError):
                    ask(impostor.channel, method, lie, FIELDS.get(name, {}))
            assert state_of(server) == before, f"{name} changed something"

        victim.push_step(1.0)
        assert "secret" not in server.output() and victim.sender.secret.decode() not in server.output()


def test_a_stream_that_began_in_ones_own_name_takes_no_push_in_anothers(start_server):
    server = start_server("--protocol", "ssp:s=9")
    with crew(server, 2) as (victim, impostor):
        victim.push_step(1.0)
        for lie in lies_about(victim.sender, impostor.sender):
            forged = impostor.push_request(7.0, sequence=99)
            forged.sender.CopyFrom(lie)
            own = impostor.push_request(1.0)
            assert refusal_of(impostor.push, own, forged)[:2] == ("PERMISSION_DENIED", "NotAllowed")
        assert [values_of(each).tolist() for each in victim.pull()] == [[-5.0] * 37]


def test_a_process_of_a_replica_joins_and_leaves_with_the_secret_that_all_of_them_share(start_server):
    """Else any name that begins likewise would take the whole replica out."""
    server = start_server()
    with WireWorker(server.data, "r/0") as first, WireWorker(server.data, "r/1") as other:
        first.hello(replica="r")
        other.sender.secret = b"0" * 16
        for incarnation, name in ((first.sender.incarnation, "NotAllowed"), (other.sender.incarnation, "NameHeld")):
            other.sender.incarnation = incarnation
            assert refusal_of(other.hello, replica="r")[:2] == ("PERMISSION_DENIED", name)
        opening = next(first.initialize_messages(first.hello(replica="r").term))
        opening.sender.CopyFrom(other.sender)
        opening.sender.incarnation, opening.replica = first.sender.incarnation, "r"
        assert refusal_of(first.stub.Initialize, iter([opening]))[1] == "NotAllowed"
        assert {each.state for each in workers_of(server.control).values()} == {"alive"}


def test_a_name_is_free_for_others_once_its_worker_has_left_or_its_lease_is_over(start_server):
    clock = Clock()
    server = start_server(*QUICK_LEASES, clock=clock)
    with crew(server, 2) as (left, silent):
        for former in (left, silent):
            with WireWorker(server.data, former.sender.worker_id) as newcomer:
                newcomer.sender.secret = b""
                status, name, words = refusal_of(newcomer.hello)
                assert (status, name) == ("PERMISSION_DENIED", "NameHeld")
                assert "silent for 6 s" in words and "PYPS_WORKER_KEY" in words and "another name" in words
                if former is left:
                    former.leave()
                else:
                    clock.pass_until(lambda: workers_of(server.control)["w1"].state == "expired", server)
                newcomer.sender.secret = newcomer.hello().secret
                assert len(newcomer.sender.secret) >= 16
                newcomer.push_step(1.0)
                assert refusal_of(former.heartbeat)[1] == "Superseded"


def test_a_server_that_was_restarted_takes_its_workers_in_again(start_server, tmp_path):
    """It knows no secret then, and nothing that it keeps holds any."""
    flags = ("--checkpoint-dir", str(tmp_path))
    first = start_server(*flags, "--run-id", "run-1")
    with WireWorker(first.data, "a") as worker:
        worker.join()
        worker.push_step(1.0)
        secret = worker.sender.secret
        assert secret.decode() not in first.output()
        first.stop()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and secret in path.read_bytes()]
    second = start_server(*flags, "--resume")
    with WireWorker(second.data, "a") as again:
        incarnation, again.sender.incarnation = again.sender.incarnation, worker.sender.incarnation
        assert refusal_of(again.push_step, 1.0)[1] == "UnknownWorker"
        assert again.hello().secret == secret
        again.push_step(1.0)
        again.sender.secret, again.sender.incarnation = b"1" * 16, incarnation
        assert refusal_of(again.hello)[1] == "NameHeld"


def test_memory_is_attached_with_the_workers_secret_too(start_server):
    server = start_server()
    with LocalWorker(server.data) as worker:
        worker.join()
        link = LocalSocket(worker.offer.address)
        sender = common.Sender(run_id="run-1", worker_id="a", incarnation=worker.sender.incarnation)
        with pytest.raises(NotAllowed, match="secret"):
            link.ask(worker.attach_request(sender=sender), worker.descriptor)
        link.close()
        worker.attach()
        worker.pull_here()
        assert values_of(worker.pull()[0]).tolist() == [0.0] * 37


def test_a_client_waits_for_its_name_and_says_so(start_server, caplog):
    clock = Clock()
    server = start_server(*QUICK_LEASES, clock=clock)
    with WireWorker(server.data, "worker") as dead:
        dead.hello()
    with pytest.raises(NameHeld, match=r"(?s)worker 'worker' cannot join yet.*start_wait_seconds"):
        make_client(server.data, start_wait_seconds=0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(make_client, server.data)
        wait_until(lambda: "waiting for server 0" in caplog.text, what="a word on what it waits for")
        clock.pass_until(waiting.done, server)
    with waiting.result() as client:
        client.push(gradients_like(small_model(), 0))
    assert "worker 'worker' cannot join yet" in caplog.text and "silent for 6 s" in caplog.text
