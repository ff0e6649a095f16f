"""What the demo makes of parameters, of the answers of several servers, and what it shows of them."""

from __future__ import annotations

import runpy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from pyps.cli.demo.command import worker_script
from pyps.cli.demo.progress import merge_workers
from pyps.cli.demo.scores import Scores
from pyps_wire import inspector_pb2 as pb


def test_loss_and_accuracy_are_those_of_the_scripts_images() -> None:
    script: Any = SimpleNamespace(**runpy.run_path(str(worker_script())))
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


def worker(worker_id: str, **known: float) -> pb.WorkerInfo:
    return pb.WorkerInfo(worker_id=worker_id, state="alive", **known)


def test_a_worker_of_two_servers_is_listed_once_with_means_over_both() -> None:
    first = worker("b", clock=5, pushes_applied=9, staleness_mean=1.0, staleness_max=2, rate_scale_mean=1.0)
    second = worker("b", clock=5, pushes_applied=3, staleness_mean=3.0, staleness_max=7, rate_scale_mean=0.6)
    first.scalars["loss"] = 0.5

    merged = merge_workers([[first, worker("a")], [second]], [pb.Status(num_shards=3), pb.Status(num_shards=1)])

    assert [one.worker_id for one in merged] == ["a", "b"]
    b = merged[1]
    assert (b.steps, b.loss, b.pushes, b.staleness_mean, b.staleness_max) == (5, 0.5, 3.0, 1.5, 7)
    assert b.rate_scale_mean == pytest.approx(0.9)


def test_workers_that_joined_before_there_are_shards_have_pushed_nothing() -> None:
    merged = merge_workers([[worker("a")]], [pb.Status()])

    assert (merged[0].pushes, merged[0].staleness_mean, merged[0].loss) == (0.0, 0.0, None)
