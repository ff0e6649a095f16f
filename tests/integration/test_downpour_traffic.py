"""Downpour SGD over real connections: Dean et al., Large Scale Distributed Deep Networks (NIPS 2012), section 4.1.

D5 of the algorithm notes, section 2.3: what is sent falls with n_push and n_fetch.
"""

import numpy as np
import torch

from support import status_of
from training import backward, batches, gradients_of, joined, mlp, parameters_of

STEPS = 24
# A multiple of every n_push and n_fetch; the first step also says Hello and sends the first parameters.
FIRST_STEPS = 8
MODEL_BYTES = 4 * 4522


def test_the_papers_loop_pushes_its_first_gradient_alone(start_server):
    server = start_server()
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    pace = {"push_every": 2, "pull_every": 3, "local_learning_rate": 0.05, "compat": "paper"}
    with joined(model, sgd, server.data, **pace) as optimizer:
        for batch in batches(2):
            before = parameters_of(model)
            backward(model, batch)
            optimizer.step()
            np.testing.assert_allclose(parameters_of(model), before - 0.05 * gradients_of(model), atol=1e-7)
            assert status_of(server).version_max == 1


def test_d5_bytes_fall_by_n_push_and_n_fetch(start_server):
    """A step sends 1 / n_push gradients and fetches 1 / n_fetch models: exactly, in payload bytes."""
    for n_push, n_fetch in ((1, 1), (4, 4), (2, 8), (8, 2)):
        server = start_server()
        model = mlp()
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        with joined(model, sgd, server.data, push_every=n_push, pull_every=n_fetch) as optimizer:
            for count, batch in enumerate(batches(FIRST_STEPS + STEPS)):
                if count == FIRST_STEPS:
                    before = status_of(server)
                backward(model, batch)
                optimizer.examples_in_batch = 16
                optimizer.step()
            after = status_of(server)
        assert after.tally.bytes_in - before.tally.bytes_in == STEPS // n_push * MODEL_BYTES
        # What has not changed since the last fetch is not sent again, and alone the replica makes all versions.
        assert after.tally.bytes_out - before.tally.bytes_out == STEPS // max(n_push, n_fetch) * MODEL_BYTES
        assert after.examples - before.examples == STEPS * 16
