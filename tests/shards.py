"""What a server is made of, without a server: shards, checkpoints of them, runs with workers, work queues."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pyps.config import ServerConfig, resolve
from pyps.core import protocols, schedule, staleness
from pyps.core.arrays import Floats
from pyps.core.behaviour import Behaviour
from pyps.core.gradient import Extent, Gradient, PayloadKind, PushPlan, Reply
from pyps.core.ledger import Ledger
from pyps.core.protocols.base import Aggregation, Arrival, Contribution, Pending
from pyps.core.receipt import Outcome, Receipt
from pyps.core.recorder import Completed, Configured, Event, Pushed, Updated
from pyps.core.roster import Roster
from pyps.core.rule_settings import RuleSettings
from pyps.core.rules import RULES
from pyps.core.schedule import BatchGrowth
from pyps.core.shard import LoggedShard, Shard
from pyps.core.staleness import Weighing
from pyps.core.store import ShardState
from pyps.run.handshake import Greeting, Opening
from pyps.run.run import Run
from pyps.run_header import RunHeader, Snapshot
from pyps.storage.folder import CheckpointFolder
from pyps.work import DataSpec, WorkQueue, lease_reply
from pyps_wire.codecs import FLOAT32, Codec
from pyps_wire.errors import InvalidArgument, PypsError
from pyps_wire.partition import Model, Tensor, partition
from pyps_wire.work_pb2 import LeaseReply
from support import DEADLINE_SECONDS


def floats(*values: float) -> Floats:
    return np.array(values, dtype=np.float32)


class Pairs(Codec):
    """A sparse codec: each number that is not 0 as its place and itself."""

    sparse = True

    def encode(self, values: Floats) -> memoryview:
        [places] = np.nonzero(values)
        return memoryview(places.astype(np.uint32).tobytes() + values[places].tobytes())

    def decode_into(self, payload: Any, place: Floats) -> None:
        half = len(payload) // 2
        place.fill(0.0)
        place[np.frombuffer(payload[:half], np.uint32)] = np.frombuffer(payload[half:], np.float32)


PAIRS = Pairs(99, "pairs", lambda count: 8 * count)


def sparse(*values: float, **fields: Any) -> Gradient:
    return gradient([], **{"codec": PAIRS, "payload": PAIRS.encode(floats(*values)), **fields})


def roster(*workers: str, missing: int = 0) -> Roster:
    """Return a roster of these workers; by default of worker "a"."""
    return Roster(tuple(sorted(workers or ("a",))), missing)


def roster_of(num_workers: int) -> Roster:
    """Return a roster of w00, w01, ..."""
    return Roster(tuple(f"w{index:02d}" for index in range(num_workers)))


def make_behaviour(
    protocol: str | Aggregation = "async",
    policy: str | staleness.StalenessPolicy = "none",
    *,
    rate_schedule: str | schedule.Schedule = "constant",
    clip_norm: float = 0.0,
    batch_growth: BatchGrowth | None = None,
) -> Behaviour:
    return Behaviour(
        aggregation=protocols.parse(protocol) if isinstance(protocol, str) else protocol,
        staleness=staleness.parse(policy) if isinstance(policy, str) else policy,
        schedule=schedule.parse(rate_schedule) if isinstance(rate_schedule, str) else rate_schedule,
        clip_norm=clip_norm,
        batch_growth=batch_growth,
    )


def make_shard(
    parameters: npt.ArrayLike = (0.0, 0.0, 0.0, 0.0),
    *,
    rule: str = "sgd",
    settings: Mapping[str, float] | None = None,
    protocol: str | Aggregation = "async",
    policy: str | staleness.StalenessPolicy = "none",
    behaviour: Behaviour | None = None,
    **others: Any,
) -> Shard:
    """Return a shard; asynchronous, by default SGD with learning rate 1."""
    # A server's shards are logged ones where it has a log.
    return (LoggedShard if others.get("recorder") else Shard)(
        others.pop("shard_id", 0),
        np.asarray(parameters, dtype=np.float32),
        rule=RULES[rule],
        hyperparameters={"learning_rate": 1.0} if settings is None else settings,
        behaviour=behaviour or make_behaviour(protocol, policy),
        **others,
    )


def restored(shard: Shard, state: ShardState, **others: Any) -> Shard:
    """Return a shard of the same kind as `shard` that goes on from the state."""
    return make_shard(
        state.parameters,
        rule=shard.rule.name,
        settings=shard.hyperparameters,
        behaviour=others.pop("behaviour", shard.behaviour),
        version=state.version,
        slots=state.slots,
        ledger=Ledger(state.ledger),
        pending=state.pending,
        examples=state.examples,
        learning_rate=state.learning_rate,
        momentum=state.momentum,
        **others,
    )


def gradient(values: npt.ArrayLike, **fields: Any) -> Gradient:
    """Return a float32 gradient of worker "a" on version 0; a later push of a test says its sequence."""
    identity = {"worker_id": "a", "incarnation": 1, "sequence": 0, "base_version": 0, "epoch": 0}
    payload = np.asarray(values, dtype=np.float32).tobytes()
    return Gradient(**{**identity, "codec": FLOAT32, "payload": payload, **fields})


def nothing(**fields: Any) -> Gradient:
    return gradient([], **{"kind": PayloadKind.NOTHING, **fields})


def contribution(worker_id: str = "a", values: npt.ArrayLike = (1.0,), **fields: Any) -> Contribution:
    """Return a fresh gradient as a protocol sees it."""
    return Contribution(gradient(values, worker_id=worker_id, **fields), 0, staleness.Weighing())


def arrival(worker_id: str, *pending: Contribution, workers: Roster, version: int = 0, **fields: Any) -> Arrival:
    """Return the arrival of a gradient on that version, unless the fields say otherwise, while others wait."""
    arrived = contribution(worker_id, **{"base_version": version, **fields})
    return Arrival(arrived, Pending(pending), version, workers)


def push(shard: Shard, values: npt.ArrayLike, *, workers: Roster | None = None, **fields: Any) -> Receipt:
    """Push a gradient computed on the shard's present version, unless the fields say otherwise."""
    pushed = gradient(values, **{"base_version": shard.version, **fields})
    return shard.push(pushed, roster=workers or roster()).receipt


