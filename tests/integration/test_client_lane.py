"""Workers over lanes: each push counts once whatever is cut, and gRPC serves where there is no lane."""

import itertools
import random
import re
import socket
import struct
from typing import Any

import grpc
import numpy as np
import pytest

from certified import served, shown
from client_support import Reference, gradients_like, make_client, small_model
from pyps.service.hosting import _DATA_IDLE_MS
from pyps_client import ServerUnavailable
from pyps_client.pull import Receiver
from pyps_client.retry import LocalLost
from pyps_client.transport import Greeted, Parts
from pyps_client.transport.grpc import IDLE_SECONDS
from pyps_client.transport.tcp import TcpLane
from pyps_wire.common_pb2 import OUTCOME_APPLIED
from pyps_wire.errors import MalformedFrame, WrongSize
from pyps_wire.lane import Lane
from pyps_wire.parameter_server_pb2 import HelloReply, LaneOffer, PushRequest
from support import inspect, wait_until

# Several shards, larger than what one receive brings.
LARGE = {"w": np.asarray(np.random.default_rng(0).standard_normal(400_000), np.float32)}


@pytest.mark.parametrize(("protocol", "secured"), [("async", False), ("asgd:mutex=whole", False), ("async", True)])
def test_a_push_over_a_lost_lane_is_applied_once(start_server, made, proxies, protocol, secured):
    reference, generator = Reference(LARGE), random.Random(protocol)
    server = start_server("--protocol", protocol, *(served(made / "sound") if secured else []))
    own = shown(made / "sound") if secured else {}
    with make_client(server.data, tensors=LARGE, shard_size=50_000, transport="tcp", **own) as client:
        [proxy] = proxies.values()
        for step in range(10):
            gradients = gradients_like(LARGE, step)
            reference.step(gradients)
            # Headers and receipts are as likely to be cut as numbers.
            position = generator.randrange(1, 1_600_000) if step % 3 else generator.randrange(1, 100)
            of_replies = step % 2 == 1
            proxy.cut_after(position, of_replies=of_replies)
            if step % 5 == 4:
                receipts = client.push(gradients)
                assert {receipt.outcome for receipt in receipts} == {OUTCOME_APPLIED}
                reference.check(client.pull())
            else:
                reference.check(client.exchange(gradients))
            assert set(client.session.held_versions.values()) == {step + 1}
        assert client.session.transport == "tcp"
    assert proxy.num_cuts == 10


def test_a_pull_that_loses_its_lane_goes_on_with_the_missing_shards(start_server, proxies):
    reference = Reference(LARGE)
    with make_client(start_server().data, tensors=LARGE, shard_size=50_000, transport="tcp") as client:
        [proxy] = proxies.values()
        gradients = gradients_like(LARGE, 0)
        client.push(gradients)
        reference.step(gradients)
        proxy.cut_after(700_000, of_replies=True)
        reference.check(client.pull())
        assert proxy.num_cuts == 1


def test_the_worker_ends_an_idle_grpc_connection_first(start_server, monkeypatch):
    assert 2 * IDLE_SECONDS * 1000 < _DATA_IDLE_MS
    monkeypatch.setattr("pyps_client.transport.grpc.IDLE_SECONDS", 1)
    states: list[grpc.ChannelConnectivity] = []
    with make_client(start_server().data, transport="tcp") as client:
        client.pull()
        [connection] = client.session._servers.connections
        channel: Any = connection.channel
        channel._grpc.subscribe(states.append)
        wait_until(lambda: grpc.ChannelConnectivity.IDLE in states[1:], what="the connection's end")
        client.pull()


def test_no_lane_is_grpc(start_server, monkeypatch, caplog):
    with socket.create_server(("127.0.0.1", 0)) as refusing:
        port = refusing.getsockname()[1]
    offered = TcpLane.offered
    monkeypatch.setattr(TcpLane, "offered", lambda lane, offer: offered(lane, LaneOffer(port=port, ticket=b"x")))
    server = start_server("--local-socket", "off")
    reference = Reference(small_model())
    for life in range(2):
        with caplog.at_level("INFO"), make_client(server.data, run_id="mine") as client:
            for step in range(3):
                gradients = gradients_like(small_model(), step)
                reference.step(gradients)
                reference.check(client.exchange(gradients))
            assert client.session.transport == "grpc"
        assert caplog.text.count("to and from server 0") == life + 1
        assert caplog.text.count(f"by gRPC: no lane at port {port}: Connection refused; no memory") == life + 1
    with pytest.raises(ServerUnavailable, match=f"no lane at port {port}: Connection refused"):
        make_client(server.data, run_id="mine", transport="tcp", loss_wait_seconds=0.2)


