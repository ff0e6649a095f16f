"""A server killed amid pushes in few bits: each is applied once, and the worker still owes what it owed."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from client_support import CuttingProxy, make_client
from pyps_wire.codecs import codec_of
from pyps_wire.common_pb2 import OUTCOME_APPLIED
from support import checksums, inspect, wait_until

SIZE = 3000
FIRST = np.random.default_rng(1).standard_normal(SIZE).astype(np.float32)


@pytest.mark.parametrize(
    ("transport", "text"),
    [
        ("grpc", "int8"),
        ("grpc", "topk:ratio=.1"),
        ("tcp", "int8"),
        ("tcp", "topk2bit:ratio=.1"),
        ("tcp", "threshold:tau=1"),
    ],
)
def test_a_push_applied_before_the_kill_and_one_after_leave_the_residual_right_to_the_bit(
    start_server_process, tmp_path, proxies, transport, text
):
    codec, flags = codec_of(text), ("--checkpoint-dir", str(tmp_path), "--staleness", "none")
    server = start_server_process(*flags)
    proxy = CuttingProxy(server.data)
    held, owed = FIRST.copy(), np.zeros(SIZE, np.float32)
    random = np.random.default_rng(2)
    client = make_client(
        *(proxy.address,),
        tensors={"w": FIRST},
        optimizer=("sgd", {"learning_rate": 0.5}),
        shard_size=4096,
        gradient_codec=text,
        transport=transport,
    )
    with client, ThreadPoolExecutor(1) as pool:
        for number in range(9):
            values = random.standard_normal(SIZE).astype(np.float32)
            if number == 4:
                # The server applies it and dies before anyone knows.
                behind = proxy if transport == "grpc" else list(proxies.values())[-1]
                behind.hold_replies()
                pushing = pool.submit(client.push, {"w": values})
                wait_until(lambda control=server.control: checksums(control)[0][0] == 5, what="the update")
                server.kill()
                behind.cut()
                server = start_server_process(*flags, "--resume", "--port", server.data.rpartition(":")[2])
                [receipt] = pushing.result(60)
            else:
                [receipt] = client.push({"w": values})
            assert (receipt.outcome, receipt.version_after) == (OUTCOME_APPLIED, number + 1)
            wanted = values + np.float32(codec.feedback) * owed
            sent = codec.decode(codec.encode(wanted), SIZE)
            held -= np.float32(0.5) * sent
            owed = wanted - sent
            if number == 2:
                inspect(server.control, "SaveCheckpoint")
            residuals = client.session.residuals()
            assert residuals is not None
            np.testing.assert_array_equal(residuals["shards"][0]["values"], owed)
            np.testing.assert_array_equal(client.pull()["w"], held)
    proxy.close()
