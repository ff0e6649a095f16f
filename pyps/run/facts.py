"""What can be read off a run, by the services that answer for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from pyps.core.aggregation import Aggregation
from pyps.core.behaviour import Behaviour
from pyps.core.membership import Membership
from pyps.core.roster import Roster
from pyps.core.rule_settings import RuleSettings
from pyps.core.shard import Shard
from pyps.core.staleness import StalenessPolicy
from pyps.core.whole_model import WholeModel
from pyps.run import handshake
from pyps.run.attendance import Attendance
from pyps.run.content import Content
from pyps.run.ending import Ending
from pyps.run.gate import InitializationGate
from pyps.run.handshake import Holding
from pyps.run.measurement import is_measurement
from pyps.run.rounds import RoundController
from pyps.run.state import RunState
from pyps.run_header import RunHeader, Snapshot
from pyps.statistics import Statistics
from pyps.vectors.machine import VectorMachine
from pyps.work import WorkQueue
from pyps_wire.errors import NotInitialized, ServerUnavailable
from pyps_wire.partition import Model, Partition

if TYPE_CHECKING:
    from pyps.config import ServerConfig


class RunFacts:
    """The readable side of a run. Every property may be read from any thread, without a lock."""

    config: ServerConfig
    clock: Callable[[], float]
    told: RuleSettings | None
    statistics: Statistics
    rounds: RoundController
    epoch: int
    # The data set, where workers ask server 0 for portions of it.
    work: WorkQueue
    gate: InitializationGate
    _attendance: Attendance
    _content: Content | None
    _draining: bool
    _ending: Ending

    # What the run is.

    @property
    def state(self) -> RunState:
        """Where the server stands with its run."""
        if self._draining:
            return RunState.DRAINING
        if self._ending.over:
            return RunState.FINISHED
        if self._content is not None:
            return RunState.READY
        return RunState.INITIALIZING if self.gate.busy else RunState.EMPTY

    @property
    def run_id(self) -> str:
        """The run held, or the one that the server was told to hold; empty when nobody named one yet."""
        return self._content.run_id if self._content else self.config.run_id

    @property
    def measures(self) -> bool:
        """Whether the run held is that of a `pyps bench`, of which nothing is to be kept."""
        return is_measurement(self.run_id)

    @property
    def partition(self) -> Partition | None:
        """The plan of the whole model, None before initialisation."""
        return self._content.partition if self._content else None

    @property
    def model(self) -> Model | None:
        """The whole model, None before initialisation."""
        return self._content.partition.model if self._content else None

    @property
    def server_index(self) -> int:
        """This server's place among the run's servers."""
        return self._content.server_index if self._content else 0

    @property
    def num_servers(self) -> int:
        """The servers of the run; 0 before initialisation."""
        return self._content.partition.num_servers if self._content else 0

    @property
    def optimizer(self) -> RuleSettings | None:
        """The rule in force with its settings, or what the server was told; None when nobody said yet."""
        return self._content.settings if self._content else self.told

    @property
    def shards(self) -> Mapping[int, Shard]:
        """This server's shards by id; empty before initialisation."""
        return self._content.shards if self._content else {}

    @property
    def version_max(self) -> int:
        """The largest version among this server's shards: updates of the run."""
        return self._content.version_max if self._content else 0

    @property
    def durable_version(self) -> int:
        """The newest version that checkpoints hold of every shard here; 0 for none."""
        return min((shard.durable_version for shard in self.shards.values()), default=0)

    @property
    def ready_at(self) -> float | None:
        """When the run was initialised or restored, in the run's clock."""
        return self._content.ready_at if self._content else None

    @property
    def membership(self) -> Membership:
        """The run's workers."""
        return self._attendance.membership

    @property
    def roster(self) -> Roster:
        """Those of them that the protocol reckons with."""
        return self.membership.roster

    def roster_of(self, shard_id: int) -> Roster:
        """Those that the protocol reckons with at a shard: the workers, or processes of replicas, with its part."""
        content = self._content
        # A call that waits may ask after a shard of a run that was reset.
        return self.roster.of_part(0 if content is None else content.parts.get(shard_id, 0))

    def shards_of(self, worker_id: str) -> Mapping[int, Shard]:
        """This server's shards of the parts of the model that a worker holds; all where it did not name parts."""
        content = self._content
        member = self.membership.get(worker_id) if self.membership.parted else None
        if content is None or member is None or not member.parts:
            return self.shards
        return {i: shard for i, shard in content.shards.items() if member.holds(content.parts[i])}

    def require_declared(self, worker_id: str, shard_ids: Iterable[int]) -> None:
        """Refuses (BadRequest) a worker that means shards of a part that it did not declare in Hello."""
        content = self._content
        if content is not None and self.membership.parted:
            for shard_id in shard_ids:
                self.membership.require_part(worker_id, shard_id, content.parts[shard_id])

    # How it goes about its work.

    @property
    def behaviour(self) -> Behaviour:
        """Protocol, staleness policy, schedule and their like, as they are in force."""
        return self.rounds.behaviour

    @property
    def aggregation(self) -> Aggregation:
        """The protocol in force, a warm-up before it included."""
        return self.rounds.behaviour.aggregation

    @property
    def staleness(self) -> StalenessPolicy:
        """The staleness policy in force."""
        return self.rounds.behaviour.staleness

    @property
    def whole(self) -> WholeModel | None:
        """The shards under one mutex, where the protocol asks for that."""
        content = self._content
        return content.whole if content is not None and self.aggregation.whole_model else None

    @property
    def machine(self) -> VectorMachine | None:
        """What a coordinator keeps beside the shards; None before initialisation."""
        return self._content.machine if self._content else None

    @property
    def batch_size(self) -> int:
        """The minibatch that the schedule asks of workers now; 0 where it has none or the run has not begun."""
        content, growth = self._content, self.behaviour.batch_growth
        return growth.size(content.first.examples) if content and content.shards and growth else 0

    def batch_size_in(self, epoch: int) -> int:
        """The minibatch that the schedule asks for in that pass over the data; 0 where it has none."""
        growth = self.behaviour.batch_growth
        return growth.size(epoch * growth.epoch_examples) if growth else 0

    def epochs_ahead(self) -> int:
        """How many epochs of shared data free workers may begin ahead; none where steps wait for others' steps."""
        return 0 if self.aggregation.barrier or self.rounds.pacing.asks else self.config.epochs_ahead

    def holding(self) -> Holding:
        """What the server holds, as a newcomer is told."""
        last, now = self.statistics.last_update, self.clock()
        return Holding(self.run_id, self.version_max, None if last is None else now - last)

    @property
    def done(self) -> bool:
        """True when as many workers as expected (at least one) have joined, and none of them is left."""
        return not self.measures and self._attendance.done(expected_workers=self.membership.expected_workers)

    def header(self) -> RunHeader:
        """What the run is, apart from its shards: the head of a checkpoint."""
        return self._header(self._require_content())

    def snapshot(self) -> Snapshot:
        """What a checkpoint is made of. The queue before the shards: an example is rather trained twice than lost."""
        work = None if self.work.spec is None else self.work.state()
        content = self._require_content()
        return Snapshot(self._header(content), dict(content.shards), content.machine, work)

    def _header(self, content: Content) -> RunHeader:
        return content.header(epoch=self.epoch, behaviour=self.behaviour, told=self.config.behaviour)

    def _require_content(self) -> Content:
        content = self._content
        if content is None:
            raise NotInitialized(
                f"this server holds no parameters yet (it is {self.state.name.lower()}): "
                "a worker's Hello and Initialize come first"
            )
        return content

    def _serving(self, run_id: str | None) -> Content:
        """The content, where the server serves the caller's run; None trusts the caller to mean this one."""
        content = self._content
        # The usual case first: a small push is over in no time.
        if content is None or self._draining or (run_id is not None and run_id != content.run_id):
            content = self._require_content()
            self._refuse_when_draining()
            self._require_run(content, run_id)
        return content

    def _require_run(self, content: Content, run_id: str | None) -> None:
        if run_id is not None and run_id != content.run_id:
            handshake.check_run(run_id or "(none)", self.holding(), observer=False)

    def _refuse_when_draining(self) -> None:
        if self._draining:
            raise ServerUnavailable("this server is shutting down: try again once it is back")