def test_a_lane_that_breaks_under_load_again_and_again_means_grpc(start_server, proxies, monkeypatch, caplog):
    reference = Reference(LARGE)
    server = start_server("--local-socket", "off")
    model = {"tensors": LARGE, "shard_size": 50_000}
    with caplog.at_level("INFO"), make_client(server.data, **model, loss_wait_seconds=5.0) as client:
        client.pull()
        assert client.session.transport == "tcp"
        [proxy] = proxies.values()
        cut = proxy.cut

        def cut_the_next_too() -> None:
            cut()
            proxy.cut_after(100_000)

        monkeypatch.setattr(proxy, "cut", cut_the_next_too)
        proxy.cut_after(100_000)
        for step in range(2):
            gradients = gradients_like(LARGE, step)
            reference.step(gradients)
            reference.check(client.exchange(gradients))
        assert client.session.transport == "grpc"
        assert proxy.num_cuts == 3
    assert caplog.text.count("was lost again and again") == 1


def test_a_worker_that_requires_a_lane_is_refused_before_the_server_knows_of_it(start_server):
    server = start_server("--lane-port", "off")
    with pytest.raises(ServerUnavailable, match=r"transport is 'tcp'.*it offers no lane.*--lane-port.*'auto'"):
        make_client(server.data, transport="tcp")
    assert not inspect(server.control, "ListWorkers").workers


def test_after_a_refused_push_the_lane_goes_on(start_server, monkeypatch):
    reference = Reference(LARGE)
    with make_client(start_server().data, tensors=LARGE, shard_size=50_000, transport="tcp") as client:
        gradients = gradients_like(LARGE, 0)
        payloads = "pyps_client.vectors.NUMPY.encoded"
        with monkeypatch.context() as patch:
            patch.setattr(payloads, lambda values, codec: values[1:].view(np.uint8).data, raising=False)
            session = client.session
            with pytest.raises(WrongSize, match="shard 0"):
                session.push([gradients["w"]])
        reference.step(gradients)
        reference.check(client.exchange(gradients))
        assert client.session.transport == "tcp"


def test_a_failed_round_leaves_no_answer_to_the_next(start_server, monkeypatch):
    server, reference = start_server(), Reference(small_model())
    write, answers = Receiver.write, itertools.count()

    def write_some(receiver: Receiver, *arguments: Any) -> None:
        write(receiver, *arguments)
        if next(answers) == 2:
            wait_until(lambda: all(shard.version for shard in inspect(server.control, "ListShards").shards), what="all")
            raise MalformedFrame("this one")

    with make_client(server.data, transport="tcp") as client:
        client.pull()
        monkeypatch.setattr(Receiver, "write", write_some)
        gradients = gradients_like(small_model(), 0)
        with pytest.raises(MalformedFrame, match="this one"):
            client.exchange(gradients)
        reference.step(gradients)
        reference.check(client.pull())


def test_a_deadline_that_the_sending_thread_meets_first_is_reported(start_server):
    with make_client(start_server().data, transport="tcp") as client, socket.create_server(("127.0.0.1", 0)) as server:
        [connection] = client.session._servers.connections
        # Nobody reads what comes, and only sending has a limit.
        end = socket.create_connection(server.getsockname())
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 1000))
        launch = client.session.launch
        greeted = Greeted(client.session.sender, HelloReply(), connection.address, launch.credentials, connection.route)
        late = TcpLane(greeted)
        late._wire = Lane(end, waited=late._waited)
        parts = Parts([(PushRequest(), bytes(1 << 24))], 0.01)
        with pytest.raises(LocalLost, match="no answer within the call's deadline"):
            late.round("Push", parts, lambda *_: True)
        late.close()


def test_a_lane_closed_while_it_opens_takes_no_round(start_server, monkeypatch):
    opened, closed, taken = TcpLane._opened, list[TcpLane](), list[TcpLane]()
    round_of = TcpLane._do

    def open_and_be_closed(lane: TcpLane, *arguments: Any) -> Any:
        wire = opened(lane, *arguments)
        if not closed:
            closed.append(lane)
            lane.close()
        return wire

    def noted(lane: TcpLane, *arguments: Any, **named: Any) -> None:
        taken.append(lane)
        round_of(lane, *arguments, **named)

    monkeypatch.setattr(TcpLane, "_opened", open_and_be_closed)
    monkeypatch.setattr(TcpLane, "_do", noted)
    with make_client(start_server().data, transport="tcp") as client:
        client.pull()
        assert len(closed) == 1 and taken and closed[0] not in taken
        assert closed[0]._wire is None


def test_a_lane_no_longer_offered_is_closed_and_logged(start_server, caplog):
    with make_client(start_server("--local-socket", "off").data) as client:
        client.pull()
        [connection] = client.session._servers.connections
        lane = connection.lane
        assert isinstance(lane, TcpLane) and lane._wire is not None
        connection.greeted(client.session.sender, HelloReply())
        assert connection.lane is None and lane._wire is None
        client.pull()
        assert client.session.transport == "grpc"
        client.session._rejoin(connection, connection.channel, 20.0)
        client.pull()
        assert client.session.transport == "tcp"
    lane_s, grpc_s, again = re.findall(r"to and from server 0 .* by (.*)", caplog.text)
    assert lane_s == again == "a lane: no memory is shared (it offers no shared memory)"
    assert grpc_s.startswith("gRPC: it offers no lane; ")
