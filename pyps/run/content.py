"""What an initialised run consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from pyps.core import update_rules
from pyps.core.arrays import Floats
from pyps.core.behaviour import Behaviour
from pyps.core.ledger import LIVES_MAX, Ledger, LedgerState
from pyps.core.pending import PendingBudget
from pyps.core.recorder import Recorder
from pyps.core.roster import Roster
from pyps.core.rule_settings import RuleSettings
from pyps.core.shard import Shard, ShardState
from pyps.core.whole_model import WholeModel
from pyps.run.initialization import Initialization, listed
from pyps.run_header import RestoredRun, RunHeader
from pyps.vectors.machine import VectorMachine
from pyps_wire.errors import BadRequest
from pyps_wire.partition import Partition, partition

if TYPE_CHECKING:
    from pyps.config import ServerConfig

# Lives whose receipts a shard remembers, for each worker that may be alive.
LIVES_PER_WORKER = 4


@dataclass(frozen=True)
class Content:
    """A run's plan, settings and shards on this server; replaced as a whole, never changed."""

    run_id: str
    partition: Partition
    server_index: int
    settings: RuleSettings
    shards: Mapping[int, Shard]
    # All of them under one mutex, for a protocol that asks for it.
    whole: WholeModel
    # What a coordinator keeps beside them.
    machine: VectorMachine
    # Term, worker (or replica) and incarnation that initialised it; None for a restored run.
    initializer: tuple[int, str, int] | None
    ready_at: float

    @cached_property
    def parts(self) -> Mapping[int, int]:
        """The part of the model that each shard belongs to."""
        return {shard_id: self.partition.part_of(shard_id) for shard_id in self.shards}

    def roster_of(self, shard_id: int, roster: Roster) -> Roster:
        """Those of a run's roster that hold a shard's part of the model."""
        return roster.of_part(self.parts[shard_id])

    def rosters(self, roster: Roster) -> list[Roster]:
        """The rosters that this server's shards go by, each once."""
        return [roster.of_part(part) for part in sorted(set(self.parts.values()))] or [roster]

    @property
    def version_max(self) -> int:
        """The largest version among the shards: updates of the run."""
        return max((shard.version for shard in self.shards.values()), default=0)

    @property
    def first(self) -> Shard:
        """The shard with the lowest number, whose counts stand for the run's."""
        return self.shards[min(self.shards)]

    def shard(self, shard_id: int) -> Shard:
        """The shard of that number; BadRequest when it is not on this server."""
        shard = self.shards.get(shard_id)
        if shard is None:
            raise BadRequest(
                f"shard {shard_id} is not on server {self.server_index}, which holds {listed(self.shards)} "
                f"of the model's {self.partition.num_shards}"
            )
        return shard

    def header(self, *, epoch: int, behaviour: Behaviour, told: Behaviour) -> RunHeader:
        """What the run is, apart from its shards; `told` is the behaviour that the server was started with."""
        return RunHeader(
            run_id=self.run_id,
            epoch=epoch,
            server_index=self.server_index,
            num_servers=self.partition.num_servers,
            model=self.partition.model,
            optimizer=self.settings,
            behaviour=behaviour.texts,
            told=told.texts,
        )


class RunRecorder(Recorder, Protocol):
    """A shard's recorder that is told when a run's shards begin to serve."""

    def begin(self, header: RunHeader, shards: Mapping[int, Shard]) -> None:
        """Hears of the shards before anything happens to them."""


@dataclass(frozen=True)
class ContentFactory:
    """Makes contents whose shards all behave alike."""

    behaviour: Behaviour
    recorder: Recorder | None
    # Of the gradients that wait at all of them.
    pending: PendingBudget
    epoch: int
    # Lives of workers whose receipts each shard remembers.
    lives_max: int
    # The bound of a coordinator's vectors.
    vector_bytes_max: int

    @classmethod
    def of(
        cls,
        config: ServerConfig,
        behaviour: Behaviour,
        recorder: Recorder | None,
        pending: PendingBudget,
        *,
        epoch: int,
    ) -> ContentFactory:
        """The factory of a server that was told this; `recorder` where it logs its updates."""
        lives_max = max(LIVES_MAX, LIVES_PER_WORKER * config.max_workers)
        return cls(behaviour, recorder, pending, epoch, lives_max, vector_bytes_max=config.max_vector_bytes)

    def first(self, initialization: Initialization, received: Mapping[int, Floats], *, now: float) -> Content:
        """The content that the first parameters make, those of an initialisation that is complete."""
        opening = initialization.opening
        states = {
            shard_id: ShardState(version=0, parameters=parameters, slots={}, ledger=LedgerState())
            for shard_id, parameters in received.items()
        }
        return self._make(
            opening.run_id,
            initialization.partition,
            opening.server_index,
            initialization.settings,
            states,
            initializer=opening.initializer,
            now=now,
        )

    def restored(self, restored: RestoredRun, *, now: float) -> Content:
        """The content that a checkpoint holds, whose arrays are the run's from now on."""
        header = restored.header
        plan = partition(header.model, num_servers=header.num_servers)
        states = dict(restored.shards)
        content = self._make(
            header.run_id, plan, header.server_index, header.optimizer, states, initializer=None, now=now
        )
        if restored.machine is not None:
            content.machine.restore(restored.machine)
        return content

    def _make(
        self,
        run_id: str,
        plan: Partition,
        server_index: int,
        settings: RuleSettings,
        states: dict[int, ShardState],
        *,
        initializer: tuple[int, str, int] | None,
        now: float,
    ) -> Content:
        shards = {}
        for shard_range in plan.of_server(server_index):
            state = states.pop(shard_range.shard_id)
            hyperparameters = settings.groups[shard_range.group]
            shards[shard_range.shard_id] = self._shard(shard_range.shard_id, state, settings.rule, hyperparameters)
        whole = WholeModel(shards)
        machine = VectorMachine(shards, bytes_max=self.vector_bytes_max, logged=self.recorder is not None)
        return Content(run_id, plan, server_index, settings, shards, whole, machine, initializer, now)

    def _shard(self, shard_id: int, state: ShardState, rule: str, hyperparameters: Mapping[str, float]) -> Shard:
        return Shard(
            shard_id,
            state.parameters,
            rule=update_rules.find(rule),
            hyperparameters=hyperparameters,
            behaviour=self.behaviour,
            epoch=self.epoch,
            version=state.version,
            slots=state.slots or None,
            ledger=Ledger(state.ledger, lives_max=self.lives_max),
            pending=state.pending,
            examples=state.examples,
            learning_rate=state.learning_rate,
            momentum=state.momentum,
            recorder=self.recorder,
            budget=self.pending,
            # A model is never held twice.
            take_over=True,
        )
