"""The demo's loss and accuracy, and its figures from the answers of several servers."""

import runpy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from pyps.cli.demo import example
from pyps.watch.answer import merged
from pyps_wire import inspector_pb2 as pb


def test_loss_and_accuracy_are_those_of_the_scripts_images():
    script: Any = SimpleNamespace(**runpy.run_path(str(example.WORKER)))
    torch.manual_seed(1)
    network = script.network()
    parameters = {name: values.detach().numpy() * 5 for name, values in network.named_parameters()}
    network.load_state_dict({name: torch.tensor(values) for name, values in parameters.items()})
    images, labels = script.digits()[0].tensors

    loss, accuracy = example.Images().score(parameters)

    with torch.no_grad():
        assert loss == pytest.approx(functional.cross_entropy(network(images), labels).item(), rel=1e-5)
    assert accuracy == pytest.approx(script.evaluate(parameters)["accuracy"])


def listing(**counts: dict[str, float]) -> pb.ListWorkersReply:
    """Return a server's list of workers with these counts, by name."""
    return pb.ListWorkersReply(workers=[{"worker_id": name, "tally": tally} for name, tally in counts.items()])


def test_a_worker_of_two_servers_is_listed_once_with_means_over_both():
    first = {"pushes_applied": 9, "rate_scale_count": 9, "staleness_mean": 1.0, "staleness_max": 2, "step_lost": 0.0}
    second = {"pushes_applied": 3, "rate_scale_count": 3, "staleness_mean": 3.0, "staleness_max": 7, "step_lost": 0.4}
    statuses = [pb.Status(num_shards=3), pb.Status(num_shards=1)]

    answers = example.Answers(statuses, example.by_worker([listing(b=first, a={}), listing(b=second)]))

    assert list(answers.workers) == ["a", "b"]
    known = answers.workers["b"]
    tally = merged([one.tally for one in known])
    assert (answers.pushes(known), tally.staleness_mean, tally.staleness_max) == (3.0, 1.5, 7)
    assert tally.step_lost == pytest.approx(0.1)


def test_workers_that_joined_before_there_are_shards_have_pushed_nothing():
    answers = example.Answers([pb.Status()], example.by_worker([listing(a={})]))

    known = answers.workers["a"]
    assert (answers.pushes(known), merged([one.tally for one in known])) == (0.0, pb.Tally())
