"""A server in virtual time: a real run, whose methods are called in the order of virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from pyps.config import ServerConfig
from pyps.core.arrays import Floats
from pyps.core.behaviour import Behaviour
from pyps.core.gradient import Gradient, PushPlan, Reply
from pyps.core.receipt import Receipt
from pyps.core.rule_settings import RuleSettings
from pyps.run.content import RunRecorder
from pyps.run.handshake import Greeting, Opening
from pyps.run.run import Run
from pyps.simulation.event import Event, Kind, Scheduler
from pyps_wire.codecs import FLOAT32
from pyps_wire.contract import PROTOCOL_VERSION
from pyps_wire.partition import Model, Partition, Tensor

# Schedules an action of the caller's at a time.
At = Callable[[float, Callable[[], None]], None]
# One push: shards and their gradients, in the order in which they are sent.
Gradients = Sequence[tuple[int, Gradient]]
Answer = Callable[[Receipt], None]

RUN_ID = "simulation"


@dataclass(frozen=True)
class ServerPlan:
    """A server's settings and speed. Times are in virtual seconds."""

    # How many workers the first update of a barrier waits for.
    expected_workers: int = 0
    # The silence after which a worker is lost.
    lease_seconds: float = 30.0
    # How long others may wait for a live worker; then rounds continue without it, until its next push.
    stall_seconds: float = float("inf")
    # A shard's time for a push. Pushes wait for a busy shard, pulls do not.
    service_seconds: float = 0.0
    # The time of one shard's message. A worker sends the messages of a push one after the other.
    transfer_seconds: float = 0.0
    # Between two checks for workers that others wait for, while any worker waits.
    tick_seconds: float = 0.25


