"""What an initialised run consists of, and when it is over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Protocol

from pyps.core.behaviour import Behaviour
from pyps.core.election import Claim
from pyps.core.recorder import Recorder
from pyps.core.roster import Roster
from pyps.core.rule_settings import RuleSettings
from pyps.core.store import Store
from pyps.core.vectors.machine import VectorMachine
from pyps.run_header import RunHeader
from pyps_wire.errors import BadRequest
from pyps_wire.partition import Partition

if TYPE_CHECKING:
    from pyps.config import StopCondition


@dataclass(frozen=True)
class Content:
    """A run's plan, settings and shards on this server; replaced as a whole, never changed."""

    run_id: str
    partition: Partition
    server_index: int
    settings: RuleSettings
    shards: Mapping[int, Store]
    # Held for all shards of a push or a pull, where the protocol wants one mutex for the model.
    mutex: Lock
    # What a coordinator keeps beside them.
    machine: VectorMachine
    # Who initialised it; None for a restored run.
    founder: Claim | None
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
    def first(self) -> Store:
        """The shard with the lowest number, whose counts stand for the run's."""
        return self.shards[min(self.shards)]

    def shard(self, shard_id: int) -> Store:
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

    def begin(self, header: RunHeader, shards: Mapping[int, Store]) -> None:
        """Hears of the shards before anything happens to them."""


class Ending:
    """Ends a run once, by refusing pushes shard by shard. May be used from any thread, and under any lock."""

    def __init__(self, condition: StopCondition | None, *, on_end: Callable[[str], None]):
        self.condition = condition
        self._on_end = on_end
        self._lock = Lock()
        # Guarded by _lock.
        self.over = False

    def finish(self, shards: Iterable[Store], reason: str) -> None:
        """Ends the run now."""
        for shard in shards:
            shard.finish()
        self._end(reason)

    def after_update(self, shard: Store, *, examples: Callable[[], int], shards: Iterable[Store]) -> None:
        """Ends the run where the shard's last update was the last of the run."""
        condition = self.condition
        if condition is None:
            return
        if condition.unit == "updates" and shard.version >= condition.limit:
            # Each shard takes its own count of updates: the other shards of the same push still get theirs.
            shard.finish()
            self._end(f"{condition.limit:g} updates are done")
        elif condition.unit == "examples" and (done := examples()) >= condition.limit:
            self.finish(shards, f"{done} examples are done")

    def after_seconds(self, seconds: float, shards: Iterable[Store]) -> None:
        """Ends the run where its time is over."""
        condition = self.condition
        if condition is not None and condition.unit == "seconds" and seconds >= condition.limit:
            self.finish(shards, f"{condition.limit:g} seconds are over")

    def _end(self, reason: str) -> None:
        with self._lock:
            if self.over:
                return
            self.over = True
        self._on_end(reason)


def listed(shard_ids: Iterable[int]) -> str:
    """Shard ids in words, few of many."""
    ids = sorted(shard_ids)
    if not ids:
        return "no shards"
    more = f" and {len(ids) - 8} more" if len(ids) > 8 else ""
    return f"shard{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids[:8]))}{more}"
