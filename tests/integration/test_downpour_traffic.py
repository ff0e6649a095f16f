"""Downpour SGD over real connections: Dean et al., Large Scale Distributed Deep Networks (NIPS 2012), section 4.1.

The invariants D5, D6 and D8 of the algorithm notes, section 2.3: what is sent falls with n_push and n_fetch, and a
killed replica costs its own work alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from pyps_client import RemoteOptimizer
from support import PythonProcess, ServerProcess, wait_until
from training import backward, batches, mlp, status, workers

StartServer = Callable[..., ServerProcess]
StartPython = Callable[..., PythonProcess]

STEPS = 24
# A multiple of every n_push and n_fetch; the first step also says Hello and sends the first parameters.
FIRST_STEPS = 8
MODEL_BYTES = 4 * 4522

# A replica that says each step before its gradient can be on its way.
REPLICA = """
import sys
import torch
from pyps_client import RemoteOptimizer
from training import backward, batches, mlp

model = mlp()
sgd = torch.optim.SGD(model.parameters(), lr=0.001)
optimizer = RemoteOptimizer(
    model, sgd, sys.argv[1], run_id="replicas", worker_id=sys.argv[2], push_every=int(sys.argv[3])
)
for number, batch in enumerate(batches(1_000_000), start=1):
    backward(model, batch)
    print("computed", number, flush=True)
    optimizer.step()
"""


def computed_by(replica: PythonProcess) -> int:
    """The minibatches that a killed replica has told of. It may have died amid a line, which then does not count."""
    return int(re.findall(r"computed (\d+)\n", replica.output())[-1])


def traffic(server: ServerProcess, *, push_every: int, pull_every: int) -> tuple[int, int]:
    """Payload bytes that the server received and sent in the steps of one replica."""
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    with RemoteOptimizer(model, sgd, server.data, push_every=push_every, pull_every=pull_every) as optimizer:
        for count, batch in enumerate(batches(FIRST_STEPS + STEPS)):
            if count == FIRST_STEPS:
                before = status(server)
            backward(model, batch)
            optimizer.step()
        after = status(server)
    return after.bytes_in - before.bytes_in, after.bytes_out - before.bytes_out


@pytest.mark.parametrize(("n_push", "n_fetch"), [(1, 1), (4, 4), (2, 8), (8, 2)])
def test_d5_bytes_fall_by_n_push_and_n_fetch(start_server_process: StartServer, n_push: int, n_fetch: int) -> None:
    """A step sends 1 / n_push gradients and fetches 1 / n_fetch models: exactly, in payload bytes."""
    received, sent = traffic(start_server_process(), push_every=n_push, pull_every=n_fetch)
    assert received == STEPS // n_push * MODEL_BYTES
    # What has not changed since the last fetch is not sent again, and alone the replica makes all versions.
    assert sent == STEPS // max(n_push, n_fetch) * MODEL_BYTES


def test_d6_a_killed_replica_loses_what_it_had_not_pushed_and_the_others_go_on(
    start_server_process: StartServer, start_python: StartPython
) -> None:
    """kill -9 costs the gradients summed for the next push and the push on its way: fewer than 2 n_push minibatches."""
    n_push = 4
    server = start_server_process("--lease-seconds", "30")
    replicas = {name: start_python("-c", REPLICA, server.data, name, str(n_push)) for name in ("dies", "lives")}
    for replica in replicas.values():
        replica.wait_for_output("computed 41")

    replicas["dies"].kill()

    lost_of = workers(server)["dies"]
    computed = computed_by(replicas["dies"])
    assert lost_of.pushes_rejected == lost_of.pushes_duplicate == 0
    assert 0 <= computed - n_push * lost_of.pushes_applied < 2 * n_push
    # Nobody waits for its lease: the other's pushes go on at once.
    applied = workers(server)["lives"].pushes_applied
    wait_until(lambda: workers(server)["lives"].pushes_applied >= applied + 5, 20, "pushes of the one that lives")
    assert workers(server)["dies"].state == "alive"


def test_d8_a_restarted_replica_goes_on_from_the_server_and_nothing_is_applied_twice(
    start_server_process: StartServer, start_python: StartPython
) -> None:
    server = start_server_process("--lease-seconds", "30")
    first = start_python("-c", REPLICA, server.data, "replica", "1")
    first.wait_for_output("computed 20")
    first.kill()
    applied = status(server).pushes_applied
    second = start_python("-c", REPLICA, server.data, "replica", "1")
    second.wait_for_output("computed 10")
    second.kill()
    after = status(server)
    # One update a push, whichever life sent it: what the second life computed came on top of the first one's.
    assert after.version_max == after.pushes_applied >= applied + 9
    assert after.pushes_duplicate == 0
    computed = sum(computed_by(life) for life in (first, second))
    assert computed - 2 <= after.pushes_applied <= computed