class VirtualServer:
    """Replaces network, threads and the wall clock between workers and a run, and reports events."""

    def __init__(
        self,
        parameters: Sequence[Floats],
        settings: RuleSettings,
        behaviour: Behaviour,
        plan: ServerPlan,
        *,
        num_workers: int,
        scheduler: Scheduler,
        report: Callable[[Event], None],
        recorder: RunRecorder | None = None,
    ) -> None:
        """Make a shard of each of the parameters; ValueError for one that is empty."""
        for index, each in enumerate(parameters):
            if not each.size:
                raise ValueError(f"parameters[{index}] holds no numbers; a simulated shard holds 1 or more")
        self.plan = plan
        self._scheduler, self._report = scheduler, report
        config = ServerConfig(
            run_id=RUN_ID,
            expected_workers=plan.expected_workers,
            lease_seconds=plan.lease_seconds,
            stall_seconds=plan.stall_seconds,
            max_workers=max(ServerConfig.max_workers, num_workers),
            **behaviour.texts,
        )
        self.run = Run(config, clock=lambda: scheduler.now, recorder=recorder)
        # A parameter group each, since no shard has numbers of two groups.
        self._model = Model(tuple(Tensor(f"{i}", each.shape, group=i) for i, each in enumerate(parameters)))
        self._initialize(parameters, settings)
        self.shards = self.run.content.shards
        # When each shard will have handled the pushes that it has, and when its pause ends.
        self._free_at = dict.fromkeys(self.shards, 0.0)
        self._resumes_at = dict.fromkeys(self.shards, 0.0)
        # The workers that send heartbeats, and their incarnations.
        self._living: dict[str, int] = {}
        self._ticking = False
        self._last_event = 0

    # Called by workers.

    def join(self, worker_id: str, incarnation: int) -> None:
        """Say Hello for a worker, whose heartbeats begin."""
        self._living[worker_id] = incarnation
        greeting = Greeting(
            run_id=RUN_ID,
            worker_id=worker_id,
            incarnation=incarnation,
            protocol_version=PROTOCOL_VERSION,
            software="simulation",
            observer=False,
            server_index=0,
            num_servers=1,
            model=self._model,
            optimizer=None,
            fingerprint="",
            host="",
            process_id=0,
            device="",
        )
        self.run.hello(greeting)
        self._say(Kind.JOIN, worker_id)

    def may_proceed(self, worker_id: str, clock: int, *, wake: Callable[[], None], again: bool) -> bool:
        """Return whether the worker may begin its next step; if not, `wake` is called when it may ask again."""
        incarnation = self._living[worker_id]
        granted = self.run.may_proceed(RUN_ID, worker_id, incarnation, clock=clock, wake=wake, again=again)
        if not granted and not again:
            self._waits(worker_id, self.run.rounds.waited_for_by(worker_id))
        return granted

    def pull(self, worker_id: str, min_versions: Mapping[int, int], *, then: Callable[[int, float], None]) -> None:
        """Call `then` for each shard once it has the version, with the shard's number and the time to read it."""
        incarnation = self._living[worker_id]
        for shard in self.run.shards_to_pull(
            RUN_ID, worker_id, incarnation, observer=False, shard_ids=min_versions.keys()
        ):
            shard_id, min_version = shard.shard_id, min_versions[shard.shard_id]
            if shard.version < min_version and not shard.finished:
                self._waits(worker_id, shard.waiting_for(self.run.rounds.roster_of(shard_id)), shard_id, min_version)
            shard.when_version(min_version, lambda shard_id=shard_id: then(shard_id, self._resumes_at[shard_id]))  # type: ignore[misc]

    def read(self, worker_id: str, shard_id: int) -> tuple[int, Floats]:
        parameters = np.empty(self.shards[shard_id].length, np.float32)
        version = self.shards[shard_id].pull(Reply(parameters.view(np.uint8).data, 0, FLOAT32), worker_id=worker_id)
        assert version is not None
        self._say(Kind.PULL, worker_id, shard_id, version)
        return version, parameters

    def receive(self, gradients: Gradients, *, at: At, then: Answer) -> None:
        """Receive a push, whose messages arrive one after the other; answer each once it is handled."""
        # Under one mutex for the model, all of the push arrives before it is handled as a whole.
        whole = self.run.mutex is not None
        arrived = 0
        for together in [gradients] if whole else [[each] for each in gradients]:
            arrived += len(together)
            queue = partial(self._queue, together, whole=whole, at=at, then=then)
            self._after(arrived * self.plan.transfer_seconds, queue, at=at)

    def leave(self, worker_id: str) -> None:
        """Say Leave for a worker."""
        self.run.leave(RUN_ID, worker_id, self._living.pop(worker_id), failed=False, message="")
        self._say(Kind.LEAVE, worker_id)
        with self._reporting_rounds():
            self.run.rounds.complete_rounds()

    def lose(self, worker_id: str) -> None:
        """Record that a worker died; the run will see that its lease expires."""
        self._say(Kind.DIE, worker_id)
        # The last heartbeat.
        self.run.heard(RUN_ID, worker_id, self._living.pop(worker_id))
        # A lease expires once more than its time is over: by less than any time of a plan.
        self._scheduler.at(self._scheduler.now + self.plan.lease_seconds + 1e-9, self._tick)

    # Called by operators.

    def pause(self, shard_id: int, seconds: float) -> None:
        """Stop a shard for a time: its pushes and pulls wait."""
        self._resumes_at[shard_id] = self._scheduler.now + seconds
        self._free_at[shard_id] = max(self._free_at[shard_id], self._resumes_at[shard_id])

    def configure(self, *, protocol: str = "", staleness: str = "") -> None:
        """Change the protocol or the staleness policy."""
        self._say(Kind.CONFIGURE, note=protocol or staleness)
        with self._reporting_rounds():
            self.run.configure(protocol=protocol, staleness=staleness)

    def _initialize(self, parameters: Sequence[Floats], settings: RuleSettings) -> None:
        """Send the first parameters, as a caller that is no worker."""
        run, initialiser, incarnation = self.run, "initialiser", 1
        term = run.election.elect(initialiser, incarnation, now=run.clock(), is_over=run.membership.is_over)
        assert term is not None
        lengths = [each.size for each in parameters]
        plan = Partition.of_tables(self._model, lengths, servers=[0] * len(lengths), num_servers=1)
        initialization = run.begin_initialize(
            Opening(RUN_ID, initialiser, incarnation, term.number, plan, settings, server_index=0)
        )
        assert initialization is not None
        for shard_id, values in enumerate(parameters):
            initialization.add(shard_id, FLOAT32, memoryview(values.tobytes()))
        run.commit(initialization)

    def _after(self, seconds: float, action: Callable[[], None], *, at: At) -> None:
        """Call the action after that time, at once for 0."""
        if seconds > 0:
            at(self._scheduler.now + seconds, action)
        else:
            action()

    def _queue(self, gradients: Gradients, *, whole: bool, at: At, then: Answer) -> None:
        """Handle gradients once their shards, or all shards, have handled the pushes before them."""
        now = self._scheduler.now
        shard_ids = list(self.shards) if whole else [shard_id for shard_id, _ in gradients]
        ends = max(now, *(self._free_at[shard_id] for shard_id in shard_ids)) + self.plan.service_seconds
        self._free_at.update(dict.fromkeys(shard_ids, ends))
        self._after(ends - now, partial(self._handle, gradients, whole=whole, then=then), at=at)

    def _handle(self, gradients: Gradients, *, whole: bool, then: Answer) -> None:
        plans = [PushPlan(shard_id, gradient) for shard_id, gradient in gradients]
        pushed = self.run.push_whole(plans) if whole else [self.run.push(plan) for plan in plans]
        for (shard_id, gradient), (receipt, _, _) in zip(gradients, pushed, strict=True):
            event = Event(self._scheduler.now, Kind.PUSH, gradient.worker_id, shard_id, gradient.base_version, receipt)
            self._report(event)
            then(receipt)

    def _waits(self, worker_id: str, whom: Sequence[str], shard_id: int = -1, version: int = 0) -> None:
        """Record that a worker waits; see from now on whether others hold it up, and when a grace ends."""
        self._say(Kind.WAIT, worker_id, shard_id, version, note=" ".join(["for", *whom]))
        protocol = self.run.rounds.behaviour.aggregation.at(self.run.content.version_max)
        if self.plan.stall_seconds == float("inf") and not protocol.grace:
            return
        if self._ticking:
            self._tick()
        else:
            self._keep_time()

    def _keep_time(self) -> None:
        self._tick()
        self._ticking = bool(self._living)
        if self._ticking:
            self._scheduler.at(self._scheduler.now + self.plan.tick_seconds, self._keep_time)

    def _tick(self) -> None:
        for worker_id, incarnation in self._living.items():
            # Live workers send heartbeats.
            self.run.heard(RUN_ID, worker_id, incarnation)
        with self._reporting_rounds():
            self.run.tick()
            for event in self.run.events.since(self._last_event):
                self._last_event = event.number
                if kind := _REPORTED.get(event.kind):
                    self._say(
                        kind, event.worker, note="" if event.worker else "the expected workers that have not come"
                    )

    @contextmanager
    def _reporting_rounds(self) -> Iterator[None]:
        """Report the shards that get a new version in the block without a push."""
        before = {shard_id: shard.version for shard_id, shard in self.shards.items()}
        yield
        for shard_id, shard in self.shards.items():
            if shard.version > before[shard_id]:
                self._say(Kind.COMPLETE, shard_id=shard_id, version=shard.version)

    def _say(self, kind: Kind, worker_id: str = "", shard_id: int = -1, version: int = 0, *, note: str = "") -> None:
        self._report(Event(self._scheduler.now, kind, worker_id, shard_id, version, note=note))


# The run's events that follow from time alone.
_REPORTED = {"expired": Kind.EXPIRE, "stalled": Kind.STALL}
