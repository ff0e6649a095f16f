"""A cluster in virtual time: workers with given compute times around a real run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from pyps.core.arrays import Floats
from pyps.core.behaviour import Behaviour
from pyps.core.gradient import Gradient, PayloadKind
from pyps.core.receipt import Reason, Receipt
from pyps.core.rule_settings import RuleSettings
from pyps.core.store import Store
from pyps.run.content import RunRecorder
from pyps.simulation.event import Event, Scheduler
from pyps.simulation.network import Network, Nic
from pyps.simulation.server import ServerPlan, VirtualServer
from pyps.statistics import Tally
from pyps_client.vectors import Encoder
from pyps_wire.codecs import FLOAT32, Codec
from pyps_wire.errors import InvalidArgument
from pyps_wire.partition import ShardRange

# Takes the step's number, from 0, and the worker's random numbers.
Timing = Callable[[int, np.random.Generator], float]

# No step takes less than this share of the mean.
SHORTEST = 0.05
# Of normal and lognormal times: beyond it nearly all steps take no time.
SPREAD_MAX = 5.0


def fixed(seconds: float) -> Timing:
    """Return the same time for every step."""
    return lambda step, random: seconds


def scripted(seconds: Sequence[float]) -> Timing:
    """Return these times in turn, and the last one for all further steps."""
    return lambda step, random: seconds[min(step, len(seconds) - 1)]


def normal(mean: float = 1.0, *, variation: float) -> Timing:
    """Return normally distributed times with that coefficient of variation."""
    return lambda step, random: mean * max(SHORTEST, 1 + variation * float(random.standard_normal()))


def lognormal(mean: float = 1.0, *, sigma: float) -> Timing:
    """Return times whose logarithm is normal with deviation `sigma`: some steps take long."""
    return lambda step, random: mean * float(np.exp(sigma * random.standard_normal() - sigma * sigma / 2))


def exponential(mean: float = 1.0) -> Timing:
    """Return exponentially distributed times, as on machines that many jobs share."""
    return lambda step, random: mean * float(random.exponential())


# By name: a timing of a mean and of the numbers behind the name, and how many those are (None for any number).
_TIMINGS: Mapping[str, tuple[Callable[..., Timing], int | None]] = {
    "fixed": (fixed, 0),
    "scripted": (lambda mean, *times: scripted([mean * time for time in times]), None),
    "normal": (lambda mean, variation: normal(mean, variation=variation), 1),
    "lognormal": (lambda mean, sigma: lognormal(mean, sigma=sigma), 1),
    "exponential": (exponential, 0),
}


def parse_timing(text: str, *, mean: float = 1.0) -> Timing:
    """Return the times that a text names, "lognormal:0.3", with that mean; a script's are multiples of it.

    Raises InvalidArgument.
    """
    name, _, rest = text.partition(":")
    make, count = _TIMINGS.get(name, (fixed, -1))
    try:
        numbers = [float(each) for each in rest.split(",")] if rest else []
    except ValueError:
        numbers = [math.nan]
    fits = len(numbers) == count or (count is None and numbers)
    if not fits or not all(0 <= number <= (SPREAD_MAX if count == 1 else 1e12) for number in numbers):
        raise InvalidArgument(
            f"the times are {text!r}; expected fixed, normal:VARIATION or lognormal:SIGMA up to {SPREAD_MAX:g}, "
            "exponential or scripted:1,2,5, as in lognormal:0.15"
        )
    return make(mean, *numbers)


class Step(NamedTuple):
    """The input of a worker's computation."""

    worker_id: str
    # The worker's own count of steps, from 0.
    number: int
    # By shard: the pulled parameters, which are not to be written to, and their versions.
    parameters: Mapping[int, Floats]
    versions: Mapping[int, int]
    # The worker's own random numbers.
    random: np.random.Generator


class Computed(NamedTuple):
    """The result of a step."""

    # By shard; a missing shard has no gradient.
    gradients: Mapping[int, Floats]
    # The examples and the minibatches in their sum.
    examples: int = 1
    minibatches: int = 1
    # GRADIENT, or DELTA where the rule's settings name that kind: of local steps.
    kind: PayloadKind = PayloadKind.GRADIENT