def pull(shard: Shard, worker_id: str | None = None) -> tuple[int, Floats]:
    """Return the shard's version and a copy of its parameters."""
    parameters = np.empty(shard.length, np.float32)
    version = shard.pull(Reply(parameters.view(np.uint8).data, 0, FLOAT32), worker_id=worker_id)
    assert version is not None, "a pull without a held version brings the newest"
    return version, parameters


def refusal(call: Callable[..., object], *arguments: Any, error: type[PypsError] = InvalidArgument, **more: Any) -> str:
    """Return the message with which a call is refused; fail if it is not."""
    try:
        call(*arguments, **more)
    except error as refused:
        return str(refused)
    raise AssertionError(f"{call} took {arguments} {more}")


def digest(parameters: Floats) -> str:
    return hashlib.blake2b(parameters.tobytes(), digest_size=8).hexdigest()


@dataclass
class Log:
    """A recorder that keeps everything but updates, by shard, in the order in which it happened."""

    events: dict[int, list[Event]] = field(default_factory=dict)

    def record(self, event: Event) -> None:
        if not isinstance(event, Updated):
            self.events.setdefault(event.shard_id, []).append(event)

    def write(self, shard_id: int) -> None:
        """Nothing: what was noted is kept."""

    def note(self, line: Mapping[str, Any]) -> None:
        """Nothing: only what happens to shards is kept."""

    def pushes(self, shard_id: int) -> list[Pushed]:
        return [event for event in self.events[shard_id] if isinstance(event, Pushed)]

    def applied(self, shard_id: int) -> list[Pushed]:
        return [event for event in self.pushes(shard_id) if event.receipt.outcome == Outcome.APPLIED]


class FullDisk(Log):
    """A log that takes so many events and then fails."""

    def __init__(self, *, room: int) -> None:
        super().__init__()
        self._room = room

    def record(self, event: Event) -> None:
        if self._room == 0:
            raise OSError("no space left on device")
        self._room -= 1
        super().record(event)


def everything(shard: Shard) -> tuple[object, ...]:
    """Return the shard's whole state, to the bit, in comparable form."""
    state = shard.state()
    slots = {name: slot.tobytes() for name, slot in state.slots.items()}
    more = (state.ledger, state.pending, state.examples, state.learning_rate, state.momentum, shard.behaviour)
    return state.version, state.parameters.tobytes(), slots, *more


