"""The content of a run on this server, and the condition that ends the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

from pyps.core.election import Claim
from pyps.core.recorder import Recorder
from pyps.core.roster import Roster
from pyps.core.rule_settings import RuleSettings
from pyps.core.store import Store
from pyps.core.vectors.machine import VectorMachine
from pyps.run_header import RunHeader
from pyps_wire.errors import InvalidArgument
from pyps_wire.partition import Model, Partition

if TYPE_CHECKING:
    from pyps.config import StopCondition


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a server holds of a run: a `ReadyContent` once there is one. Never changed, only replaced."""

    # The run held, or the one that the server was started for; empty if there is neither.
    run_id: str
    # It grows with each restore and reset. Versions of different epochs cannot be compared.
    epoch: int
    # The rule in force with its settings, or that of the server's flags; None if there is neither.
    settings: RuleSettings | None
    # This server's place among the run's servers.
    server_index: int = 0
    # The plan of the whole model.
    partition: Partition | None = None
    # This server's, by id.
    shards: Mapping[int, Store] = field(default_factory=dict)
    # What the parameters here began with, in words, and the CRC-32 of each shard's.
    origin: str = ""
    first_crcs: Mapping[int, int] = field(default_factory=dict)
    # The vectors that a coordinator keeps on each shard.
    machine: VectorMachine | None = None
    # Held for all shards of a push or a pull, where the protocol wants one mutex for the model.
    mutex: Lock = field(default_factory=Lock)

    @property
    def model(self) -> Model | None:
        return self.partition.model if self.partition else None

    @property
    def num_servers(self) -> int:
        return self.partition.num_servers if self.partition else 0

    @property
    def version_max(self) -> int:
        """The largest version among the shards: updates of the run."""
        return max((shard.version for shard in self.shards.values()), default=0)

    @cached_property
    def vectors(self) -> list[Store]:
        """The shards that are no table's."""
        return [shard for shard in self.shards.values() if not shard.has_rows]

    @property
    def durable_version(self) -> int:
        """The newest version that checkpoints hold of every shard here; 0 for none."""
        return min((shard.durable_version for shard in self.shards.values()), default=0)

    @property
    def unsaved_updates(self) -> int:
        """Updates that no checkpoint holds, of the shard that has most of them."""
        return max((shard.version - shard.durable_version for shard in self.shards.values()), default=0)

    @property
    def first(self) -> Store | None:
        """The shard with the lowest number, whose counts are taken for the run's; None without shards."""
        return self.shards[min(self.shards)] if self.shards else None

    @property
    def examples(self) -> int:
        """Examples behind the updates made, counted on the first shard."""
        return self.first.examples if self.first is not None else 0

    @cached_property
    def parts(self) -> Mapping[int, int]:
        """The part of the model that each shard belongs to."""
        return {shard_id: self.partition.part_of(shard_id) for shard_id in self.shards} if self.partition else {}

    def rosters(self, roster: Roster) -> list[Roster]:
        """Return the rosters of the parts that this server's shards belong to, each once."""
        return [roster.of_part(part) for part in sorted(set(self.parts.values()))] or [roster]

    def roster_of(self, shard_id: int, roster: Roster) -> Roster:
        """Return the workers of a run's roster that hold a shard's part of the model."""
        return roster.of_part(self.parts[shard_id])


@dataclass(frozen=True, kw_only=True)
class ReadyContent(Content):
    """A run's plan, settings and shards on this server."""

    partition: Partition
    settings: RuleSettings
    machine: VectorMachine
    # When the run was initialised or restored, in the run's clock.
    ready_at: float
    # Who initialised it; None for a restored run.
    initializer: Claim | None

    def shard(self, shard_id: int) -> Store:
        """Return the shard of that number; InvalidArgument when it is not on this server."""
        shard = self.shards.get(shard_id)
        if shard is None:
            raise InvalidArgument(
                f"shard {shard_id} is not on server {self.server_index}, which holds {listed(self.shards)} "
                f"of the model's {self.partition.num_shards}"
            )
        return shard


class RunRecorder(Recorder, Protocol):
    """A recorder of shards that also records their state when a run begins."""

    def begin(self, header: RunHeader, shards: Mapping[int, Store]) -> None:
        """Record the shards before anything happens to them."""

    def note(self, line: Mapping[str, Any]) -> None:
        """Record what belongs to no shard: an event, a wait, a worker's report. From any thread; it must not raise."""


class Ending:
    """Ends a run, once, by finishing its shards. May be used from any thread, and under any lock."""

    def __init__(
        self, condition: StopCondition | None, *, content: Callable[[], Content], on_end: Callable[[str], None]
    ):
        # So many of the unit; the unit is empty for a run that only a call ends.
        self._unit, self._limit = ("", 0.0) if condition is None else (condition.unit, condition.limit)
        self._content = content
        self._on_end = on_end
        self._lock = Lock()
        # Guarded by _lock.
        self.over = False

    def finish(self, reason: str) -> None:
        """End the run now."""
        for shard in self._content().shards.values():
            shard.finish()
        self._end(reason)

    def after_update(self, shard: Store) -> None:
        """End the run if the shard's last update was the last of the run."""
        if self._unit == "updates" and shard.version >= self._limit:
            # Each shard makes so many updates: the other shards of the same push still get theirs.
            shard.finish()
            self._end(f"{self._limit:g} updates are done")
        elif self._unit == "examples" and (done := self._content().examples) >= self._limit:
            self.finish(f"{done} examples are done")

    def after_seconds(self, seconds: float) -> None:
        """End the run if its time is over."""
        if self._unit == "seconds" and seconds >= self._limit:
            self.finish(f"{self._limit:g} seconds are over")

    def _end(self, reason: str) -> None:
        with self._lock:
            if self.over:
                return
            self.over = True
        self._on_end(reason)


def listed(shard_ids: Iterable[int]) -> str:
    """Return shard ids in words, the first few of many."""
    ids = sorted(shard_ids)
    if not ids:
        return "no shards"
    more = f" and {len(ids) - 8} more" if len(ids) > 8 else ""
    return f"shard{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids[:8]))}{more}"
