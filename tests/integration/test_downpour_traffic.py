"""Downpour SGD over real connections: Dean et al., Large Scale Distributed Deep Networks (NIPS 2012), section 4.1.

The invariants D5, D6 and D8 of the algorithm notes, section 2.3: what is sent falls with n_push and n_fetch, and a
killed replica costs its own work alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import torch

from pyps_client import RemoteOptimizer
from support import PythonProcess, ServerThread, wait_until
from training import backward, batches, gradients_of, mlp, parameters_of, status, workers

StartServer = Callable[..., ServerThread]
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


def appendix(
    batch_list: Sequence[tuple[torch.Tensor, torch.Tensor]],
    *,
    rate: float,
    local: float,
    push_every: int,
    pull_every: int,
    paper: bool,
) -> list[np.ndarray]:
    """Appendix algorithm 1.1 for one worker on `mlp`, every thread's work done at once; the server is plain SGD."""
    model = mlp()
    server = params = parameters_of(model)
    accrued = np.zeros_like(server)
    trajectory = []
    for step, batch in enumerate(batch_list):
        if step % pull_every == 0:
            params = server
        trajectory.append(params)
        torch.nn.utils.vector_to_parameters(torch.from_numpy(params), model.parameters())
        backward(model, batch)
        accrued = accrued + gradients_of(model)
        params = params - np.float32(local) * gradients_of(model)
        if (step if paper else step + 1) % push_every == 0:
            server = server - np.float32(rate) * accrued
            accrued = np.zeros_like(server)
    return trajectory


def test_push_every_and_pull_every_follow_the_appendix(start_server: StartServer) -> None:
    batch_list = list(batches(20))
    for compat in (None, "paper"):
        # Between pulls a worker's own pushes make its next ones stale; the appendix knows no division by that.
        server = start_server("--staleness", "none")
        model = mlp()
        pace = {"push_every": 2, "pull_every": 3, "local_learning_rate": 0.05, "compat": compat}
        seen = []
        with RemoteOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), server.data, **pace) as optimizer:
            for batch in batch_list:
                seen.append(parameters_of(model))
                backward(model, batch)
                optimizer.step()
        expected = appendix(batch_list, rate=0.1, local=0.05, push_every=2, pull_every=3, paper=compat == "paper")
        for mine, theirs in zip(seen, expected, strict=True):
            assert np.linalg.norm(mine - theirs) <= 1e-6 * np.linalg.norm(theirs), compat


def test_d5_bytes_fall_by_n_push_and_n_fetch(start_server: StartServer) -> None:
    """A step sends 1 / n_push gradients and fetches 1 / n_fetch models: exactly, in payload bytes."""
    for n_push, n_fetch in ((1, 1), (4, 4), (2, 8), (8, 2)):
        server = start_server()
        model = mlp()
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        with RemoteOptimizer(model, sgd, server.data, push_every=n_push, pull_every=n_fetch) as optimizer:
            for count, batch in enumerate(batches(FIRST_STEPS + STEPS)):
                if count == FIRST_STEPS:
                    before = status(server)
                backward(model, batch)
                optimizer.step(examples=16)
            after = status(server)
        assert after.bytes_in - before.bytes_in == STEPS // n_push * MODEL_BYTES
        # What has not changed since the last fetch is not sent again, and alone the replica makes all versions.
        assert after.bytes_out - before.bytes_out == STEPS // max(n_push, n_fetch) * MODEL_BYTES
        assert after.examples - before.examples == STEPS * 16


def test_overlapped_steps_push_every_gradient(start_server: StartServer) -> None:
    """Plain SGD: final parameters = first - rate * (sum of gradients), in whatever order (U5)."""
    server = start_server("--staleness", "none")
    model = mlp()
    first, total = parameters_of(model).astype(np.float64), np.zeros(len(parameters_of(model)))
    with RemoteOptimizer(
        model, torch.optim.SGD(model.parameters(), lr=0.01), server.data, overlap="step", push_every=2
    ) as optimizer:
        for batch in batches(61):
            backward(model, batch)
            total += gradients_of(model)
            optimizer.step(examples=16)
        optimizer.close()
        assert status(server).examples == 61 * 16
    again = mlp(seed=5)
    with RemoteOptimizer(
        again, torch.optim.SGD(again.parameters(), lr=0.01), server.data, run_id=optimizer.run_id, worker_id="reader"
    ):
        final = parameters_of(again)
    np.testing.assert_allclose(final, first - 0.01 * total, atol=2e-6)


def test_d6_a_killed_replica_loses_what_it_had_not_pushed_and_the_others_go_on(
    start_server: StartServer, start_python: StartPython
) -> None:
    """kill -9 costs the gradients summed for the next push and the push on its way: fewer than 2 n_push minibatches."""
    n_push = 4
    server = start_server("--lease-seconds", "30")
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
    start_server: StartServer, start_python: StartPython
) -> None:
    server = start_server("--lease-seconds", "30")
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
