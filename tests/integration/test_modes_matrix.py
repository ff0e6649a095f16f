"""Every protocol, policy and update rule with one and several workers and servers.

A greedy cover picks cells in which all pairs of values meet, the same ones each time. A cell is a short run on real
servers of the test's own process, called without a socket: workers without torch pull and push. Then the universal
invariants must hold (algorithm notes 1.4). test_every_mode.py holds the core alone to them in all combinations, with
repeated pushes (U3).
"""

import itertools
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from client_support import gradients_like, make_client, small_model
from pyps.core import protocols, staleness
from pyps.core.arrays import Floats
from pyps.core.protocols import PROTOCOLS
from pyps.core.rules import RULES
from pyps.core.staleness import POLICIES
from pyps.storage.replay import log_paths, replay
from pyps_client import Client, Observer
from pyps_wire import inspector_pb2 as pb
from pyps_wire.common_pb2 import OUTCOME_APPLIED, OUTCOME_PENDING, OUTCOME_REJECTED, Receipt
from shards import make_shard, push, run_together
from support import DEADLINE_SECONDS, ServerThread, Start, inspect

FACTORS: Mapping[str, tuple[str | int, ...]] = {
    "protocol": (
        *("async", "softsync:n=1", "softsync:n=2", "hardsync", "hardsync:weighting=equal", "backup:b=1"),
        *("ssp:s=1", "ssp:s=0,strict_bsp=true", "serial", "asgd:mutex=shard", "asgd:mutex=whole"),
    ),
    "policy": (
        *("none", "divide", "divide_plus_one", "constant", "per_update", "exponential:beta=0.2", "polynomial:a=0.5"),
        *("hinge:a=2,b=1", "drop:spread=3"),
    ),
    "rule": tuple(RULES),
    "workers": (1, 4),
    "servers": (1, 2, 3),
}
# Gradients are all computed on the version that they are applied to.
NEVER_STALE = ("hardsync", "backup", "serial", "ssp:s=0,strict_bsp=true")
# Every push is an update, or is refused.
NEVER_WAITING = ("async", "serial", "asgd", "ssp:s=1")
STEPS = 5
RATE = 0.01

Pair = frozenset[tuple[str, str | int]]


@dataclass(frozen=True)
class Cell:
    """One mode, as a run."""

    protocol: str
    policy: str
    rule: str
    workers: int
    servers: int

    def __str__(self) -> str:
        return f"{self.protocol}-{self.policy}-{self.rule}-{self.workers}w-{self.servers}s"

    @property
    def possible(self) -> bool:
        """The mutex over the whole model needs one server; backup workers need somebody whom they back up."""
        whole, backup = self.protocol == "asgd:mutex=whole", self.protocol == "backup:b=1"
        return not (whole and self.servers > 1) and not (backup and self.workers == 1)

    @property
    def pairs(self) -> set[Pair]:
        values = [(factor, getattr(self, factor)) for factor in FACTORS]
        return {frozenset(pair) for pair in itertools.combinations(values, 2)}

    @property
    def hyperparameters(self) -> dict[str, float]:
        decay = {"weight_decay": 0.01} if "weight_decay" in RULES[self.rule].settings else {}
        return {"learning_rate": RATE, **decay}


