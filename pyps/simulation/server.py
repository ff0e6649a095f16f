"""A server in virtual time: a real run, whose methods are called in the order of virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from pyps.config import ServerConfig
from pyps.core.arrays import Floats
from pyps.core.behaviour import Behaviour
from pyps.core.gradient import Gradient, PublishedReply, PushPlan, Reply
from pyps.core.receipt import Outcome, Receipt
from pyps.core.rule_settings import RuleSettings
from pyps.run.content import RunRecorder
from pyps.run.handshake import Greeting, Opening
from pyps.run.run import Run
from pyps.simulation.event import Event, Kind, Scheduler
from pyps.simulation.network import At, Links, Network, Nic
from pyps_wire.codecs import FLOAT32, Codec
from pyps_wire.contract import PROTOCOL_VERSION
from pyps_wire.partition import Model, Partition, Tensor

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
    # A shard's time for a push, and for a pull: they wait for each other in one queue. Under one mutex for the model
    # the shards' times add up. A pull that takes no time waits for nobody.
    service_seconds: float = 0.0
    pull_seconds: float = 0.0
    # The time of one shard's message. A worker sends the messages of a push one after the other.
    transfer_seconds: float = 0.0
    # Between two checks for workers that others wait for, while any worker waits.
    tick_seconds: float = 0.25
    # The processors that the server and its workers share; none are shared by default.
    cores: float = float("inf")


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
        network: Network | None = None,
        report: Callable[[Event], None] | None = None,
        recorder: RunRecorder | None = None,
    ) -> None:
        """Make a shard of each of the parameters; ValueError for one that is empty. `report` is told each event."""
        for index, each in enumerate(parameters):
            if not each.size:
                raise ValueError(f"parameters[{index}] holds no numbers; a simulated shard holds 1 or more")
        self.plan = plan
        self._scheduler, self._report = scheduler, report
        network = network or Network()
        self.links = Links(network, scheduler)
        # The numbers of each shard, as messages count them.
        self._sizes = network.sizes or [each.size for each in parameters]
        # Pushed payloads, pulled ones, accepted pushes, and deaths.
        self.bytes_in = self.bytes_out = self.num_taken = self.num_lost = 0
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
        # When the workers that compute now will have done so, where they share processors.
        self._computing = list[float]()
        # The workers that send heartbeats, and their incarnations.
        self._living: dict[str, int] = {}
        # When each of them called last.
        self._called_at: dict[str, float] = {}
        self._ticking = False
        self._last_event = 0

    # Called by workers.

    def join(self, worker_id: str, incarnation: int, *, codec: Codec = FLOAT32, pull_codec: Codec = FLOAT32) -> None:
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
            gradient_codec=codec,
            parameter_codec=pull_codec,
        )
        self.run.hello(greeting)
        self._say(Kind.JOIN, worker_id)

    def may_proceed(self, worker_id: str, clock: int, *, wake: Callable[[], None], again: bool) -> bool:
        """Return whether the worker may begin its next step; if not, `wake` is called when it may ask again."""
        incarnation = self._living[worker_id]
        granted = self.run.may_proceed(RUN_ID, worker_id, incarnation, clock=clock, wake=wake, again=again)
        if not granted and not again:
            self._waits(worker_id, lambda: self.run.rounds.waited_for_by(worker_id))
        return granted

    def stretched(self, seconds: float) -> float:
        """Return how long a computation of a worker that begins now takes, with what others compute meanwhile."""
        if self.plan.cores < float("inf"):
            seconds *= self._stretch(1 + any(time > self._scheduler.now for time in self._free_at.values()))
            heapq.heappush(self._computing, self._scheduler.now + seconds)
        return seconds

    def pull(self, worker_id: str, min_versions: Mapping[int, int], *, then: Callable[[int, float], None]) -> None:
        """Call `then` for each shard once it has the version, with the shard's number and the time to read it."""
        incarnation, self._called_at[worker_id] = self._living[worker_id], self._scheduler.now
        for shard in self.run.shards_to_pull(
            RUN_ID, worker_id, incarnation, observer=False, shard_ids=min_versions.keys()
        ):
            shard_id, min_version = shard.shard_id, min_versions[shard.shard_id]
            if shard.version < min_version and not shard.finished:
                whom = partial(self._waiting_for, shard_id)
                self._waits(worker_id, whom, shard_id, min_version)
            shard.when_version(min_version, lambda shard_id=shard_id: then(shard_id, self._reads_at(shard_id)))  # type: ignore[misc]

    def read(
        self, worker_id: str, shard_id: int, held: tuple[int, Floats] | None, min_version: int, codec: Codec
    ) -> tuple[int, Floats, int]:
        """Return a shard's version and parameters for a worker that holds others, and the bytes of the message."""
        shard, size = self.shards[shard_id], self._sizes[shard_id]
        held_version, parameters = held or (-1, np.empty(0, np.float32))
        num_bytes = 0
        if codec.published:
            published = PublishedReply(codec, min_version=min_version)
            version = shard.pull(published, held_version=held_version, worker_id=worker_id)
            if version is not None:
                # The worker's last step may still have the present array.
                in_full = published.since_version is None
                parameters = np.zeros(shard.length, np.float32) if in_full else parameters.copy()
                for payload in published.payloads:
                    published.codec.add_into(payload, parameters)
                    num_bytes += published.codec.max_bytes(size)
        else:
            buffer = np.empty(codec.max_bytes(shard.length), np.uint8)
            version = shard.pull(Reply(buffer.data, 0, codec), held_version=held_version, worker_id=worker_id)
            if version is not None:
                parameters = buffer.view(np.float32) if codec is FLOAT32 else codec.decode(buffer.data, shard.length)
                num_bytes = codec.max_bytes(size)
        version = held_version if version is None else version
        self.bytes_out += num_bytes
        self._say(Kind.PULL, worker_id, shard_id, version)
        return version, parameters, num_bytes

    def receive(self, nic: Nic | None, gradients: Gradients, *, at: At, then: Answer) -> None:
        """Receive a push, whose messages arrive one after the other; answer each once it is handled."""
        # Under one mutex for the model, all of the push arrives before it is handled as a whole.
        whole = self.run.mutex is not None
        arrived = 0
        for together in [gradients] if whole else [[each] for each in gradients]:
            num_bytes = sum([self._num_bytes(*each) for each in together])
            self.bytes_in += num_bytes
            arrived += len(together)
            queue = partial(self._queue, together, whole=whole, at=at, then=then)
            if nic is None:
                self._after(arrived * self.plan.transfer_seconds, queue, at=at)
            else:
                self.links.to_server(nic, num_bytes, at=at, then=queue)

    def leave(self, worker_id: str) -> None:
        """Say Leave for a worker."""
        self.run.leave(RUN_ID, worker_id, self._living.pop(worker_id), failed=False, message="")
        self._say(Kind.LEAVE, worker_id)
        with self._reporting_rounds():
            self.run.rounds.complete_rounds()

    def lose(self, worker_id: str) -> None:
        """Record that a worker died; the run will see that its lease expires."""
        self._say(Kind.DIE, worker_id)
        self.num_lost += 1
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

    def _num_bytes(self, shard_id: int, gradient: Gradient) -> int:
        size, num_bytes = self._sizes[shard_id], len(gradient.payload)
        return num_bytes if size == self.shards[shard_id].length or not num_bytes else gradient.codec.max_bytes(size)

    def _queue(self, gradients: Gradients, *, whole: bool, at: At, then: Answer) -> None:
        """Handle gradients once their shards, or all shards, have handled what came before them."""
        shard_ids = list(self.shards) if whole else [shard_id for shard_id, _ in gradients]
        now, ends = self._scheduler.now, self._occupy(shard_ids, len(gradients) * self.plan.service_seconds)
        self._after(ends - now, partial(self._handle, gradients, whole=whole, then=then), at=at)

    def _occupy(self, shard_ids: Sequence[int], seconds: float) -> float:
        """Let the shards handle something together; return when they will have."""
        begins = max(self._scheduler.now, *[self._free_at[shard_id] for shard_id in shard_ids])
        ends = begins + seconds * self._stretch(1)
        for shard_id in shard_ids:
            self._free_at[shard_id] = ends
        return ends

    def _stretch(self, busy: int) -> float:
        """Return how much longer things take now beside the workers that compute, if so many others are busy."""
        while self._computing and self._computing[0] <= self._scheduler.now:
            heapq.heappop(self._computing)
        return max(1.0, (busy + len(self._computing)) / self.plan.cores)

    def _reads_at(self, shard_id: int) -> float:
        """Return when a pull that is there now will have been answered."""
        if not self.plan.pull_seconds:
            return self._resumes_at[shard_id]
        return self._occupy(list(self.shards) if self.run.mutex else [shard_id], self.plan.pull_seconds)

    def _handle(self, gradients: Gradients, *, whole: bool, then: Answer) -> None:
        plans = [PushPlan(shard_id, gradient) for shard_id, gradient in gradients]
        pushed = self.run.push_whole(plans) if whole else [self.run.push(plan) for plan in plans]
        for (shard_id, gradient), (receipt, _, _) in zip(gradients, pushed, strict=True):
            self.num_taken += receipt.outcome is not Outcome.REJECTED
            if self._report is not None:
                of = gradient.worker_id, shard_id, gradient.base_version
                self._report(Event(self._scheduler.now, Kind.PUSH, *of, receipt))
            then(receipt)

    def _waiting_for(self, shard_id: int) -> Sequence[str]:
        return self.shards[shard_id].waiting_for(self.run.rounds.roster_of(shard_id))

    def _waits(self, worker_id: str, whom: Callable[[], Sequence[str]], shard_id: int = -1, version: int = 0) -> None:
        """Record that a worker waits; see from now on whether others hold it up, and when a grace ends."""
        if self._report is not None:
            self._say(Kind.WAIT, worker_id, shard_id, version, note=" ".join(["for", *whom()]))
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
        latest = self._scheduler.now - self.plan.lease_seconds / 2
        for worker_id, incarnation in self._living.items():
            # Live workers send heartbeats.
            if self._called_at.get(worker_id, latest) <= latest:
                self._called_at[worker_id] = self._scheduler.now
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
        if self._report is not None:
            self._report(Event(self._scheduler.now, kind, worker_id, shard_id, version, note=note))


# The run's events that follow from time alone.
_REPORTED = {"expired": Kind.EXPIRE, "stalled": Kind.STALL}
