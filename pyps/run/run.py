"""The run that a server holds, from empty over initialised to finished."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from threading import RLock
from typing import TYPE_CHECKING

from pyps import __version__, logs
from pyps.core import aggregation, staleness
from pyps.core.arrays import Floats
from pyps.core.gradient import Gradient
from pyps.core.ledger import LedgerState
from pyps.core.membership import Membership
from pyps.core.receipt import Outcome, Receipt
from pyps.core.shard import Shard, ShardState
from pyps.run import handshake
from pyps.run.attendance import Attendance
from pyps.run.content import Content, RunRecorder, ShardFactory
from pyps.run.gate import InitializationGate
from pyps.run.handshake import Greeting, Holding, Pulse, Welcome
from pyps.run.initialization import Initialization, Opening
from pyps.run.settings import RuleSettings, settle
from pyps.run.state import RunState
from pyps.run.waits import Waits
from pyps.statistics import Statistics
from pyps_wire.errors import NotInitialized, RunMismatch, ServerUnavailable, UnknownWorker
from pyps_wire.partition import Model, Partition, partition

if TYPE_CHECKING:
    from pyps.checkpoint import RestoredRun, RunHeader
    from pyps.config import ServerConfig

SOFTWARE = f"pyps {__version__}"
# An initialiser that is silent for so long has died: another takes its place.
ELECTION_LEASE_SECONDS = 10.0

log = logs.get("pyps.run")


class Run:
    """One run, or the place for one. Every method may be called from any thread.

    `_lock` guards which run it is; it is never held while a shard is updated or a caller waited for.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        recorder: RunRecorder | None = None,
    ):
        self.config = config
        self.clock = clock
        self.recorder = recorder
        self.aggregation = aggregation.parse(config.protocol)
        self.staleness = staleness.parse(config.staleness)
        self._factory = ShardFactory(self.aggregation, self.staleness, recorder)
        self.told = RuleSettings.parse(config.optimizer) if config.optimizer else None
        self.stop_condition = config.stop_condition
        self.started_at = clock()
        self.waits = Waits()
        self.on_ready: Callable[[], None] = lambda: None
        self._lock = RLock()
        # Guarded by _lock; read without it, since each is replaced as a whole.
        self.epoch = 0
        self._draining = False
        self._clear()

    def _clear(self) -> None:
        self.statistics = Statistics()
        self._attendance = Attendance(lease_seconds=self.config.lease_seconds, workers_max=self.config.max_workers)
        self.gate = InitializationGate(
            lease_seconds=min(ELECTION_LEASE_SECONDS, self.config.lease_seconds),
            # The other servers remember terms over a restart of this one.
            first_term=time.time_ns() // 1_000_000,
        )
        self._content: Content | None = None
        self._finished = False

    # What the run is.

    @property
    def state(self) -> RunState:
        """Where the server stands with its run."""
        if self._draining:
            return RunState.DRAINING
        if self._finished:
            return RunState.FINISHED
        if self._content is not None:
            return RunState.READY
        return RunState.INITIALIZING if self.gate.busy else RunState.EMPTY

    @property
    def run_id(self) -> str:
        """The run held, or the one that the server was told to hold; empty when nobody named one yet."""
        return self._content.run_id if self._content else self.config.run_id

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
    def ready_at(self) -> float | None:
        """When the run was initialised or restored, in the run's clock."""
        return self._content.ready_at if self._content else None

    @property
    def membership(self) -> Membership:
        """The run's workers."""
        return self._attendance.membership

    # How workers come and go.

    def hello(self, greeting: Greeting) -> Welcome:
        """Takes a caller in, or refuses it with the reason; elects it where somebody has to initialise."""
        handshake.check_caller(greeting, software=SOFTWARE)
        now = self.clock()
        with self._lock:
            self._refuse_when_draining()
            if self._content is not None:
                # Who came while the server was empty waited for the first parameters: it is of this run.
                waited = self._attendance.is_member(greeting)
                handshake.check_joining(greeting, self._content, holding=self.holding(), waited=waited)
            elif greeting.observer:
                handshake.check_run_told(greeting.run_id, told=self.config.run_id)
            else:
                handshake.check_founding(greeting, config=self.config, told=self.told)
            if greeting.observer:
                return Welcome()
            self._attendance.join(greeting, now=now)
            if self._content is not None or greeting.server_index != 0:
                return Welcome()
            term = self.gate.elect(greeting.worker_id, greeting.incarnation, now=now)
            if term is None:
                return Welcome()
            log.info("worker elected to initialise the run", worker=greeting.worker_id, term=term.number)
            return Welcome(initialize=True, term=term.number)

    def heartbeat(
        self, run_id: str, worker_id: str, incarnation: int, *, clock: int, scalars: Mapping[str, float]
    ) -> Pulse:
        """Renews a worker's lease and tells what the server wants of it."""
        known = run_id == self.run_id or not run_id
        try:
            if known:
                self._attendance.heard(worker_id, incarnation, now=self.clock(), clock=clock, scalars=scalars)
        except UnknownWorker:
            known = False
        state = self.state
        return Pulse(known, state == RunState.FINISHED, state, self.epoch, self.version_max)

    def leave(self, run_id: str, worker_id: str, incarnation: int, *, failed: bool, message: str) -> int:
        """Ends a worker's membership; returns how many are left alive."""
        if run_id == self.run_id:
            self._attendance.leave(worker_id, incarnation, now=self.clock(), failed=failed, message=message)
        return self.membership.num_alive

    # How the first parameters come in.

    def begin_initialize(self, opening: Opening) -> Initialization | None:
        """Opens an initialisation; None when this very one is done already."""
        handshake.check_opening(opening)
        with self._lock:
            if self._already_initialized(opening):
                return None
            plan, settings = handshake.check_founding(opening, config=self.config, told=self.told)
            plan.of_server(opening.server_index)
            return Initialization(opening, plan, settings)

    def renew_term(self, opening: Opening) -> None:
        """Prolongs the initialiser's turn; Superseded when it has passed to another."""
        with self._lock:
            self.gate.renew(opening, now=self.clock())

    def commit(self, initialization: Initialization) -> None:
        """Makes the collected parameters the run's: from now on it serves."""
        opening = initialization.opening
        plan, settings = initialization.partition, initialization.settings
        states = {shard_id: _first_state(values) for shard_id, values in initialization.take().items()}
        shards = self._factory.make(plan, settings, states, server_index=opening.server_index, epoch=self.epoch)
        with self._lock:
            if self._already_initialized(opening):
                return
            now, initializer = self.clock(), opening.initializer
            self._set_content(Content(opening.run_id, plan, opening.server_index, settings, shards, initializer, now))
        self.on_ready()

    def restore(self, restored: RestoredRun) -> None:
        """Goes on from a checkpoint under a new epoch; refuses one that contradicts what the server was told."""
        header = restored.header
        if self.config.run_id and header.run_id != self.config.run_id:
            raise RunMismatch(
                f"the checkpoint is of run {header.run_id!r}, but this server was started for "
                f"{self.config.run_id!r}: drop --run-id, or name another --checkpoint-dir"
            )
        num_groups = header.model.num_groups
        settle(self.told, header.optimizer, num_groups=num_groups, source="--optimizer", asker="the checkpoint")
        plan, index = partition(header.model, num_servers=header.num_servers), header.server_index
        states = dict(restored.shards)
        with self._lock:
            self.epoch = header.epoch + 1
            shards = self._factory.make(plan, header.optimizer, states, server_index=index, epoch=self.epoch)
            self.statistics.restore_examples(restored.examples)
            self._set_content(Content(header.run_id, plan, index, header.optimizer, shards, None, self.clock()))
        self.on_ready()

    def header(self) -> RunHeader:
        """What the run is, apart from its shards: the head of a checkpoint."""
        return self._header(self._require_content())

    # How the run moves.

    def push(self, gradient: Gradient, shard_id: int, *, run_id: str | None = None) -> Receipt:
        """Handles one pushed shard; see `Shard.push`. `run_id` None trusts the caller to mean this run."""
        content = self._require_content()
        self._refuse_when_draining()
        self._require_run(content, run_id)
        shard = content.shard(shard_id)
        began = self.clock()
        self._attendance.heard(gradient.worker_id, gradient.incarnation, now=began, clock=gradient.clock or None)
        receipt = shard.push(gradient, num_workers=self.membership.num_alive)
        now = self.clock()
        self.statistics.pushed(
            gradient.worker_id,
            shard_id,
            receipt,
            payload_bytes=len(gradient.payload),
            examples=gradient.example_count,
            now=now,
            apply_seconds=now - began,
        )
        if receipt.outcome == Outcome.APPLIED and not receipt.duplicate:
            self._stop_where_due(shard)
        return receipt

    def shards_to_pull(
        self, run_id: str, worker_id: str, incarnation: int, *, observer: bool, shard_ids: Iterable[int]
    ) -> list[Shard]:
        """The shards that a caller may read, those named or all; a worker's lease is renewed."""
        content = self._require_content()
        if observer:
            handshake.check_run(run_id, self.holding(), observer=True)
        else:
            self._require_run(content, run_id)
            self._attendance.heard(worker_id, incarnation, now=self.clock())
        return [content.shard(shard_id) for shard_id in shard_ids] or list(content.shards.values())

    def tick(self) -> None:
        """Does what time brings: forgets silent workers, ends a run whose time is over."""
        now = self.clock()
        self._attendance.expire(now)
        condition, content = self.stop_condition, self._content
        if condition is None or condition.unit != "seconds" or content is None:
            return
        if now - content.ready_at >= condition.limit:
            self.finish(f"{condition.limit:g} seconds are over")

    def finish(self, reason: str = "stopped on request") -> None:
        """Ends the run: pushes are refused, workers told to stop; pulls go on."""
        if self._content is not None:
            for shard in self._content.shards.values():
                shard.finish()
            self._end(reason)

    def drain(self) -> None:
        """Refuses everything from now on, before the server ends; waiting calls end too."""
        with self._lock:
            self._draining = True
        self.waits.wake_all()

    def reset(self, run_id: str) -> None:
        """Forgets the run that goes by that name: the server is empty afterwards."""
        with self._lock:
            content = self._content
            if content is None:
                raise NotInitialized("this server holds no run: there is nothing to reset")
            if run_id != content.run_id:
                raise RunMismatch(f"this server holds {self.holding()}, not run {run_id!r}: name the run to reset")
            log.warning("run reset", run=run_id, version=content.version_max)
            # Held versions of the forgotten run mean nothing in the next.
            self.epoch += 1
            self._clear()
        for shard in content.shards.values():
            shard.finish()
        self.waits.wake_all()

    @property
    def done(self) -> bool:
        """True when as many workers as expected (at least one) have joined, and none of them is left."""
        return self._attendance.done(expected_workers=self.config.expected_workers)

    def holding(self) -> Holding:
        """What the server holds, as a newcomer is told."""
        last, now = self.statistics.last_update, self.clock()
        return Holding(self.run_id, self.version_max, None if last is None else now - last)

    # Helpers.

    def _already_initialized(self, opening: Opening) -> bool:
        """Whether there is nothing to do; refuses whoever may not initialise now."""
        self._refuse_when_draining()
        if self.gate.already_done(self._content, opening):
            return True
        self.gate.require_replaceable(
            self._content, opening, holding=self.holding(), workers_alive=self.membership.num_alive
        )
        self.gate.renew(opening, now=self.clock())
        return False

    def _set_content(self, content: Content) -> None:
        if self.recorder is not None:
            self.recorder.begin(self._header(content), content.shards)
        self._content = content
        self.gate.done()
        for shard in content.shards.values():
            # A restored run may have reached its end already.
            self._stop_where_due(shard)

    def _header(self, content: Content) -> RunHeader:
        return content.header(epoch=self.epoch, protocol=self.aggregation.name, staleness=self.staleness.name)

    def _stop_where_due(self, shard: Shard) -> None:
        """Ends the run where the shard's last update was the last of the run."""
        condition = self.stop_condition
        if condition is None:
            return
        if condition.unit == "updates" and shard.version >= condition.limit:
            # Each shard takes its own count of updates: the other shards of the same push still get theirs.
            shard.finish()
            self._end(f"{condition.limit:g} updates are done")
        elif condition.unit == "examples" and self.statistics.examples >= condition.limit:
            self.finish(f"{self.statistics.examples} examples are done")

    def _end(self, reason: str) -> None:
        with self._lock:
            if self._finished:
                return
            self._finished = True
        self.waits.wake_all()
        log.info("run finished", run=self.run_id, version=self.version_max, reason=reason)

    def _require_content(self) -> Content:
        content = self._content
        if content is None:
            raise NotInitialized(
                f"this server holds no parameters yet (it is {self.state.name.lower()}): "
                "a worker's Hello and Initialize come first"
            )
        return content

    def _require_run(self, content: Content, run_id: str | None) -> None:
        if run_id is not None and run_id != content.run_id:
            handshake.check_run(run_id or "(none)", self.holding(), observer=False)

    def _refuse_when_draining(self) -> None:
        if self._draining:
            raise ServerUnavailable("this server is shutting down: try again once it is back")


def _first_state(parameters: Floats) -> ShardState:
    return ShardState(version=0, parameters=parameters, slots={}, ledger=LedgerState())
