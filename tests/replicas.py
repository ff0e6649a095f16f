"""Replicas for tests: a model cut over two parts, processes that are threads, and jobs of real ones."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pyps.core.arrays import Floats
from pyps.launcher.environment import Group, worker_environment
from pyps_client import Launch, Session
from pyps_wire import inspector_pb2 as pb
from pyps_wire.common_pb2 import GroupSettings, OptimizerSettings
from pyps_wire.errors import ReplicaLost
from pyps_wire.partition import Model, Tensor, block_index
from support import AnyServer, PythonProcess, Start, StartPython, inspect, server_port, wait_until, workers_of
from wire_worker import WireWorker

SCRIPT = str(Path(__file__).resolve().parent / "replica_script.py")
DEADLINE = 120.0
RUN_ID = "job"
# What a forked process is told; anything else would have it start anew (support.PythonProcess).
TOLD = re.compile(r"PYPS_|RANK|WORLD_SIZE|LOCAL_|MASTER_|GLOO_")


class ReplicaJob:
    """Replicas of `parts` processes each, all begun."""

    def __init__(
        self,
        start_python: StartPython,
        servers: Sequence[AnyServer],
        *arguments: str,
        script: str = SCRIPT,
        replicas: int = 1,
        parts: int = 2,
    ) -> None:
        self.servers = servers
        self.addresses = [server.control for server in servers]
        # By replica and process.
        self.processes: dict[tuple[int, int], PythonProcess] = {}
        for index in range(replicas):
            port = server_port()
            for rank in range(parts):
                told = worker_environment(
                    {},
                    index=index,
                    count=replicas,
                    data_addresses=[server.data for server in servers],
                    control_addresses=self.addresses,
                    run_id=RUN_ID,
                    group=Group(rank, parts, port),
                )
                environment = {name: value for name, value in told.items() if TOLD.match(name)}
                self.processes[index, rank] = start_python(script, *arguments, env=environment)

    def ended_well(self) -> list[str]:
        for process in self.processes.values():
            assert process.wait(DEADLINE) == 0, process.output()
        return [process.output() for process in self.processes.values()]


def serve(
    start_server: Start, count: int, *flags: str, replicas: int = 1, checkpoints: Path | None = None
) -> list[AnyServer]:
    own = [("--checkpoint-dir", str(checkpoints / f"server-{i}")) if checkpoints else () for i in range(count)]
    fixed = ("--run-id", RUN_ID, "--expected-workers", str(replicas))
    return [start_server(*fixed, *of_server, *flags) for of_server in own]


def shards_of(addresses: list[str]) -> list[pb.ShardInfo]:
    return [shard for address in addresses for shard in inspect(address, "ListShards").shards]


def wait_for_pushes(job: ReplicaJob, names: set[str]) -> None:
    def all_have_pushed() -> bool:
        return names <= {name for a in job.addresses for name, w in workers_of(a).items() if w.tally.pushes_applied}

    wait_until(all_have_pushed, DEADLINE, f"a push of each of {sorted(names)}")


# A model cut over two parts, numbers for it, and a run of it, as one worker that holds all parts begins it.


# Up by columns, down by rows, a scale of part 0 alone: 3 shards of part 0, which go to server 0 of 2, and 2 of part 1.
CUT = Model(
    (
        Tensor("up", (8, 10), 0, (8, 20), (0, 0), 0),
        Tensor("down", (10, 8), 0, (20, 8), (0, 0), 0),
        Tensor("scale", (8,), 0),
        Tensor("up", (8, 10), 1, (8, 20), (0, 10), 1),
        Tensor("down", (10, 8), 1, (20, 8), (10, 0), 1),
    ),
    shard_size=80,
)

SGD = OptimizerSettings(rule="sgd", groups=[GroupSettings(hyperparameters={"learning_rate": 1.0})] * CUT.num_groups)


def whole_tensors(seed: int = 1) -> dict[str, Floats]:
    """The tensors of the model before it was cut, no two numbers alike."""
    rng = np.random.default_rng(seed)
    shapes = {tensor.name: tensor.whole_shape or tensor.shape for tensor in CUT.tensors}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def vectors_of(tensors: Mapping[str, Floats]) -> list[Floats]:
    """The same numbers as they lie in the vectors of the cut model's groups."""
    blocks: list[list[Floats]] = [[] for _ in range(CUT.num_groups)]
    for tensor in CUT.tensors:
        whole = tensors[tensor.name]
        values = whole[block_index(tensor.offset, tensor.shape)] if tensor.whole_shape else whole
        blocks[tensor.group].append(values.reshape(-1))
    return [np.concatenate(values) for values in blocks]


