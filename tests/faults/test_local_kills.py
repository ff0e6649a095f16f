"""kill -9 of a worker in the middle of shared-memory rounds: the others go on, and nothing stays behind."""

import threading

import numpy as np
import pytest

from pyps_wire.partition import Model, Tensor
from support import DEADLINE_SECONDS, wait_for_event, wait_until
from wire_worker import QUICK_LEASES, beating, descriptors_of, local_worker, maps_of, segments_of

MODELS = {"small": Model((Tensor("x", (10_000,)),)), "large": Model((Tensor("x", (4_000_000,)),), shard_size=524_288)}

# Rounds until it is killed. It says that it has begun, and no more.
DOOMED = """
import sys
from wire_worker import local_worker
from pyps_wire.partition import Model, Tensor
address, size, shard_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with local_worker(address, "doomed", model=Model((Tensor("x", (size,)),), shard_size=shard_size)) as worker:
    worker.gradients[0][0][:] = 1.0
    for step in range(1_000_000):
        worker.exchange()
        if step == 3:
            print("going", flush=True)
"""


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_worker_killed_in_its_round_leaves_nothing_and_the_other_goes_on(start_server_process, start_python, model):
    server = start_server_process(*QUICK_LEASES, "--staleness", "none")
    with local_worker(server.data, "steady", model=model) as steady, beating([steady]):
        steady.gradients[0][0][:] = 1.0
        steady.exchange()
        before = len(descriptors_of(server.pid))
        rounds, ends = [0], threading.Event()

        def train() -> None:
            while not ends.is_set():
                steady.exchange()
                rounds[0] += 1

        trainer = threading.Thread(target=train)
        trainer.start()
        try:
            for _ in range(3):
                doomed = start_python("-c", DOOMED, server.data, str(model.num_parameters), str(model.shard_size))
                doomed.wait_for_output("going")
                assert len(maps_of(server.pid)) == 2
                doomed.kill()
                wait_until(lambda: len(maps_of(server.pid)) == 1, what="the killed worker's memory unmapped")
                seen = rounds[0]
                wait_until(lambda seen=seen: rounds[0] > seen + 3, what="rounds of the other")
        finally:
            ends.set()
            trainer.join(DEADLINE_SECONDS)
        wait_for_event(server, "expired", "doomed")
        wait_until(lambda: len(descriptors_of(server.pid)) <= before, what="no descriptor left")
        # Every number of a shard has had the same updates: none was applied in part.
        for shard in steady.pull():
            values = np.frombuffer(shard.payload, np.float32)
            assert values.min() == values.max() == -float(shard.version)
        assert "bug" not in server.output()
        assert "still in use" not in server.output()
    wait_until(lambda: not segments_of(server.pid), what="no worker's memory left with the server")