def replay(log: Log, shard: Shard) -> list[str]:
    """Does with the shard what its log says, in order; returns the digest of each version from the first."""
    digests = [digest(pull(shard)[1])]
    for event in log.events[shard.shard_id]:
        version = shard.version
        if isinstance(event, Pushed):
            assert shard.push(event.gradient, roster=event.roster).receipt == event.receipt
        elif isinstance(event, Completed):
            assert version == event.version
            shard.complete(event.roster)
        elif isinstance(event, Configured):
            assert version == event.version
            shard.configure(behaviour=event.behaviour, learning_rate=event.learning_rate, roster=event.roster)
        if shard.version > version:
            digests.append(digest(pull(shard)[1]))
    return digests


def run_together(functions: Sequence[Callable[[], None]]) -> None:
    """Runs the functions in threads that start at once; raises the first error of any."""
    barrier = threading.Barrier(len(functions))
    errors: list[BaseException] = []

    def run(function: Callable[[], None]) -> None:
        try:
            barrier.wait(DEADLINE_SECONDS)
            function()
        except BaseException as error:  # raised in the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
        assert not thread.is_alive(), "a thread did not end in time"
    if errors:
        raise errors[0]


def effort_of(call: Callable[[], object], event: str = "line") -> int:
    """Return how many lines of Python, or with "opcode" instructions, a call takes, whatever the machine's speed."""
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, what: str, _: object) -> Callable[..., Any]:
        nonlocal count
        frame.f_trace_opcodes = event == "opcode"
        count += what == event
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


# Shards in checkpoints.

SHARD_SIZE = 16
# Two shards.
MODEL = Model((Tensor("weight", (4, 5)), Tensor("bias", (12,))), shard_size=SHARD_SIZE)
HEADER = RunHeader(
    run_id="run-1",
    epoch=3,
    server_index=0,
    partition=partition(MODEL, num_servers=1),
    optimizer=RuleSettings.make("adagrad", ({"learning_rate": 0.1},)),
    behaviour=make_behaviour("async", "divide").texts,
    configured=make_behaviour("hardsync").texts,
)


@pytest.fixture
def checkpoint_folder(tmp_path: Path) -> Iterator[CheckpointFolder]:
    """A fixture of modules that have such a name too."""
    opened = CheckpointFolder(tmp_path / "server-0")
    yield opened
    opened.close()


def adagrad_shards() -> dict[int, Shard]:
    """Two Adagrad shards after a few updates each."""
    settings = dict(HEADER.optimizer.groups[0])
    shards = {
        i: make_shard(np.linspace(-1, 1, 16), shard_id=i, rule="adagrad", settings=settings, epoch=3) for i in (0, 1)
    }
    for shard_id, shard in shards.items():
        for sequence in range(1, 3 + shard_id):
            push(shard, np.full(16, 0.1 * sequence), sequence=sequence, epoch=3, example_count=35)
    return shards


def write_checkpoint(
    folder: CheckpointFolder, shards: Mapping[int, Shard] | None = None, *, header: RunHeader = HEADER
) -> Path:
    return folder.save(lambda: Snapshot(header, shards or adagrad_shards())).path


def waiting(*values: float) -> tuple[Contribution, ...]:
    return tuple(
        Contribution(
            gradient([value, -2.0], extents=(Extent(2, 2),), sequence=sequence, clock=4, learning_rate=0.5, norm=7.5),
            1,
            Weighing(rate_scale=0.25),
        )
        for sequence, value in enumerate(values)
    )


def restored_run(folder: CheckpointFolder, config: ServerConfig | None = None) -> Run:
    """The server's run, as it is after --resume."""
    saved = folder.resume()
    assert saved is not None
    run = Run(config or ServerConfig())
    run.restore(saved)
    return run


# Runs.


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_run(*, recorder: Any = None, clock: Any = None, **flags: str) -> Run:
    """A run that nobody has joined: by default SGD with learning rate 1 and no staleness policy."""
    flags = {"optimizer": "sgd:learning_rate=1", "staleness": "none", **flags}
    more = {} if clock is None else {"clock": clock}
    return Run(resolve(flags, {}, warn=print), recorder=recorder, **more)


