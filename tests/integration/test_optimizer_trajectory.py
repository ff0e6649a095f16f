"""One worker through real servers takes the steps that its optimizer would take by itself."""

import numpy as np
import pytest
import torch

from pyps_client import RemoteOptimizer
from training import addresses, backward, batches, gradients_of, mlp, parameters_of, status


class NumpySgd:
    """p = p - rate * g, in float32."""

    def __init__(self, rate: float) -> None:
        self.rate = np.float32(rate)

    def apply(self, parameters: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        return parameters - self.rate * gradient


class NumpyAdagrad:
    """Dean et al. 2012, section 4.1: divided by the root of the sum of squares, which includes this gradient."""

    def __init__(self, rate: float, eps: float, initial: float) -> None:
        self.rate, self.eps, self.accumulator = np.float32(rate), np.float32(eps), np.float32(initial)

    def apply(self, parameters: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        self.accumulator = self.accumulator + gradient * gradient
        return parameters - self.rate * gradient / (np.sqrt(self.accumulator) + self.eps)


RULES = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1), lambda: NumpySgd(0.1)),
    "adagrad": (
        lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-8, initial_accumulator_value=0.01),
        lambda: NumpyAdagrad(0.05, 1e-8, 0.01),
    ),
}


@pytest.mark.parametrize("num_servers", [1, 2, 3])
@pytest.mark.parametrize("rule", RULES)
def test_one_worker_equals_the_formula_bit_for_bit_and_torch_to_1e_6(start_server, rule, num_servers) -> None:
    make_torch, make_numpy = RULES[rule]
    servers = [start_server() for _ in range(num_servers)]
    model, twin = mlp(), mlp()
    twin_optimizer, reference = make_torch(twin.parameters()), make_numpy()
    expected = parameters_of(model)
    with RemoteOptimizer(model, make_torch(model.parameters()), addresses(servers)) as optimizer:
        for batch in batches(100):
            backward(model, batch)
            expected = reference.apply(expected, gradients_of(model))
            optimizer.step()
            np.testing.assert_array_equal(parameters_of(model), expected)
            backward(twin, batch)
            twin_optimizer.step()
        assert optimizer.global_step == 100
    difference = np.linalg.norm(parameters_of(model) - parameters_of(twin))
    assert difference <= 1e-6 * np.linalg.norm(parameters_of(twin))


def appendix(batch_list, *, rate, local, push_every, pull_every, paper):
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


@pytest.mark.parametrize("compat", [None, "paper"])
@pytest.mark.parametrize(("push_every", "pull_every"), [(3, 1), (1, 4), (2, 3)])
def test_push_every_and_pull_every_follow_the_appendix(start_server, push_every, pull_every, compat) -> None:
    # Between pulls a worker's own pushes make its next ones stale; the appendix knows no division by that.
    server = start_server("--staleness", "none")
    batch_list = list(batches(20))
    model = mlp()
    seen = []
    with RemoteOptimizer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        server.data,
        push_every=push_every,
        pull_every=pull_every,
        local_learning_rate=0.05,
        compat=compat,
    ) as optimizer:
        for batch in batch_list:
            seen.append(parameters_of(model))
            backward(model, batch)
            optimizer.step()
    expected = appendix(
        batch_list, rate=0.1, local=0.05, push_every=push_every, pull_every=pull_every, paper=compat == "paper"
    )
    for mine, theirs in zip(seen, expected, strict=True):
        assert np.linalg.norm(mine - theirs) <= 1e-5 * np.linalg.norm(theirs)


@pytest.mark.parametrize(("push_every", "pull_every"), [(1, 1), (4, 1), (1, 4), (4, 2)])
def test_bytes_fall_by_push_every_and_pull_every(start_server, push_every, pull_every) -> None:
    """D5 of the specification: bytes per step fall by exactly 1/n_push and 1/n_fetch."""
    server = start_server()
    model = mlp()
    size = 4 * len(parameters_of(model))
    with RemoteOptimizer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        server.data,
        push_every=push_every,
        pull_every=pull_every,
    ) as optimizer:
        joined = status(server)
        for batch in batches(16):
            backward(model, batch)
            optimizer.step(examples=16)
        trained = status(server)
    # A pull brings only what is newer: with fewer pushes than pulls, some bring nothing.
    pulls_of_news = 16 // max(push_every, pull_every)
    assert trained.bytes_in - joined.bytes_in == 16 // push_every * size
    assert trained.bytes_out - joined.bytes_out == pulls_of_news * size
    assert trained.examples == 16 * 16


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_travel_in_half_the_bytes_and_parameters_stay_float32(start_server, dtype) -> None:
    server = start_server()
    model = mlp()
    size = len(parameters_of(model))
    expected = parameters_of(model)
    optimizer = RemoteOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), server.data, gradient_dtype=dtype)
    joined = status(server)
    for batch in batches(5):
        backward(model, batch)
        sent = torch.from_numpy(gradients_of(model)).to(getattr(torch, dtype)).float().numpy()
        expected = expected - np.float32(0.1) * sent
        optimizer.step()
        np.testing.assert_array_equal(parameters_of(model), expected)
    assert status(server).bytes_in - joined.bytes_in == 5 * 2 * size
    optimizer.close()


def test_overlapped_steps_push_every_gradient(start_server) -> None:
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
