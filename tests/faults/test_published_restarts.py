"""A server killed while workers follow its published copy: all follow one copy again, of the restored parameters."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from client_support import SGD, gradients_like, make_client, small_model
from support import inspect

GRADIENTS = [gradients_like(small_model(), seed) for seed in range(9)]


@pytest.mark.parametrize("protocol", ["async", "hardsync"])
@pytest.mark.parametrize("transport", ["grpc", "tcp"])
def test_workers_and_a_joiner_hold_the_same_bits_after_a_kill(start_server_process, tmp_path, transport, protocol):
    # Both from the first round on: one that began alone would leave the other a step behind at some shards.
    flags = ("--checkpoint-dir", str(tmp_path), "--staleness", "none", "--protocol", protocol, "--expected-workers=2")
    own = {"run_id": "run", "optimizer": SGD, "parameter_codec": "int8", "transport": transport}
    server = start_server_process(*flags)
    with (
        ThreadPoolExecutor(2) as pool,
        make_client(server.data, worker_id="a", **own) as a,
        make_client(server.data, worker_id="b", **own) as b,
    ):
        for number, gradient in enumerate(GRADIENTS):
            if number == 3:
                inspect(server.control, "SaveCheckpoint")
            exchanges = [pool.submit(client.exchange, gradient) for client in (a, b)]
            if number == 5:
                server.kill()
                server = start_server_process(*flags, "--resume", "--port", server.data.rsplit(":", 1)[1])
            for exchange in exchanges:
                exchange.result(60)
        # A pull in the first turn may publish what an earlier one of that turn has missed.
        for client in (a, b, a, b):
            client.session.pull([client._parameters], min_versions={})
        with make_client(server.data, worker_id="joiner", **own) as joiner:
            for client in (a, b):
                np.testing.assert_array_equal(client._parameters, joiner._parameters)
                assert client.session.held_versions == joiner.session.held_versions
                assert client.session.held_versions.epochs == (1,)
        exact = np.concatenate([tensor.ravel() for tensor in a.snapshot().values()])
        assert 0 < np.abs(a._parameters - exact).max() < 0.1
