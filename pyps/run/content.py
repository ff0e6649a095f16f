"""What an initialised run consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pyps.core import update_rules
from pyps.core.aggregation import Aggregation
from pyps.core.ledger import Ledger
from pyps.core.recorder import Recorder
from pyps.core.shard import Shard, ShardState
from pyps.core.staleness import StalenessPolicy
from pyps.run.initialization import listed
from pyps.run.settings import RuleSettings
from pyps_wire.errors import BadRequest
from pyps_wire.partition import Partition

if TYPE_CHECKING:
    from pyps.checkpoint import RunHeader


@dataclass(frozen=True)
class Content:
    """A run's plan, settings and shards on this server; replaced as a whole, never changed."""

    run_id: str
    partition: Partition
    server_index: int
    settings: RuleSettings
    shards: Mapping[int, Shard]
    # Term, worker and incarnation that initialised it; None for a restored run.
    initializer: tuple[int, str, int] | None
    ready_at: float

    @property
    def version_max(self) -> int:
        """The largest version among the shards: updates of the run."""
        return max((shard.version for shard in self.shards.values()), default=0)

    def shard(self, shard_id: int) -> Shard:
        """The shard of that number; BadRequest when it is not on this server."""
        shard = self.shards.get(shard_id)
        if shard is None:
            raise BadRequest(
                f"shard {shard_id} is not on server {self.server_index}, which holds {listed(self.shards)} "
                f"of the model's {self.partition.num_shards}"
            )
        return shard

    def header(self, *, epoch: int, protocol: str, staleness: str) -> RunHeader:
        """What the run is, apart from its shards."""
        # Imported here: checkpoints know runs, and a run knows only the head of a checkpoint.
        from pyps.checkpoint import RunHeader

        return RunHeader(
            run_id=self.run_id,
            epoch=epoch,
            server_index=self.server_index,
            num_servers=self.partition.num_servers,
            model=self.partition.model,
            optimizer=self.settings,
            protocol=protocol,
            staleness=staleness,
        )


class RunRecorder(Recorder, Protocol):
    """A shard's recorder that is told when a run's shards begin to serve."""

    def begin(self, header: RunHeader, shards: Mapping[int, Shard]) -> None:
        """Hears of the shards before anything happens to them."""


@dataclass(frozen=True)
class ShardFactory:
    """Makes a run's shards, all with the same behaviour."""

    aggregation: Aggregation
    staleness: StalenessPolicy
    recorder: Recorder | None

    def make(
        self,
        plan: Partition,
        settings: RuleSettings,
        states: dict[int, ShardState],
        *,
        server_index: int,
        epoch: int,
    ) -> dict[int, Shard]:
        """One shard for each of the server's states, which are taken out: a model is never held twice."""
        shards = {}
        for shard_range in plan.of_server(server_index):
            state = states.pop(shard_range.shard_id)
            shards[shard_range.shard_id] = Shard(
                shard_range.shard_id,
                state.parameters,
                rule=update_rules.find(settings.rule),
                hyperparameters=settings.groups[shard_range.group],
                aggregation=self.aggregation,
                staleness=self.staleness,
                epoch=epoch,
                version=state.version,
                slots=state.slots or None,
                ledger=Ledger(state.ledger),
                pending=state.pending,
                recorder=self.recorder,
            )
        return shards
