"""Sessions that are processes of a replica, with a small model cut in two, and what their pushes make of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cut_model import CUT, vectors_of, whole_tensors
from inspection import inspect
from peer_threads import ThreadPeers
from pyps_client import Launch, Observer, PypsError, Session
from pyps_wire.common_pb2 import GroupSettings, OptimizerSettings
from pyps_wire.inspector_pb2 import WorkerInfo
from pyps_wire.partition import Model
from support import AnyServer

Floats = npt.NDArray[np.float32]

SGD = OptimizerSettings(rule="sgd", groups=[GroupSettings(hyperparameters={"learning_rate": 1.0})] * CUT.num_groups)
QUICK = ("--heartbeat-seconds", "0.1")


def session_of(
    servers: str,
    peers: ThreadPeers | None = None,
    *,
    seed: int = 1,
    model: Model = CUT,
    worker_id: str = "plain",
    **launch: Any,
) -> Session:
    """A session that is one process of a replica, with the part of its index; without peers, of a whole worker."""
    parts = () if peers is None else (peers.index,)
    settings = {"start_wait_seconds": 60.0, "loss_wait_seconds": 60.0, "wait_seconds": 60.0} | launch
    vectors = vectors_of(whole_tensors(seed))
    return Session(
        model,
        SGD,
        launch=Launch(servers=tuple(servers.split(",")), worker_id=worker_id, **settings),
        initial=lambda: vectors if peers is None else [vectors[peers.index]],
        parts=parts,
        peers=peers,
    )


def zeros_of(session: Session) -> list[Floats]:
    return [np.zeros(size, np.float32) for size in session.model.group_sizes]


def pulled(session: Session) -> list[Floats]:
    vectors = zeros_of(session)
    session.pull(vectors)
    return vectors


def ones(session: Session, value: float = 1.0) -> list[Floats]:
    return [np.full(size, value, np.float32) for size in session.model.group_sizes]


def snapshot(servers: str) -> dict[str, Floats]:
    with Observer(servers) as observer:
        return observer.snapshot()


def moved(by: float, seed: int = 1) -> dict[str, Floats]:
    """The first parameters after steps of plain SGD that sum up to `by` in every number."""
    return {name: values + np.float32(by) for name, values in whole_tensors(seed).items()}


def assert_equal(tensors: dict[str, Floats], expected: dict[str, Floats], **tolerance: float) -> None:
    assert tensors.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(tensors[name], values, err_msg=name, **({"rtol": 1e-6, "atol": 1e-6} | tolerance))


def workers_of(server: AnyServer) -> dict[str, WorkerInfo]:
    return {worker.worker_id: worker for worker in inspect(server.control, "ListWorkers").workers}


def error_of(call: Callable[[], object]) -> PypsError:
    with pytest.raises(PypsError) as caught:
        call()
    return caught.value
