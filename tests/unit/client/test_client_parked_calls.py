"""Calls that a server holds until it is time, over real channels: what comes between them and their answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest

from pyps_client.channel import Channel
from pyps_client.connection import Connection
from pyps_client.intake import Held, Intake
from pyps_client.launch import Launch
from pyps_client.parking import Parking
from pyps_client.proceeding import Proceeding
from pyps_client.pulling import IncomingPull
from pyps_client.retry import RetryPolicy
from pyps_wire.common_pb2 import CODEC_FLOAT32, ROLE_WORKER, Sender
from pyps_wire.contract import PARAMETER_SERVER
from pyps_wire.errors import METADATA_KEY, PypsError, RunFinished, ServerUnavailable, StateLost, WaitTimedOut
from pyps_wire.parameter_server_pb2 import Parameters, ProceedReply, ProceedRequest, PullRequest
from pyps_wire.partition import Model, Tensor, partition

PLAN = partition(Model((Tensor("a", (2048,)),), shard_size=1024), num_servers=1)
UNANSWERED = WaitTimedOut("after 30 s: a waits for its turn; it waits for b")
Answer = PypsError | list[Any]


class ScriptedServer:
    """A gRPC server that gives each call the next answer of a list, and keeps what it was asked."""

    def __init__(self, answers: list[Answer]) -> None:
        self.asked: list[Any] = []
        self._answers = answers
        self._server = grpc.server(ThreadPoolExecutor(2))
        handlers = {
            "Proceed": grpc.unary_unary_rpc_method_handler(self._proceed),
            "Pull": grpc.unary_stream_rpc_method_handler(self._pull),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(PARAMETER_SERVER, handlers),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        self._server.stop(None).wait()

    def _proceed(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        reply: bytes = self._next(ProceedRequest.FromString(message), context)[0].SerializeToString()
        return reply

    def _pull(self, message: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        for reply in self._next(PullRequest.FromString(message), context):
            if isinstance(reply, PypsError):
                _abort(context, reply)
            yield reply.SerializeToString()

    def _next(self, request: Any, context: grpc.ServicerContext) -> list[Any]:
        self.asked.append(request)
        answer = self._answers.pop(0)
        if isinstance(answer, PypsError):
            _abort(context, answer)
        return answer  # type: ignore[return-value]


def _abort(context: grpc.ServicerContext, error: PypsError) -> None:
    context.set_trailing_metadata(((METADATA_KEY, type(error).__name__),))
    context.abort(getattr(grpc.StatusCode, error.status), str(error))


@pytest.fixture
def scripted() -> Iterator[Callable[..., ScriptedServer]]:
    servers: list[ScriptedServer] = []

    def start(*answers: Answer) -> ScriptedServer:
        servers.append(ScriptedServer(list(answers)))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


class Caller:
    """A worker's connection to the scripted server, which counts how often it introduced itself again."""

    def __init__(self, address: str) -> None:
        self.connection = Connection(0, launch=Launch(servers=(address,)))
        self.stop = threading.Event()
        self.rejoined = 0

    def run(self, operation: Callable[[Channel, threading.Event], Any]) -> Any:
        try:
            return self.connection.persist(
                operation, rejoin=self._rejoin, stop=self.stop, policy=RetryPolicy(20.0, "loss_wait_seconds")
            )
        finally:
            self.connection.close()

    def _rejoin(self, *_: object) -> None:
        self.rejoined += 1


def shard(shard_id: int, version: int, *, epoch: int = 0) -> Parameters:
    numbers = np.full(1024, version, np.float32).tobytes()
    return Parameters(shard_id=shard_id, version=version, epoch=epoch, codec=CODEC_FLOAT32, payload=numbers)


def pull_of(
    caller: Caller, wanted: dict[int, int], *, wait_seconds: float = 600.0
) -> tuple[IncomingPull, Held, np.ndarray]:
    """A pull of both shards, held at version 3."""
    held, vector = Held(PLAN.of_server(0)), np.zeros(2048, np.float32)
    held.versions = dict.fromkeys(held.versions, 3)
    for shard_id, version in wanted.items():
        held.want(shard_id, version, epoch=0)
    pull = IncomingPull(
        *(Sender(worker_id="a"), ROLE_WORKER, Intake([vector], held, codec=CODEC_FLOAT32, name="server 0")),
        connection=caller.connection,
        min_versions=held.wanted,
        parking=Parking(wait_seconds),
    )
    return pull, held, vector


