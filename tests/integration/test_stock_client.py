"""examples/stock_client.py: the contract is enough for a worker, to the bits of one of pyps_client."""

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from client_support import make_client
from support import status_of, workers_of

SCRIPT = Path(__file__).parents[2] / "examples" / "stock_client.py"


@pytest.fixture
def stock() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stock_client", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("protocol", ["async", "hardsync"])
def test_a_stock_client_trains_to_the_bits_of_ours(start_server, stock, protocol):
    server = start_server("--protocol", protocol)
    trained = stock.train(server.data, steps=20)

    assert status_of(server).version_max == 20
    assert workers_of(server.control)["stock"].state == "finished"
    server, options = start_server("--protocol", protocol), {"tensors": stock.TENSORS, "transport": "shm"}
    with make_client(server.data, optimizer=(stock.RULE, stock.HYPERPARAMETERS), **options) as client:
        parameters = client.pull()
        for step in range(20):
            parameters = client.exchange(stock.gradients_of(parameters, step))
        for name, values in parameters.items():
            np.testing.assert_array_equal(trained[name], values)


def test_it_imports_nothing_of_our_client():
    assert " pyps_client" not in "".join(line for line in SCRIPT.open(encoding="utf-8") if "import" in line)
