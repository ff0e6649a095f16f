"""Pulls in few bits: every worker holds the published copy to the bit, whatever is lost on the way."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from client_support import SGD, CuttingProxy, gradients_like, make_client, small_model
from pyps.core.arrays import Floats
from pyps.core.gradient import PublishedReply
from pyps_client import Client
from pyps_client.worker import Worker
from pyps_wire.codecs import CODECS, INT8, Codec, Int8, codec_of
from pyps_wire.errors import InvalidArgument
from support import ServerThread, inspect, status_of
from training import backward, batches, mlp, parameters_of, remote

MODEL = small_model()
GRADIENTS = [gradients_like(MODEL, seed) for seed in range(12)]
PUBLISHED = [codec.name for codec in CODECS.values() if codec.published]
EXACT = ("--staleness", "none")


def copy_of(server: ServerThread, session: Worker, codec: Codec = INT8) -> Floats:
    """Return the published copy, as a worker that joins gets it."""
    assert server._server is not None
    shards = server._server._run.content.shards
    copy = np.empty(sum(session.model.group_sizes), np.float32)
    for shard in session.partition.shards:
        reply = PublishedReply(codec)
        shards[shard.shard_id].pull(reply, worker_id="joiner")
        copy[shard.offset : shard.offset + shard.length] = np.frombuffer(reply.payloads[0], np.float32)
    return copy


def worker(address: str, name: str = "a", **options: object) -> Client:
    own: dict[str, object] = {"run_id": "run", "parameter_codec": "int8", "optimizer": SGD}
    return make_client(address, worker_id=name, **(own | options))


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("transport", ["grpc", "tcp"])
def test_a_worker_trains_on_a_copy_near_the_parameters_for_a_part_of_the_bytes(start_server, transport, name):
    server, codec = start_server(*EXACT), codec_of(name)
    with worker(server.data, parameter_codec=name, transport=transport) as client:
        joined = status_of(server).tally.bytes_out
        for gradient in GRADIENTS:
            client.exchange(gradient)
            np.testing.assert_array_equal(client._parameters, copy_of(server, client.session, codec))
        client.push(GRADIENTS[0])
        pulled = client.pull()
        sizes = [codec.max_bytes(shard.length) for shard in client.session.partition.shards]
        assert status_of(server).tally.bytes_out - joined <= 13 * sum(sizes)
        for tensor, exact in client.snapshot().items():
            np.testing.assert_allclose(pulled[tensor], exact, atol=0.5)
    assert inspect(server.control, "GetMemory").published_bytes >= client._parameters.nbytes


@pytest.mark.parametrize("protocol", ["async", "hardsync", "softsync:n=1"])
@pytest.mark.parametrize("transport", ["grpc", "tcp"])
def test_workers_hold_the_same_bits_through_lost_connections_and_joins(start_server, proxies, transport, protocol):
    server, generator = start_server("--protocol", protocol, *EXACT), random.Random(protocol)
    proxy = CuttingProxy(server.data)
    with (
        ThreadPoolExecutor(3) as pool,
        worker(proxy.address, "a", transport=transport) as a,
        worker(server.data, "b", transport=transport) as b,
    ):
        clients = [a, b]
        cut = proxy if transport == "grpc" else next(iter(proxies.values()))
        for number in range(12):
            if number == 6:
                # The others push meanwhile, so a round does not wait for it until it has pushed too.
                clients.append(worker(server.data, "c", transport=transport))
            if number % 3 == 1:
                cut.cut_after(generator.randrange(1, 5000), of_replies=number % 2 == 1)
            exchanges = [pool.submit(client.exchange, GRADIENTS[number]) for client in clients]
            for exchange in exchanges:
                exchange.result(60)
            # A pull in the first turn may publish what an earlier one of that turn has missed.
            for client in 2 * clients:
                client.session.pull([client._parameters], min_versions={})
            newest = copy_of(server, a.session)
            for client in clients:
                np.testing.assert_array_equal(client._parameters, newest, err_msg=f"{number} {client}")
        assert cut.num_cuts >= 2
        clients[2].close()
    proxy.close()


@pytest.mark.parametrize("overlap", ["off", "step", "backward"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_torch_models_hold_the_copy_and_reach_the_loss_of_float32(start_server, name, overlap):
    def loss_by(**codecs: str) -> float:
        server, models = start_server("--protocol", "hardsync", "--expected-workers", "2", *EXACT), [mlp(), mlp()]
        own = {"run_id": "run", "overlap": overlap, "transport": "tcp", "shard_size": 1024, **codecs}

        def trained(rank: int) -> float:
            with remote(models[rank], server, worker_id=f"w{rank}", **own) as optimizer:
                losses = []
                for batch in [*batches(16)][rank::2] * 10:
                    losses.append(float(backward(models[rank], batch)))
                    optimizer.step()
                if codecs:
                    copy = copy_of(server, optimizer._steps.session, codec_of(name))
                    np.testing.assert_array_equal(parameters_of(models[rank]), copy)
                    np.testing.assert_array_equal(np.concatenate(optimizer._steps.parameters.vectors), copy)
                together.wait(60)
            return float(np.mean(losses[-8:]))

        together = threading.Barrier(2)
        with ThreadPoolExecutor(2) as pool:
            return float(np.mean([*pool.map(trained, range(2))]))

    # Some are for parameters alone.
    up = name if codec_of(name).stateful else "float32"
    assert loss_by(parameter_codec=name, gradient_codec=up) == pytest.approx(loss_by(), rel=0.01)


def test_an_interrupted_addition_is_pulled_again_in_full(start_server, monkeypatch):
    server = start_server(*EXACT)
    with worker(server.data) as client:
        client.exchange(GRADIENTS[0])
        add_into: Callable[..., None] = Int8.add_into
        calls = []

        def interrupted(codec: Codec, payload: memoryview, place: Floats) -> None:
            add_into(codec, payload, place)
            calls.append(codec)
            if len(calls) == 2:
                raise KeyboardInterrupt

        monkeypatch.setattr("pyps_wire.codecs.Int8.add_into", interrupted)
        monkeypatch.setattr("pyps_wire.codecs.Int8.encode_difference", encode_difference_by(add_into))
        with pytest.raises(KeyboardInterrupt):
            client.exchange(GRADIENTS[1])
        assert sorted(client.session.held_versions.values())[0] == -1
        client.pull()
        np.testing.assert_array_equal(client._parameters, copy_of(server, client.session))


def encode_difference_by(add_into: Callable[..., None]) -> Callable[..., memoryview]:
    """Return the server's half, which shares its class with the worker's, without the interruption."""

    def encode_difference(codec: Codec, values: Floats, held: Floats) -> memoryview:
        payload = codec.encode(values - held)
        add_into(codec, payload, held)
        return payload

    return encode_difference


def test_delta_brings_exact_parameters_and_of_them_what_has_changed(start_server):
    server, embedding = start_server(*EXACT), {"embedding": np.ones((2000, 8), np.float32)}
    own = {"tensors": embedding, "shard_size": 4096, "gradient_codec": "float32", "parameter_codec": "delta"}
    with worker(server.data, **own) as client:
        joined = status_of(server).tally
        for row in range(8):
            gradient = np.zeros((2000, 8), np.float32)
            gradient[250 * row] = row + 1
            pulled = client.exchange({"embedding": gradient})
            np.testing.assert_array_equal(pulled["embedding"], client.snapshot()["embedding"])
        tally, exact = status_of(server).tally, 8 * embedding["embedding"].nbytes
        assert tally.bytes_out - joined.bytes_out - exact < 8 * 200


def test_differences_are_added_to_lent_vectors_alone(start_server):
    with worker(start_server().data) as client, pytest.raises(InvalidArgument, match="pull into the lent vectors"):
        client.session.pull([client._parameters.copy()])