Compute = Callable[[Step], Computed]


@dataclass(frozen=True)
class Failures:
    """A worker dies without Leave, and joins again as a new process. Its lives are exponentially distributed."""

    mean_seconds: float
    recovery_seconds: float


@dataclass(frozen=True)
class WorkerPlan:
    """When a worker joins, how fast it is, and how it ends."""

    worker_id: str
    timing: Timing = field(default_factory=lambda: fixed(1.0))
    joins_at: float = 0.0
    # The number of steps after which it leaves; None for no end.
    steps: int | None = None
    # When it stops without Leave: its step is lost, and its lease expires later.
    dies_at: float = float("inf")
    # Larger in a later life of the same worker.
    incarnation: int = 1
    # The shards that it trains, in the order in which it sends them; None for all.
    shards: tuple[int, ...] | None = None
    # Of its pushes, whose losses are added to its next gradients as the client does; and of its pulls.
    codec: Codec = FLOAT32
    pull_codec: Codec = FLOAT32
    failures: Failures | None = None


class VirtualWorker:
    """A worker: it joins, then proceeds, pulls, computes and pushes in a loop, and may die and begin again.

    With a network it exchanges, as the client does: the answer of a push brings newer parameters unless the worker has
    to wait for others, which takes another request.
    """

    def __init__(
        self,
        plan: WorkerPlan,
        compute: Compute,
        *,
        server: VirtualServer,
        scheduler: Scheduler,
        nic: Nic | None,
        seed: Sequence[int],
    ) -> None:
        self.plan = plan
        self.worker_id = plan.worker_id
        self.steps_done = 0
        # Of its lives, the time in which it did not compute, and the time in which it did.
        self.blocked_seconds = self.computing_seconds = 0.0
        self._compute = compute
        self._server, self._scheduler, self._nic = server, scheduler, nic
        self._random = np.random.default_rng(seed)
        self._deaths = np.random.default_rng([*seed, 1]) if plan.failures else None
        self._shards = plan.shards if plan.shards is not None else tuple(server.shards)
        self._incarnation = plan.incarnation
        # Which of its lives it is in; actions of earlier ones are not called.
        self._life = 0
        self._begin_at(plan.joins_at)
        if plan.dies_at < float("inf"):
            self._at(plan.dies_at, self._die)

    def _begin_at(self, time: float) -> None:
        """Begin a life at that time."""
        self._joined = self._finished = False
        self._sequence = 0
        # When it began to compute, or to wait for what comes before that.
        self._since = 0.0
        # By shard: the version and parameters pulled, and the version to wait for before the next pull.
        self._held: dict[int, tuple[int, Floats]] = {}
        self._min_versions = dict.fromkeys(self._shards, 0)
        # Shards without an answer yet.
        self._outstanding: set[int] = set()
        self._encoder = None if self.plan.codec is FLOAT32 else Encoder(self.plan.codec)
        self._at(time, self._join)
        if self._deaths is not None and self.plan.failures is not None:
            self._at(time + float(self._deaths.exponential(self.plan.failures.mean_seconds)), self._die)

    def _at(self, time: float, action: Callable[[], None]) -> None:
        """Call the action at that time, unless the worker has left or died by then."""
        self._scheduler.at(time, partial(self._call, self._life, action), worker_id=self.worker_id)

    def _call(self, life: int, action: Callable[[], None]) -> None:
        if life == self._life:
            action()

    def _after_trips(self, trips: int, action: Callable[[], None]) -> None:
        """Call the action once so many messages without numbers have gone between worker and server."""
        seconds = trips * self._server.links.latency_seconds
        if seconds:
            self._at(self._scheduler.now + seconds, action)
        else:
            action()

    def _join(self) -> None:
        self._joined = True
        codecs = {"codec": self.plan.codec, "pull_codec": self.plan.pull_codec}
        self._server.join(self.worker_id, self._incarnation, **codecs)
        self._proceed(in_exchange=False)

    def _proceed(self, *, in_exchange: bool) -> None:
        """Begin the next step. In an exchange the request for parameters is at the server already."""
        self._since = self._scheduler.now
        if self._server.run.rounds.steps.asks:
            self._after_trips(1 + in_exchange, self._request_step)
            return
        shards, least = self._server.shards, self._min_versions.items()
        waits = not in_exchange or any(shards[shard_id].version < version for shard_id, version in least)
        self._after_trips((1 + in_exchange) if waits else 0, self._pull)

    def _request_step(self, *, again: bool = False) -> None:
        wake = partial(self._call, self._life, partial(self._at, 0.0, partial(self._request_step, again=True)))
        if self._server.may_proceed(self.worker_id, self.steps_done, wake=wake, again=again):
            self._after_trips(2, self._pull)

    def _pull(self) -> None:
        self._outstanding = set(self._shards)
        # A life may end while it waits for a version.
        self._server.pull(self.worker_id, self._min_versions, then=partial(self._reads_at, self._life))

    def _reads_at(self, life: int, shard_id: int, time: float) -> None:
        if life == self._life:
            self._at(time, partial(self._read, shard_id))

    def _read(self, shard_id: int) -> None:
        held, least, codec = self._held.get(shard_id), self._min_versions[shard_id], self.plan.pull_codec
        version, parameters, num_bytes = self._server.read(self.worker_id, shard_id, held, least, codec)
        self._held[shard_id] = version, parameters
        if self._nic is None:
            self._landed(shard_id)
        else:
            landed = partial(self._landed, shard_id)
            self._server.links.to_worker(self._nic, num_bytes, at=self._at, then=landed)

    def _landed(self, shard_id: int) -> None:
        self._outstanding.remove(shard_id)
        if not self._outstanding:
            self.blocked_seconds += self._scheduler.now - self._since
            self._since = self._scheduler.now
            seconds = self._server.stretched(self.plan.timing(self.steps_done, self._random))
            self._at(self._since + seconds, self._push)

    def _push(self) -> None:
        self.computing_seconds += self._scheduler.now - self._since
        parameters = {shard_id: values for shard_id, (_, values) in self._held.items()}
        versions = {shard_id: version for shard_id, (version, _) in self._held.items()}
        computed = self._compute(Step(self.worker_id, self.steps_done, parameters, versions, self._random))
        self._sequence += 1
        self._since = self._scheduler.now
        self._outstanding = set(self._shards)
        if self._encoder is not None:
            self._begin_encoding(self._encoder)
        gradients = [(shard_id, self._gradient(shard_id, computed)) for shard_id in self._shards]
        self._server.receive(self._nic, gradients, at=self._at, then=self._answered)

    def _gradient(self, shard_id: int, computed: Computed) -> Gradient:
        values = computed.gradients.get(shard_id)
        return Gradient(
            worker_id=self.worker_id,
            incarnation=self._incarnation,
            sequence=self._sequence,
            base_version=self._held[shard_id][0],
            epoch=self._server.run.content.epoch,
            codec=self.plan.codec,
            payload=b"" if values is None else self._payload(shard_id, np.asarray(values, np.float32)),
            kind=PayloadKind.NOTHING if values is None else computed.kind,
            example_count=computed.examples,
            minibatch_count=computed.minibatches,
            clock=self.steps_done + 1,
        )

    def _payload(self, shard_id: int, values: Floats) -> bytes:
        if self._encoder is None:
            return values.tobytes()
        shard = ShardRange(shard_id, group=shard_id, offset=0, length=values.size)
        return bytes(self._encoder.payload(np.ascontiguousarray(values), shard, ()))

    def _begin_encoding(self, encoder: Encoder) -> None:
        """Let a push begin at the worker's encoder, as in `pyps_client.push.Pushes`."""
        encoder.begin(self._sequence)
        if encoder.codec.stateful:
            run = self._server.run
            num_workers = max(1, run.membership.roster.num_workers)
            protocol = run.rounds.behaviour.aggregation.at(run.content.version_max)
            gradients_per_update = max(1, num_workers // (protocol.updates_per_round or num_workers))
            epoch, held = run.content.epoch, self._held
            age_max = math.ceil(2 * num_workers / gradients_per_update)
            encoder.clear_old(lambda shard_id: (epoch, held[shard_id][0]), age_max=age_max)

    def _answered(self, receipt: Receipt) -> None:
        self._min_versions[receipt.shard_id] = receipt.min_version
        self._outstanding.discard(receipt.shard_id)
        if self._encoder is not None and self._encoder.codec.stateful:
            # The fields are those of the message.
            self._encoder.answered(receipt)  # type: ignore[arg-type]
        self._finished |= receipt.reason == Reason.FINISHED
        if not self._outstanding:
            self.steps_done += not self._finished
            self.blocked_seconds += self._scheduler.now - self._since
            if self._finished or self.steps_done == self.plan.steps:
                self._leave()
            else:
                self._proceed(in_exchange=True)

    def _leave(self) -> None:
        self._life += 1
        self._server.leave(self.worker_id)

    def _die(self) -> None:
        self._life += 1
        if self._joined:
            self._server.lose(self.worker_id)
            if self.plan.failures is not None:
                self._incarnation += 1
                self._begin_at(self._scheduler.now + self.plan.failures.recovery_seconds)


class Simulation:
    """A run and its workers in virtual time. Equal inputs give equal events and equal bits."""

    def __init__(
        self,
        parameters: Sequence[Floats],
        settings: RuleSettings,
        behaviour: Behaviour,
        workers: Sequence[WorkerPlan],
        compute: Compute,
        *,
        server: ServerPlan | None = None,
        network: Network | None = None,
        seed: int = 0,
        recorder: RunRecorder | None = None,
        keep_events: bool = False,
    ) -> None:
        """Make a shard of each of the parameters, with an update rule of these settings.

        `keep_events`: for `events`, `receipts` and `trace`, whose memory grows with each push; `tally` needs none.
        """
        self._events: list[Event] | None = [] if keep_events else None
        self._scheduler = Scheduler()
        self.server = VirtualServer(
            parameters,
            settings,
            behaviour,
            server or ServerPlan(),
            num_workers=len(workers),
            scheduler=self._scheduler,
            network=network,
            report=None if self._events is None else self._events.append,
            recorder=recorder,
        )
        self.workers = [
            VirtualWorker(
                plan,
                compute,
                server=self.server,
                scheduler=self._scheduler,
                nic=None if network is None or network.is_instant else Nic(network.bytes_per_second),
                seed=[seed, index],
            )
            for index, plan in enumerate(workers)
        ]

    @property
    def shards(self) -> list[Store]:
        """The run's shards, in the order of the parameters."""
        return list(self.server.shards.values())

    @property
    def num_taken(self) -> int:
        """Accepted pushes, a shard each."""
        return self.server.num_taken

    @property
    def tally(self) -> Tally:
        """The run's own counts: updates, refusals, staleness as sum and histogram."""
        return self.server.run.statistics.total()

    @property
    def events(self) -> list[Event]:
        if self._events is None:
            raise ValueError("no events are kept: make the Simulation with keep_events=True, or take its tally")
        return self._events

    @property
    def now(self) -> float:
        return self._scheduler.now

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Call an action at a time, for example one that pauses a shard."""
        self._scheduler.at(time, action)

    def run(self, *, seconds: float = float("inf"), pushes: int | None = None) -> None:
        """Run until that time, until so many pushes are accepted, or until no action is left."""
        server, step = self.server, self._scheduler.step
        while (pushes is None or server.num_taken < pushes) and step(until=seconds):
            pass

    def receipts(self, shard_id: int | None = None) -> list[Receipt]:
        """Return the receipts of all pushes, or of a shard's, in the order of time."""
        receipts = (event.receipt for event in self.events if event.receipt is not None)
        return [receipt for receipt in receipts if shard_id is None or receipt.shard_id == shard_id]

    def trace(self) -> str:
        return "".join(f"{event}\n" for event in self.events)
