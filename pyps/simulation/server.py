"""A server in virtual time: a real run, whose methods are called in the order of virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from pyps.config import ServerConfig
from pyps.core.arrays import Floats
from pyps.core.behaviour import Behaviour
from pyps.core.gradient import Gradient
from pyps.core.plan import PushPlan
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
    """How a server is set up, and how quick it is. Times are in virtual seconds."""

    # How many workers the first update of a barrier waits for.
    expected_workers: int = 0
    # How long a worker may be silent before it stops counting.
    lease_seconds: float = 30.0
    # How long a live worker may keep others waiting before it stops counting until its next push.
    stall_seconds: float = float("inf")
    # How long a shard is busy with one push of it; pushes queue for a busy shard, pulls slip in between.
    service_seconds: float = 0.0
    # How long one shard's message is under way; a worker sends those of a push one after the other.
    transfer_seconds: float = 0.0
    # How often the server looks for workers that hold others up, from the moment at which somebody waits.
    tick_seconds: float = 0.25


class VirtualServer:
    """Stands between workers and a run in place of network, threads and the wall clock.

    What is of virtual time is here: how long messages and shards take, when the run's clock ticks, and the telling
    of events. All else is the run's.
    """

    def __init__(
        self,
        parameters: Sequence[Floats],
        settings: RuleSettings,
        behaviour: Behaviour,
        plan: ServerPlan,
        *,
        num_workers: int,
        scheduler: Scheduler,
        tell: Callable[[Event], None],
        recorder: RunRecorder | None = None,
    ) -> None:
        """Make a shard of each of the parameters; ValueError for one that is empty."""
        for index, each in enumerate(parameters):
            if not each.size:
                raise ValueError(f"parameters[{index}] holds no numbers; a simulated shard holds 1 or more")
        self.plan = plan
        self._scheduler, self._tell = scheduler, tell
        config = ServerConfig(
            run_id=RUN_ID,
            expected_workers=plan.expected_workers,
            lease_seconds=plan.lease_seconds,
            stall_seconds=plan.stall_seconds,
            max_workers=max(ServerConfig.max_workers, num_workers),
            **behaviour.texts,
        )
        self.run = Run(config, clock=lambda: scheduler.now, recorder=recorder)
        # A parameter group each: no shard holds numbers of two.
        self._model = Model(tuple(Tensor(f"{i}", each.shape, group=i) for i, each in enumerate(parameters)))
        self._initialize(parameters, settings)
        self.shards = self.run.content.shards
        # When each shard will have done with the pushes it has, and when it goes on after a pause.
        self._free_at = dict.fromkeys(self.shards, 0.0)
        self._resumes_at = dict.fromkeys(self.shards, 0.0)
        # The workers that give heartbeats, and their incarnations.
        self._living: dict[str, int] = {}
        self._ticking = False
        self._last_event = 0

    @property
    def shard_ids(self) -> tuple[int, ...]:
        """The shards' numbers."""
        return tuple(self.shards)

    @property
    def epoch(self) -> int:
        """The epoch of all shards."""
        return self.run.content.epoch

    @property
    def asks(self) -> bool:
        """Whether workers have to ask before a step."""
        return self.run.rounds.steps.asks

    # What workers ask for.

    def join(self, worker_id: str, incarnation: int) -> None:
        """Take the worker among the living."""
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
        """Return whether the worker may begin its next step; where not, `wake` says when to ask again."""
        incarnation = self._living[worker_id]
        granted = self.run.may_proceed(RUN_ID, worker_id, incarnation, clock=clock, wake=wake, again=again)
        if not granted and not again:
            self._waits(worker_id, self.run.rounds.waited_for_by(worker_id))
        return granted

    def pull(self, worker_id: str, min_versions: Mapping[int, int], *, then: Callable[[int, float], None]) -> None:
        """Call back for each shard once it has the version, with its number and the time from which it can be read."""
        incarnation = self._living[worker_id]
        for shard in self.run.shards_to_pull(
            RUN_ID, worker_id, incarnation, observer=False, shard_ids=min_versions.keys()
        ):
            shard_id, min_version = shard.shard_id, min_versions[shard.shard_id]
            if shard.version < min_version and not shard.finished:
                self._waits(worker_id, shard.waiting_for(self.run.rounds.roster_of(shard_id)), shard_id, min_version)
            shard.when_version(min_version, partial(self._readable, shard_id, then))

    def read(self, worker_id: str, shard_id: int) -> tuple[int, Floats]:
        """Return the shard's version and a copy of its parameters."""
        shard = self.shards[shard_id]
        held = shard.read(lambda version, parameters: (version, parameters.copy()))
        shard.note_pull(held[0], worker_id=worker_id)
        self._say(Kind.PULL, worker_id, shard_id, held[0])
        return held

    def receive(self, gradients: Gradients, *, at: At, then: Answer) -> None:
        """Take a push; its messages come one after the other, and each is answered when it has been handled."""
        seconds = self.plan.transfer_seconds
        if self.run.mutex is not None:
            # The push is staged before the model is locked.
            handle = partial(self._handle_whole, gradients, then)
            self._after(len(gradients) * seconds, partial(self._queue, self.shard_ids, handle, at=at), at=at)
            return
        for count, (shard_id, gradient) in enumerate(gradients, start=1):
            handle = partial(self._handle, shard_id, gradient, then)
            self._after(count * seconds, partial(self._queue, (shard_id,), handle, at=at), at=at)

    # How workers go.

    def leave(self, worker_id: str) -> None:
        """Take the worker at its word that it has finished."""
        self.run.leave(RUN_ID, worker_id, self._living.pop(worker_id), failed=False, message="")
        self._say(Kind.LEAVE, worker_id)
        with self._telling_rounds():
            self.run.rounds.complete_rounds()

    def lose(self, worker_id: str) -> None:
        """Note that the worker died; what the server itself sees is that the lease runs out."""
        self._say(Kind.DIE, worker_id)
        # Until now it has sent heartbeats.
        self.run.heard(RUN_ID, worker_id, self._living.pop(worker_id))
        # A moment later: a lease has run out when more than its time is over.
        self._scheduler.at(self._scheduler.now + self.plan.lease_seconds + MOMENT, self._tick)

    # What the operator does.

    def pause(self, shard_id: int, seconds: float) -> None:
        """Stop the shard for so long: pushes to it and pulls from it wait."""
        self._resumes_at[shard_id] = self._scheduler.now + seconds
        self._free_at[shard_id] = max(self._free_at[shard_id], self._resumes_at[shard_id])

    def configure(self, *, protocol: str = "", staleness: str = "") -> None:
        """Replace what is named; what the old protocol parked is settled first."""
        self._say(Kind.CONFIGURE, note=protocol or staleness)
        with self._telling_rounds():
            self.run.configure(protocol=protocol, staleness=staleness)

    # Helpers.

    def _initialize(self, parameters: Sequence[Floats], settings: RuleSettings) -> None:
        """Bring the first parameters in, from nobody who counts as a worker."""
        run, founder, incarnation = self.run, "founder", 1
        term = run.election.elect(founder, incarnation, now=run.clock(), is_over=run.membership.is_over)
        assert term is not None
        lengths = [each.size for each in parameters]
        plan = Partition.of_tables(self._model, lengths, servers=[0] * len(lengths), num_servers=1)
        initialization = run.begin_initialize(
            Opening(RUN_ID, founder, incarnation, term.number, plan, settings, server_index=0)
        )
        assert initialization is not None
        for shard_id, values in enumerate(parameters):
            initialization.add(shard_id, FLOAT32, memoryview(values.tobytes()))
        run.commit(initialization)

    def _readable(self, shard_id: int, then: Callable[[int, float], None]) -> None:
        then(shard_id, self._resumes_at[shard_id])

    def _after(self, seconds: float, action: Callable[[], None], *, at: At) -> None:
        """Act after a time; at once where that is no time at all."""
        if seconds > 0:
            at(self._scheduler.now + seconds, action)
        else:
            action()

    def _queue(self, shard_ids: Sequence[int], handle: Callable[[], None], *, at: At) -> None:
        """Handle a message when its shards have done with those before it."""
        now = self._scheduler.now
        begins = max(now, *(self._free_at[shard_id] for shard_id in shard_ids))
        ends = begins + self.plan.service_seconds
        for shard_id in shard_ids:
            self._free_at[shard_id] = ends
        self._after(ends - now, handle, at=at)

    def _handle(self, shard_id: int, gradient: Gradient, then: Answer) -> None:
        self._answer(gradient, self.run.push(PushPlan(shard_id, gradient)).receipt, then)

    def _handle_whole(self, gradients: Gradients, then: Answer) -> None:
        pushed = self.run.push_whole([PushPlan(shard_id, gradient) for shard_id, gradient in gradients])
        for (_, gradient), (receipt, _, _) in zip(gradients, pushed, strict=True):
            self._answer(gradient, receipt, then)

    def _answer(self, gradient: Gradient, receipt: Receipt, then: Answer) -> None:
        self._tell(
            Event(self._scheduler.now, Kind.PUSH, gradient.worker_id, receipt.shard_id, gradient.base_version, receipt)
        )
        then(receipt)

    def _waits(self, worker_id: str, whom: Sequence[str], shard_id: int = -1, version: int = 0) -> None:
        """Note that a worker waits; from now on somebody may hold others up."""
        self._say(Kind.WAIT, worker_id, shard_id, version, note=" ".join(["for", *whom]))
        if self.plan.stall_seconds == float("inf"):
            return
        if self._ticking:
            self._tick()
        else:
            self._keep_time()

    def _keep_time(self) -> None:
        self._tick()
        # Whoever lives may come to wait.
        self._ticking = bool(self._living)
        if self._ticking:
            self._scheduler.at(self._scheduler.now + self.plan.tick_seconds, self._keep_time)

    def _tick(self) -> None:
        for worker_id, incarnation in self._living.items():
            # The living send heartbeats.
            self.run.heard(RUN_ID, worker_id, incarnation)
        with self._telling_rounds():
            self.run.tick()
            for event in self.run.events.since(self._last_event):
                self._last_event = event.number
                if kind := _TOLD.get(event.kind):
                    self._say(kind, event.worker, note="" if event.worker else NEVER_CAME)

    @contextmanager
    def _telling_rounds(self) -> Iterator[None]:
        """Tell of the shards that the block brings a new version, which no push has made."""
        before = {shard_id: shard.version for shard_id, shard in self.shards.items()}
        yield
        for shard_id, shard in self.shards.items():
            if shard.version > before[shard_id]:
                self._say(Kind.COMPLETE, shard_id=shard_id, version=shard.version)

    def _say(self, kind: Kind, worker_id: str = "", shard_id: int = -1, version: int = 0, *, note: str = "") -> None:
        self._tell(Event(self._scheduler.now, kind, worker_id, shard_id, version, note=note))


# Shorter than any time that a plan names.
MOMENT = 1e-9

# The run's own events that only time brings, as a trace tells them.
_TOLD = {"expired": Kind.EXPIRE, "stalled": Kind.STALL}
NEVER_CAME = "the expected workers that have not come"