def test_a_question_is_asked_again_with_the_same_clock_after_a_wait_in_vain_and_after_a_loss(
    scripted: Callable[..., ScriptedServer],
) -> None:
    server = scripted(UNANSWERED, ServerUnavailable("shutting down"), [ProceedReply(ask_to_proceed=True)])
    caller = Caller(server.address)

    reply = caller.run(Proceeding(Sender(worker_id="a"), clock=7, parking=Parking(600.0)))

    assert reply.ask_to_proceed
    assert [(question.clock, question.wait_milliseconds > 0) for question in server.asked] == [(7, True)] * 3
    assert caller.rejoined == 1


def test_a_turn_that_never_comes_ends_the_wait_with_the_servers_words(scripted: Callable[..., ScriptedServer]) -> None:
    server = scripted(UNANSWERED)

    with pytest.raises(WaitTimedOut, match=r"a waits for its turn; it waits for b.*PYPS_WAIT_SECONDS"):
        Caller(server.address).run(Proceeding(Sender(worker_id="a"), clock=1, parking=Parking(0.0)))


def test_a_failure_elsewhere_ends_the_wait(scripted: Callable[..., ScriptedServer]) -> None:
    caller = Caller(scripted(UNANSWERED).address)
    caller.stop.set()

    with pytest.raises(RunFinished, match="closed while it waited"):
        caller.run(Proceeding(Sender(worker_id="a"), clock=1, parking=Parking(600.0)))


def test_a_pull_goes_on_waiting_after_a_loss_for_what_has_not_come(scripted: Callable[..., ScriptedServer]) -> None:
    server = scripted([shard(1, 4), UNANSWERED], ServerUnavailable("shutting down"), [shard(0, 4)])
    caller = Caller(server.address)
    pull, held, vector = pull_of(caller, {0: 4, 1: 4})

    assert caller.run(pull) == {0, 1}

    asked = [[(want.shard_id, want.min_version) for want in request.wants] for request in server.asked]
    assert asked == [[(0, 4), (1, 4)], [(0, 4)], [(0, 4)]]
    assert all(request.wait_milliseconds > 0 for request in server.asked)
    assert held.versions == {0: 4, 1: 4}
    assert held.wanted == {}
    np.testing.assert_array_equal(vector, np.full(2048, 4, np.float32))


def test_nothing_is_waited_for_where_nothing_is_wanted(scripted: Callable[..., ScriptedServer]) -> None:
    server = scripted([])
    caller = Caller(server.address)
    pull, _, _ = pull_of(caller, {})

    assert caller.run(pull) == set()
    assert server.asked[0].wait_milliseconds == 0


def test_a_server_that_was_restored_meanwhile_is_not_waited_for(scripted: Callable[..., ScriptedServer]) -> None:
    """Its versions count anew: the one that was wanted may be long in coming."""
    server = scripted(ServerUnavailable("shutting down"), [shard(0, 2, epoch=1), shard(1, 2, epoch=1)])
    caller = Caller(server.address)
    pull, held, _ = pull_of(caller, {1: 4})

    assert caller.run(pull) == {0, 1}
    assert (held.epoch, held.versions, held.wanted) == (1, {0: 2, 1: 2}, {})


def test_a_finished_run_answers_without_the_version_and_ends_the_wait(scripted: Callable[..., ScriptedServer]) -> None:
    caller = Caller(scripted([]).address)
    pull, held, _ = pull_of(caller, {0: 4})
    assert held.wanted == {0: 4}

    caller.run(pull)

    assert held.wanted == {}


def test_a_verdict_is_not_mistaken_for_a_wait(scripted: Callable[..., ScriptedServer]) -> None:
    caller = Caller(scripted(StateLost("its shards are gone")).address)
    pull, _, _ = pull_of(caller, {0: 4})

    with pytest.raises(StateLost, match="its shards are gone"):
        caller.run(pull)
