"""The law of staleness on real processes: the mean is (L - 1) / c whoever is quick (algorithm notes 1.3).

As S1 of test_staleness_aware_protocols.py, which has it in virtual time; here the times are the system's, and the
messages are gRPC's. `benchmarks/staleness.py` does the same for more cases.
"""

import pytest

from support import status_of, wait_until

# Rounds until it is killed.
WORKER = """
import sys
import numpy as np
from client_support import make_client
gradient = {"x": np.ones(64, np.float32)}
rule = ("sgd", {"learning_rate": 1e-6})
with make_client(
    sys.argv[1], worker_id=sys.argv[2], tensors=gradient, run_id="law", optimizer=rule, transport="grpc"
) as client:
    while True:
        client.exchange(gradient)
"""
L, N = 4, 2
GRADIENTS = 400


def test_s1_holds_for_workers_that_the_system_schedules(start_server_process, start_python):
    server = start_server_process("--protocol", f"softsync:n={N}")
    for number in range(L):
        start_python("-c", WORKER, server.data, f"worker-{number}")

    def summed() -> tuple[int, float]:
        tally = status_of(server).tally
        count = tally.pushes_applied + tally.pushes_pending
        return count, tally.staleness_mean * count

    wait_until(lambda: len(status_of(server).roster) == L, what="all workers' first pushes")
    before, sum_before = summed()
    wait_until(lambda: summed()[0] >= before + GRADIENTS, what="enough gradients")
    after, sum_after = summed()
    assert (sum_after - sum_before) / (after - before) == pytest.approx((L - 1) / (L // N), rel=0.1)
