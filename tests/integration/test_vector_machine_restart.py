"""A coordinator's vectors over a server's restart: what was committed is there, whole, and trials are gone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np

from pyps_wire import inspector_pb2
from pyps_wire.inspector_pb2_grpc import InspectorStub
from pyps_wire.partition import Model, Tensor
from support import AnyServer
from wire_coordinator import WireCoordinator, instruction
from wire_worker import CHANNEL_OPTIONS, WireWorker, values_of

Start = Callable[..., AnyServer]
MODEL = Model((Tensor("layer.weight", (10, 7)),), shard_size=16)
SIZE = 70


@contextlib.contextmanager
def coordinating(server: AnyServer) -> Iterator[tuple[WireCoordinator, WireWorker]]:
    with WireWorker(server.data, model=MODEL) as worker:
        worker.join()
        yield WireCoordinator(worker), worker


def begin(coordinator: WireCoordinator) -> None:
    coordinator.attach()
    coordinator.execute(*(instruction("ALLOC", target=name) for name in ("x", "g", "t")))


def iterate(coordinator: WireCoordinator, k: int) -> None:
    """A trial that moves the parameters, then the commit: x = k, g = -k, and the k-th pair k, 1/k."""
    coordinator.execute(instruction("FILL", target="t", scalar=1000.0 + k), instruction("MOVE", left="t"))
    coordinator.execute(
        *(instruction("ALLOC", target=name) for name in ("s", "y")),
        instruction("FILL", target="s", scalar=k),
        instruction("FILL", target="y", scalar=1 / k),
        instruction("PUSH_HISTORY", left="s", right="y"),
        *([instruction("DROP_OLDEST")] if k > 1 else []),
        instruction("FILL", target="x", scalar=k),
        instruction("FILL", target="g", scalar=-k),
        commits=k,
        state=f"state {k}",
    )


def norms(coordinator: WireCoordinator, *names: str) -> list[float]:
    return list(coordinator.execute(*(instruction("NORM_INF", left=name) for name in names)).scalars)


def whole(worker: WireWorker) -> np.ndarray:
    return np.concatenate([values_of(shard) for shard in worker.observe()])


def test_a_coordinator_goes_on_from_its_last_commit_after_a_restart(start_server: Start, tmp_path: Path) -> None:
    flags = ("--protocol", "sandblaster", "--run-id", "run-1", "--checkpoint-dir", str(tmp_path))
    server = start_server(*flags)
    with coordinating(server) as (coordinator, _):
        begin(coordinator)
        for k in (1, 2, 3):
            iterate(coordinator, k)
        coordinator.execute(instruction("FILL", target="t", scalar=77.0), instruction("MOVE", left="t"))
        assert server.stop() == 0

    with coordinating(start_server(*flags, "--resume")) as (coordinator, worker):
        attached = coordinator.attach()

        assert attached.coordinator_epoch > 1
        assert (attached.iteration, attached.state) == (3, "state 3")
        assert list(attached.vectors) == ["g", "s3", "x", "y3"]
        assert (whole(worker) == 3).all()
        assert norms(coordinator, "x", "g", "s3", "y3") == [3.0, 3.0, 3.0, float(np.float32(1 / 3))]
        coordinator.execute(instruction("ALLOC", target="t"))
        iterate(coordinator, 4)
        assert norms(coordinator, "x", "g", "s4") == [4.0, 4.0, 4.0]


def test_a_checkpoint_asked_for_amid_programs_is_of_one_iteration(start_server_process: Start, tmp_path: Path) -> None:
    flags = ("--protocol", "sandblaster", "--run-id", "run-1", "--checkpoint-dir", str(tmp_path))
    server = start_server_process(*flags)
    saved = threading.Event()

    def save() -> None:
        with grpc.insecure_channel(server.control, options=CHANNEL_OPTIONS) as channel:
            for _ in range(3):
                InspectorStub(channel).SaveCheckpoint(inspector_pb2.SaveCheckpointRequest(), timeout=60)
        saved.set()

    with coordinating(server) as (coordinator, _):
        begin(coordinator)
        thread = threading.Thread(target=save)
        thread.start()
        k = 0
        while not saved.is_set():
            k += 1
            iterate(coordinator, k)
        thread.join(60)
        # Nothing is saved on the way out.
        server.kill()

    with coordinating(start_server_process(*flags, "--resume")) as (coordinator, worker):
        attached = coordinator.attach()
        k = attached.iteration
        assert attached.state == (f"state {k}" if k else "")
        pair = [f"s{k}", f"y{k}"] if k else []
        assert set(attached.vectors) == {"x", "g", *pair}
        assert norms(coordinator, "x", "g") == [k, k]
        assert (whole(worker) == k).all()
