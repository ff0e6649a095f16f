"""Asking server 0 for portions: what is said again, and what a server that knows nothing of portions answers."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from pyps_client.credentials import Credentials
from pyps_client.data.queue import RemoteQueue
from pyps_client.transport.grpc import GrpcChannel
from pyps_wire.errors import ProtocolMismatch, RunFinished, WaitTimedOut
from pyps_wire.work_pb2 import DataSpec
from training import QueueSession, make_queue

DATA = DataSpec(name="train", num_examples=10, portion_examples=5, batch_size=1)


def opened(wait_seconds: float = 60.0, *, taken: bool = False):
    """A queue with two portions, taken by "b" or not, a session of its worker "a", and that one's view of it."""
    work = make_queue()
    session = QueueSession(work, "a", wait_seconds=wait_seconds)
    remote = RemoteQueue(session)
    remote.open(DATA)
    for _ in range(2 * taken):
        work.lease("b", 1, pass_=0, now=0.0)
    return work, session, remote


def test_a_lease_whose_answer_was_lost_goes_back_with_the_next_question():
    work, session, remote = opened()
    lost = work.lease("a", session.sender.incarnation, pass_=0, now=0.0)
    reply = remote.lease(pass_number=0)
    assert (reply.portion.start, reply.portion.stop) == (lost.portion.start, lost.portion.stop)
    assert remote.held == (reply.portion.lease_id,)
    assert work.progress().running == 1


def test_what_is_held_stays_and_what_is_given_up_goes_back():
    work, _, remote = opened()
    first = remote.lease(pass_number=0).portion
    second = remote.lease(pass_number=0).portion
    assert work.progress().running == 2
    remote.give_up([first.lease_id])
    again = remote.lease(pass_number=0).portion
    assert (again.start, again.lease_id > second.lease_id) == (first.start, True)


def test_a_wait_ends_at_its_deadline_naming_the_setting_and_with_the_run(monkeypatch):
    monkeypatch.setattr("pyps_client.data.queue.LOOK_SECONDS", 0.05)
    _, _, remote = opened(wait_seconds=0.1, taken=True)
    with pytest.raises(WaitTimedOut, match="Raise wait_seconds"):
        remote.lease(pass_number=0)
    _, session, remote = opened(taken=True)
    session.finished = True
    with pytest.raises(RunFinished, match="The run is over"):
        remote.lease(pass_number=0)


def test_a_server_without_portions_is_named_with_what_to_do():
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    session = QueueSession(make_queue(), "a", server=f"127.0.0.1:{port}")
    session.channel = GrpcChannel(session.launch.servers[0], Credentials(), use_proxy=False)
    try:
        with pytest.raises(ProtocolMismatch, match=rf"Server 0 \(127.0.0.1:{port}\) hands out no portions .* earlier"):
            RemoteQueue(session).open(DATA)
    finally:
        session.channel.close()
        server.stop(None)