def cover() -> list[Cell]:
    """Cells in which all possible pairs meet: each is the one with the most pairs that were not yet there."""
    cells = (Cell(*values) for values in itertools.product(*FACTORS.values()))  # type: ignore[arg-type]
    pairs = {cell: cell.pairs for cell in cells if cell.possible}
    missing, chosen = set[Pair]().union(*pairs.values()), []
    while missing:
        chosen.append(max(pairs, key=lambda cell: len(pairs[cell] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen


class Cluster:
    """Three servers for jobs of so many workers. A run takes as many of them as it needs; the next replaces it."""

    def __init__(self, start_server: Start, workers: int, logs: Path):
        self.workers, self.logs = workers, logs
        flags = ("--expected-workers", str(workers), "--update-log", str(logs), "--log-gradients")
        self.servers = [start_server(*flags) for _ in range(3)]

    def reset(self) -> None:
        for server in self.servers:
            if run_id := inspect(server.control, "GetStatus").run_id:
                inspect(server.control, "Reset", pb.ResetRequest(run_id=run_id))


@dataclass
class Pushed:
    """A push of a worker: the versions that its gradient is of, and what became of it."""

    bases: Mapping[int, int]
    # By shard.
    receipts: dict[int, Receipt]


@dataclass
class Training:
    """A run of a cell, from its first parameters until all workers are gone."""

    cell: Cell
    servers: Sequence[ServerThread]
    pushes: dict[str, list[Pushed]] = field(default_factory=dict)
    shards: dict[int, pb.ShardInfo] = field(default_factory=dict)
    parameters: Mapping[str, Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Nobody pushes before all are there: who comes into a round that others began finds it gone.
        self.all_joined = threading.Barrier(self.cell.workers)

    def run(self) -> None:
        # The first life of a worker only brings the parameters: an empty server has nothing to configure.
        with self.client("worker-0"):
            change = pb.ConfigureRequest(protocol=self.cell.protocol, staleness=self.cell.policy)
            for server in self.servers:
                inspect(server.control, "Configure", change)
        run_together([partial(self.work, index) for index in range(self.cell.workers)])
        with Observer(self.addresses) as observer:
            self.parameters = observer.snapshot()
        for server in self.servers:
            self.shards |= {shard.shard_id: shard for shard in inspect(server.control, "ListShards").shards}

    @property
    def addresses(self) -> str:
        return ",".join(server.data for server in self.servers)

    @property
    def run_id(self) -> str:
        return str(self.cell).translate(str.maketrans(":=,.", "----"))

    def client(self, worker_id: str) -> Client:
        optimizer = (self.cell.rule, self.cell.hyperparameters)
        options = {"worker_id": worker_id, "run_id": self.run_id, "optimizer": optimizer, "wait_seconds": 30}
        client: Client = make_client(self.addresses, transport="shm", **options)
        return client

    def work(self, index: int) -> None:
        """Take a worker's steps."""
        pushes = self.pushes[f"worker-{index}"] = []
        with self.client(f"worker-{index}") as client:
            self.all_joined.wait(DEADLINE_SECONDS)
            for step in range(STEPS):
                parameters = client.pull()
                bases = client.session.held_versions
                gradients = gradients_like(parameters, 100 * index + step)
                receipts = client.push(gradients, examples=index + 1)
                pushes.append(Pushed(bases, {receipt.shard_id: receipt for receipt in receipts}))


def flat(tensors: Mapping[str, Floats]) -> Floats:
    return np.concatenate([tensor.reshape(-1) for tensor in tensors.values()])


@pytest.mark.parametrize("workers", FACTORS["workers"])
def test_each_mode_keeps_the_universal_invariants(start_server, tmp_path, workers):
    cells = cover()
    kinds = {name: {str(getattr(cell, name)).partition(":")[0] for cell in cells} for name in ("protocol", "policy")}
    assert kinds == {"protocol": {*PROTOCOLS} - {"sandblaster"}, "policy": {kind.name for kind in POLICIES.values()}}
    assert {cell.rule for cell in cells} == {*RULES}
    cluster = Cluster(start_server, workers, tmp_path)
    for cell in (cell for cell in cells if cell.workers == workers):
        print(cell)  # Shown when it fails.
        cluster.reset()
        training = Training(cell, cluster.servers[: cell.servers])
        training.run()
        check_workers(training)
        for shard_id in training.shards:
            check_versions(training, shard_id)
        check_logs(training, cluster.logs)
        if cell.workers == 1:
            check_serial(training)


def check_workers(training: Training) -> None:
    """Everybody took all steps, left in order, and was served finite numbers; all servers hold the mode."""
    names = [f"worker-{index}" for index in range(training.cell.workers)]
    for server in training.servers:
        status = inspect(server.control, "GetStatus")
        in_force = (protocols.parse(training.cell.protocol).text, staleness.parse(training.cell.policy).text)
        assert (status.protocol, status.staleness) == in_force
        states = {worker.worker_id: worker.state for worker in inspect(server.control, "ListWorkers").workers}
        assert states == dict.fromkeys(names, "finished")
    num_shards = len(training.shards)
    assert num_shards >= 5
    for worker in names:
        pushed = [len(pushed.receipts) for pushed in training.pushes[worker]]
        # Where one shard came too late, the next push makes that one good and leaves out those that wait.
        assert pushed == [num_shards] * STEPS or (training.cell.protocol.startswith("backup") and len(pushed) == STEPS)
    assert all(np.isfinite(values).all() for values in training.parameters.values())


def check_versions(training: Training, shard_id: int) -> None:
    """U1, and receipts that tell the shard's own story: each update once, each push counted once."""
    cell, info = training.cell, training.shards[shard_id]
    receipts: list[Receipt] = []
    for pushes in training.pushes.values():
        mine = [(pushed.bases[shard_id], pushed.receipts[shard_id]) for pushed in pushes if shard_id in pushed.receipts]
        for base, receipt in mine:
            assert not receipt.duplicate
            assert receipt.staleness == receipt.version_before - base >= 0
            assert receipt.version_after - receipt.version_before == (receipt.outcome == OUTCOME_APPLIED)
        seen = [version for _, receipt in mine for version in (receipt.version_before, receipt.version_after)]
        assert seen == sorted(seen)
        receipts += [receipt for _, receipt in mine]
    taken = [receipt for receipt in receipts if receipt.outcome != OUTCOME_REJECTED]
    made = sorted(receipt.version_after for receipt in taken if receipt.outcome == OUTCOME_APPLIED)
    assert len(set(made)) == len(made)
    assert info.version == info.tally.updates > 0
    # What no push completed was completed when somebody left.
    by_leaving = info.version - len(made)
    assert 0 <= by_leaving <= (0 if cell.protocol.startswith(NEVER_WAITING) else cell.workers)
    assert by_leaving or made == list(range(1, info.version + 1))
    told = (info.tally.pushes_applied, info.tally.pushes_pending, info.tally.pushes_rejected)
    outcomes = Counter(receipt.outcome for receipt in receipts)
    assert told == tuple(outcomes[kind] for kind in (OUTCOME_APPLIED, OUTCOME_PENDING, OUTCOME_REJECTED))
    assert outcomes[OUTCOME_REJECTED] == 0 or cell.protocol.startswith("backup") or cell.policy.startswith("drop")
    if cell.protocol.startswith(NEVER_STALE):
        assert all(receipt.staleness == 0 for receipt in taken)


def check_logs(training: Training, logs: Path) -> None:
    """U4: each shard's log, replayed through the core alone, gives the bits that the server holds."""
    # A server's epoch grows with every run that it forgets.
    paths = [path for folder in logs.glob(f"{training.run_id}.epoch-*") for path in log_paths(folder)]
    assert len(paths) == len(training.shards)
    for path in paths:
        replayed = replay(path)
        info = training.shards[replayed.shard_id]
        assert not replayed.difference
        assert (replayed.version, replayed.checksum) == (info.version, info.checksum)


def check_serial(training: Training) -> None:
    """U6: one worker gets bit for bit what a single shard of the whole model makes of its gradients."""
    model = small_model()
    alone = make_shard(flat(model), rule=training.cell.rule, settings=training.cell.hyperparameters)
    for step in range(STEPS):
        push(alone, flat(gradients_like(model, step)), sequence=step)
    np.testing.assert_array_equal(flat(training.parameters), alone.state().parameters, strict=True)