def serving(*names: str, model: Model = MODEL, **settings: Any) -> Run:
    """A run with these workers, by default "a", that serves zeros."""
    run = make_run(**settings)
    names = names or ("a",)
    terms = [run.hello(Greeting("r", name, 1, 1, "test", False, 0, 1, model, None, "", "", 0, "")) for name in names]
    plan = partition(model, num_servers=1)
    initialization = run.begin_initialize(Opening("r", names[0], 1, terms[0], plan, None, 0))
    assert initialization is not None
    for shard in plan.of_server(0):
        initialization.add(shard.shard_id, FLOAT32, memoryview(bytes(4 * shard.length)))
    run.commit(initialization)
    return run


class RunDriver:
    """A run that serves MODEL, and pushes of its workers."""

    def __init__(self, *names: str, **flags: str) -> None:
        self.clock = Clock()
        self.run = serving(*names, clock=self.clock, **flags)
        self._sequences = dict.fromkeys(names, 0)

    def push(self, name: str, value: float = 1.0, base_version: int = 0, shard_id: int = 0, **fields: Any) -> Receipt:
        position = fields.pop("position", b"")
        self._sequences[name] += 1
        payload = np.full(self.run.content.shards[shard_id].length, value, np.float32).tobytes()
        fields = {"example_count": 1, **fields}
        gradient = Gradient(name, 1, self._sequences[name], base_version, 0, FLOAT32, payload, **fields)
        return self.run.push(PushPlan(shard_id, gradient, data_position=position), run_id="r").receipt

    def may_proceed(self, name: str, clock: int = 0, **call: Any) -> bool:
        return self.run.may_proceed("r", name, 1, clock=clock, **{"wake": lambda: None, **call})

    def pass_seconds(self, seconds: int, *alive: str) -> None:
        """Lets time pass, in which the server looks round and these workers give heartbeats."""
        for _ in range(seconds):
            self.clock.now += 1.0
            for name in alive:
                self.run.heartbeat("r", name, 1, clock=0, scalars={})
            self.run.tick()

    def versions(self) -> list[int]:
        return [shard.version for shard in self.run.content.shards.values()]

    def events(self, kind: str) -> list[str]:
        """The messages of the run's events of that kind."""
        return [event.message for event in self.run.events if event.kind == kind]


# Work queues.


def data_spec(num_examples: int = 10, portion_examples: int = 3, **fields: Any) -> DataSpec:
    return DataSpec("train", num_examples, portion_examples, **fields)


def plain_queue(
    num_examples: int = 10, portion_examples: int = 3, *, stall_seconds: float = 60.0, **more: Any
) -> WorkQueue:
    """A queue of plain work that is open."""
    queue = WorkQueue(stall_seconds=stall_seconds, **more)
    queue.open(data_spec(num_examples, portion_examples), worker_id="opener")
    return queue


def coordinated_queue(num_examples: int = 10, *, stall_seconds: float = 60.0, **more: Any) -> WorkQueue:
    """A queue of coordinated work that is open; no pass has begun."""
    queue = WorkQueue(stall_seconds=stall_seconds, **more)
    queue.open(data_spec(num_examples, 0, coordinated=True), worker_id="opener")
    return queue


def begin_pass(queue: WorkQueue, pass_: int = 1, *, num_portions: int = 5, epoch: int = 1, **more: Any) -> None:
    settings = {"copies_max": 2, "portions_per_stage": 1} | more
    queue.begin_pass(pass_, coordinator_epoch=epoch, num_portions=num_portions, **settings)


def nothing_now(pass_: int) -> LeaseReply:
    return lease_reply(LeaseReply.OUTCOME_NOTHING_NOW, pass_)


def pass_done(pass_: int) -> LeaseReply:
    return lease_reply(LeaseReply.OUTCOME_PASS_DONE, pass_)


def is_leased(answer: LeaseReply) -> bool:
    return answer.outcome == LeaseReply.OUTCOME_LEASED


def pass_of(answer: LeaseReply) -> int:
    return getattr(answer, "pass")


def examples_of(answer: LeaseReply) -> int:
    return answer.portion.stop - answer.portion.start


def restored_queue(queue: WorkQueue, **more) -> WorkQueue:
    """A queue that goes on from the other's state, which went through JSON."""
    other = WorkQueue(stall_seconds=60, **more)
    other.restore(json.loads(json.dumps(queue.state())))
    return other


def counted(queue: WorkQueue, pass_: int) -> list[int]:
    """The examples of a pass in the delivery log, in order: each once where all is well."""
    log = queue.progress(deliveries=True).deliveries
    return sorted(
        example for d in log if getattr(d, "pass") == pass_ for example in range(d.portion.start, d.portion.stop)
    )
