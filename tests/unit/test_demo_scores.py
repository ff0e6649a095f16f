"""What the demo makes of parameters, compared with the workers' own script."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import numpy as np
import pytest
import torch
from torch.nn import functional

from pyps.cli.demo.command import worker_script
from pyps.cli.demo.scores import Scores


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """examples/digits.py as a module."""
    spec = importlib.util.spec_from_file_location("digits", worker_script())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_loss_and_accuracy_are_those_of_the_scripts_images(script: ModuleType) -> None:
    torch.manual_seed(1)
    network = script.network()
    parameters = {name: values.detach().numpy() * 5 for name, values in network.named_parameters()}
    network.load_state_dict({name: torch.tensor(values) for name, values in parameters.items()})
    images, labels = script.digits()[0].tensors

    scores = Scores()

    with torch.no_grad():
        assert scores.loss(parameters) == pytest.approx(
            functional.cross_entropy(network(images), labels).item(), rel=1e-5
        )
    assert scores.accuracy(parameters) == pytest.approx(script.evaluate(parameters)["accuracy"])


def test_scores_that_are_large_do_not_overflow() -> None:
    parameters = {
        "0.weight": np.full((64, 64), 100, np.float32),
        "0.bias": np.zeros(64, np.float32),
        "2.weight": np.eye(10, 64, dtype=np.float32) * 100,
        "2.bias": np.zeros(10, np.float32),
    }
    assert np.isfinite(Scores().loss(parameters))