@contextlib.contextmanager
def cut_run(servers: Sequence[AnyServer]) -> Iterator[list[WireWorker]]:
    """A run of the cut model whose parameters are 0: one worker that holds all parts, joined at each server."""
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(WireWorker(server.data, "a", model=CUT, server_index=index, num_servers=len(servers)))
            for index, server in enumerate(servers)
        ]
        for worker in workers[1:]:
            worker.sender.CopyFrom(workers[0].sender)
        term = workers[0].hello().term
        # Server 0 last: it is ready only when all are.
        for worker in reversed(workers):
            worker.initialize(term)
        for worker in workers:
            worker.hello()
        yield workers


def push_tensors(workers: Sequence[WireWorker], tensors: Mapping[str, Floats], **fields: int) -> None:
    """Pushes such gradients that plain SGD with rate 1 adds these numbers to the parameters."""
    vectors = vectors_of(tensors)
    for worker in workers:
        for shard in worker.plan.of_server(worker.server_index):
            values = -vectors[shard.group][shard.offset : shard.offset + shard.length]
            worker.push(worker.push_request(values, shard.shard_id, **fields))


# Processes of one replica as threads of one process, that meet at a barrier.

T = TypeVar("T")

# Longer than anybody takes on the worst day: a test that hangs shall end.
MEET_SECONDS = 120.0


class Meeting:
    """Where the threads of one replica meet. `end` is the death of one: whoever waits, or comes later, learns of it."""

    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self._barrier = threading.Barrier(count)
        self._words: list[Any] = [None] * count
        self.peers = [ThreadPeers(self, index, count) for index in range(count)]

    def exchange(self, index: int, word: Any) -> list[Any]:
        try:
            self._words[index] = word
            self._barrier.wait(MEET_SECONDS)
            words = list(self._words)
            # Nobody may give the next word before all have read this one.
            self._barrier.wait(MEET_SECONDS)
        except threading.BrokenBarrierError:
            raise ReplicaLost(f"process {index} of {self.name} lost another of its processes") from None
        return words

    def end(self) -> None:
        self._barrier.abort()


class ThreadPeers:
    """The other threads, as one of them sees them (pyps_client.replica.group.Group)."""

    def __init__(self, meeting: Meeting, index: int, count: int) -> None:
        self._meeting = meeting
        self.name = meeting.name
        self.index = index
        self.count = count

    def broadcast(self, word: T) -> T:
        told: T = self._meeting.exchange(self.index, word)[0]
        return told

    def all_gather(self, word: T) -> list[T]:
        return self._meeting.exchange(self.index, word)

    def all_reduce(self, numbers: Sequence[float]) -> list[float]:
        return [sum(column) for column in zip(*self._meeting.exchange(self.index, list(numbers)), strict=True)]


def on_all(meeting: Meeting, work: Callable[[ThreadPeers], T]) -> list[T]:
    """Runs `work` on a thread for each process of a replica, and returns their results; raises the first failure.

    A process that fails is lost to the others.
    """

    def run(peers: ThreadPeers) -> T:
        try:
            return work(peers)
        except BaseException:
            meeting.end()
            raise

    with ThreadPoolExecutor(len(meeting.peers)) as pool:
        futures = [pool.submit(run, peers) for peers in meeting.peers]
    return [future.result() for future in futures]


def session_of(
    servers: str,
    peers: ThreadPeers | None = None,
    *,
    model: Model = CUT,
    initial: Callable[[], list[Floats]] | None = None,
    **launch: Any,
) -> Session:
    """A session of one process of a replica, with the part of its index; without peers, of a whole worker."""
    waits = dict.fromkeys(("start_wait_seconds", "loss_wait_seconds", "wait_seconds"), 60.0)
    vectors = vectors_of(whole_tensors())
    return Session(
        model,
        SGD,
        launch=Launch(servers=tuple(servers.split(",")), **({"worker_id": "plain"} | waits | launch)),
        initial=initial or (lambda: vectors if peers is None else [vectors[peers.index]]),
        parts=() if peers is None else (peers.index,),
        peers=peers,
    )
