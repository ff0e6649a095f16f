"""What the demo makes of parameters, of the answers of several servers, and what it shows of them."""

from __future__ import annotations

import runpy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from pyps.cli.demonstration import Answers, Images, by_worker, worker_script
from pyps.cli.status import mean
from pyps_wire import inspector_pb2 as pb


def test_loss_and_accuracy_are_those_of_the_scripts_images() -> None:
    script: Any = SimpleNamespace(**runpy.run_path(str(worker_script())))
    torch.manual_seed(1)
    network = script.network()
    parameters = {name: values.detach().numpy() * 5 for name, values in network.named_parameters()}
    network.load_state_dict({name: torch.tensor(values) for name, values in parameters.items()})
    images, labels = script.digits()[0].tensors

    loss, accuracy = Images().score(parameters)

    with torch.no_grad():
        assert loss == pytest.approx(functional.cross_entropy(network(images), labels).item(), rel=1e-5)
    assert accuracy == pytest.approx(script.evaluate(parameters)["accuracy"])


def worker(worker_id: str, **known: float) -> pb.WorkerInfo:
    return pb.WorkerInfo(worker_id=worker_id, state="alive", **known)


def listing(*workers: pb.WorkerInfo) -> pb.ListWorkersReply:
    return pb.ListWorkersReply(workers=workers)


def test_a_worker_of_two_servers_is_listed_once_with_means_over_both() -> None:
    first = worker("b", pushes_applied=9, staleness_mean=1.0, rate_scale_mean=1.0)
    second = worker("b", pushes_applied=3, staleness_mean=3.0, rate_scale_mean=0.6)
    statuses = [pb.Status(num_shards=3), pb.Status(num_shards=1)]

    answers = Answers(statuses, by_worker([listing(first, worker("a")), listing(second)]))

    assert list(answers.workers) == ["a", "b"]
    known = answers.workers["b"]
    assert (answers.pushes(known), mean(known, "staleness_mean")) == (3.0, 1.5)
    assert mean(known, "rate_scale_mean") == pytest.approx(0.9)


def test_workers_that_joined_before_there_are_shards_have_pushed_nothing() -> None:
    answers = Answers([pb.Status()], by_worker([listing(worker("a"))]))

    assert (answers.pushes(answers.workers["a"]), mean(answers.workers["a"], "staleness_mean")) == (0.0, 0.0)
