"""One of two servers killed in a round, and back from its checkpoint: every update counts once, over any transport."""

import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from client_support import addresses, make_client
from pyps.storage.checkpoint import Checkpoint
from pyps_client.push import Plan
from pyps_client.vectors import Vector
from pyps_client.worker import Worker
from pyps_wire.common_pb2 import OUTCOME_APPLIED, Receipt
from support import ServerProcess, checksums, inspect, wait_until
from wire_worker import maps_of, segments_of

# Four shards on each server, 8 MB: a round takes long enough to be met in its midst.
MODEL = {"x": np.zeros(4_000_000, np.float32)}
SHARD_SIZE = 500_000
# Each update takes 1 from each number: float32 counts them without an error.
SGD = ("sgd", {"learning_rate": 1.0})


@pytest.fixture
def segments_of_others() -> Iterator[set[int]]:
    """What this process held of shared memory before the test; looks afterwards that no more is left.

    Memory that is shared has no name: it is gone when nobody maps it or has it open.
    """
    others = segments_of(os.getpid())
    yield others
    gc.collect()
    assert segments_of(os.getpid()) <= others, "memory of the test's workers is still mapped or open here"


class Rounds:
    """Rounds without a pause in a thread of their own, and what the servers answered to each."""

    def __init__(self, session: Worker, *, gradient: Vector, parameters: Vector, training: ThreadPoolExecutor):
        self.receipts: list[list[Receipt]] = []
        self._session = session
        self._gradient, self._parameters = gradient, parameters
        self._ends = threading.Event()
        self._trained: Future[None] = training.submit(self._train)

    def wait_for(self, num_rounds: int) -> None:
        seen = len(self.receipts)
        wait_until(lambda: self._trained.done() or len(self.receipts) >= seen + num_rounds, 60, "rounds")
        if self._trained.done():
            self._trained.result()

    def end(self) -> None:
        self._ends.set()
        self._trained.result(60)

    def applied(self, shard_id: int) -> list[tuple[int, int]]:
        """The epoch and the version of each update of the shard, as they were answered."""
        return [
            (receipt.epoch, receipt.version_after)
            for receipt in self._of(shard_id)
            if receipt.outcome == OUTCOME_APPLIED
        ]

    def refused(self, shard_id: int) -> Counter[int]:
        return Counter(receipt.reason for receipt in self._of(shard_id) if receipt.outcome != OUTCOME_APPLIED)

    def _of(self, shard_id: int) -> Iterator[Receipt]:
        return (receipt for receipts in self.receipts for receipt in receipts if receipt.shard_id == shard_id)

    def _train(self) -> None:
        while not self._ends.is_set():
            self.receipts.append(self._session.exchange(Plan([self._gradient], [self._parameters])))
            if self._session.pull_needed:
                self._session.pull([self._parameters])


@contextmanager
def rounds_of(session: Worker, *, gradient: Vector, parameters: Vector) -> Iterator[Rounds]:
    with ThreadPoolExecutor(1) as training:
        rounds = Rounds(session, gradient=gradient, parameters=parameters, training=training)
        try:
            yield rounds
        except BaseException:
            # The thread may wait for a server that never comes back.
            session.close("failed")
            raise
        rounds.end()


def wait_for_half_a_round(values: Vector) -> None:
    """Returns as soon as the first of a server's numbers is of another round than its last."""
    deadline = time.monotonic() + 60
    while values[0] == values[-1]:
        assert time.monotonic() < deadline, "no round was met in its midst"


def flags_of(folder: Path) -> tuple[str, ...]:
    return ("--checkpoint-dir", str(folder), "--staleness", "none")


def saved_versions(server: ServerProcess) -> dict[int, int]:
    """The version of each shard in a checkpoint made now, in which each number has had all of its shard's updates."""
    saved = Checkpoint(Path(inspect(server.control, "SaveCheckpoint").path)).load().shards
    for shard in saved.values():
        assert shard.parameters.min() == shard.parameters.max() == -float(shard.version)
    return {shard_id: shard.version for shard_id, shard in saved.items()}


@pytest.mark.parametrize(("lost", "transport"), [(0, "shm"), (1, "shm"), (1, "tcp")])
def test_one_of_two_servers_killed_in_a_round_comes_back_to_the_same_memory(
    start_server_process, tmp_path, segments_of_others, lost, transport
):
    folders = [tmp_path / "server-0", tmp_path / "server-1"]
    servers = [start_server_process(*flags_of(folder), wait=False) for folder in folders]
    for server in servers:
        server.wait_ready()
    doomed, steady = servers[lost], servers[1 - lost]

    client = make_client(
        addresses(servers),
        tensors=MODEL,
        optimizer=SGD,
        shard_size=SHARD_SIZE,
        transport=transport,
        loss_wait_seconds=120,
    )
    session, parameters = client.session, client._parameters
    shards = {server: session.partition.of_server(index) for index, server in enumerate(servers)}
    # A server's shards lie end to end.
    part = parameters[shards[doomed][0].offset :][: sum(shard.length for shard in shards[doomed])]
    shared = segments_of(os.getpid()) - segments_of_others
    assert len(shared) == (transport == "shm")
    client._gradient[:] = 1.0
    with rounds_of(session, gradient=client._gradient, parameters=parameters) as rounds:
        rounds.wait_for(3)
        saved = saved_versions(doomed)
        rounds.wait_for(3)
        wait_for_half_a_round(part)
        doomed.kill()

        # What the dead server has left is of two rounds at most, number by number. A lane may end amid a number.
        assert not shared or part.max() - part.min() <= 1
        assert not shared or ((part == part.min()) | (part == part.max())).all()
        # The other has taken the round that the dead one owes an answer to, and shares the memory as before.
        wait_until(
            lambda: {version for version, _ in checksums(steady.control).values()} == {len(rounds.receipts) + 1},
            60,
            "the round on the other server",
        )
        assert segments_of(steady.pid) == shared
        assert len(maps_of(steady.pid)) == len(shared)

        port = doomed.data.rsplit(":", 1)[1]
        resumed = start_server_process(*flags_of(folders[lost]), "--resume", "--port", port)
        rounds.wait_for(5)
    assert session.transport == transport
    assert segments_of(resumed.pid) == segments_of(steady.pid) == shared

    held, now = session.held_versions, saved_versions(resumed) | saved_versions(steady)
    assert held == now
    assert held.epochs == tuple(int(index == lost) for index in range(2))
    for shard in session.partition.shards:
        values = parameters[shard.offset :][: shard.length]
        assert values.min() == values.max() == -float(now[shard.shard_id])
    for shard_id in (shard.shard_id for shard in shards[steady]):
        assert rounds.applied(shard_id) == [(0, version) for version in range(1, len(rounds.receipts) + 1)]
        assert not rounds.refused(shard_id)
        assert now[shard_id] == len(rounds.receipts)
    for shard_id in (shard.shard_id for shard in shards[doomed]):
        before = [version for epoch, version in rounds.applied(shard_id) if epoch == 0]
        after = [version for epoch, version in rounds.applied(shard_id) if epoch == 1]
        # The worker has sent again what came after the checkpoint, and the round that was cut.
        assert 0 < saved[shard_id] < len(before)
        assert before + after == list(range(1, len(rounds.receipts) + 1))
        assert now[shard_id] == len(rounds.receipts)

    client.close()
    wait_until(lambda: not segments_of(steady.pid) | segments_of(resumed.pid), 20, "the memory let go by the servers")
    assert "bug" not in steady.output() + resumed.output()
