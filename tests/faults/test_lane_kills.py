"""kill -9 of a worker in the middle of a lane's rounds: the others go on, and nothing stays behind."""

import json

import numpy as np

from client_support import make_client
from support import inspect, wait_until
from wire_worker import descriptors_of

# 8 MB: a round takes long enough to be met in its midst.
GRADIENT = {"x": np.ones(2_000_000, np.float32)}
OPTIONS = {"run_id": "mine", "optimizer": ("sgd", {"learning_rate": 1.0}), "shard_size": 250_000, "transport": "tcp"}

# Rounds until it is killed.
DOOMED = """
import json, sys
import numpy as np
from client_support import make_client
gradient = {"x": np.ones(2_000_000, np.float32)}
with make_client(sys.argv[1], worker_id=sys.argv[2], tensors=gradient, **json.loads(sys.argv[3])) as client:
    while True:
        client.exchange(gradient)
        print("going", flush=True)
"""


def test_a_killed_worker_leaves_no_partial_update(start_server_process, start_python):
    server = start_server_process("--staleness", "none")
    with make_client(server.data, worker_id="steady", tensors=GRADIENT, **OPTIONS) as steady:
        steady.exchange(GRADIENT)
        before = len(descriptors_of(server.pid))
        for number in range(2):
            doomed = start_python("-c", DOOMED, server.data, f"doomed-{number}", json.dumps(OPTIONS))
            doomed.wait_for_output("going")
            steady.exchange(GRADIENT)
            wait_until(lambda: inspect(server.control, "GetMemory").in_flight_bytes, what="a push on its way")
            doomed.kill()
            steady.exchange(GRADIENT)
            wait_until(lambda: len(descriptors_of(server.pid)) <= before, what="no descriptor left")
        parameters = steady.pull()["x"]
        versions = steady.session.held_versions
        for shard in steady.session.partition.shards:
            values = parameters[shard.offset :][: shard.length]
            assert values.min() == values.max() == 1 - float(versions[shard.shard_id])
        assert max(versions.values()) > 5
        assert not inspect(server.control, "GetMemory").in_flight_bytes
    assert "bug" not in server.output()
