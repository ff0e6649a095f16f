"""Makes the updates of a log again, through the same core and kernels, and compares every one."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyps.checksum import checksum_of, quick_checksum_of
from pyps.core.arrays import Floats
from pyps.core.behaviour import Behaviour
from pyps.core.gradient import Gradient
from pyps.core.receipt import Receipt
from pyps.core.roster import Roster
from pyps.core.shard import Shard
from pyps.core.update import Update
from pyps.plain import update_to_plain
from pyps.update_log.lines import UpdateLogError
from pyps.update_log.reader import Completed, Configured, Ended, Event, LoggedPush, Pulled, ShardLog, Updated


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came out of a replay."""

    path: Path
    run_id: str
    epoch: int
    shard_id: int
    # Where the replay ended.
    version: int
    updates: int
    pulls: int
    checksum: str
    # Whether the log ended in order; a killed server's did not.
    ended: bool
    # Whether the replay ended early, at the first gradient that was not kept.
    cut_short: bool
    # The first update or answer that came out otherwise, in words, with both numbers; empty where none did.
    difference: str


class Different(Exception):
    """Something came out otherwise than logged; the text says what."""


def replay(path: Path) -> Replayed:
    """Replays a shard's log up to its end, the first difference or the first gradient that was not kept.

    Raises UpdateLogError when the log cannot be read, or no gradients were kept at all.
    """
    log = ShardLog(path)
    if not log.replayable:
        raise UpdateLogError(
            f"{path} holds no gradients: a server keeps them with --log-gradients, as far as "
            "--log-gradients-max-bytes allows"
        )
    replaying = _Replay(log)
    difference = ""
    try:
        for event in log.events():
            if isinstance(event, LoggedPush) and not event.payload_kept:
                replaying.cut_short = True
                break
            replaying.follow(event)
    except Different as error:
        difference = str(error)
    return replaying.result(difference)


class _Replay:
    """A shard on which a log happens again."""

    def __init__(self, log: ShardLog):
        self._log = log
        self._made = _Made()
        self._shard: Shard = log.shard(self._made)
        self._updates = self._pulls = 0
        self._ended = self.cut_short = False

    def follow(self, event: Event) -> None:
        """Does what the event says; raises Different when it comes out otherwise."""
        match event:
            case LoggedPush():
                self._push(event)
            case Updated():
                self._compare_update(event.version, event.update, event.checksum, "")
            case Completed():
                self._require_no_more()
                self._shard.complete(event.roster)
            case Configured():
                self._require_no_more()
                if event.finished:
                    self._shard.finish()
                self._shard.configure(behaviour=event.behaviour, learning_rate=event.learning_rate, roster=event.roster)
            case Pulled():
                self._pulls += 1
            case Ended():
                self._end(event)

    def result(self, difference: str) -> Replayed:
        """How it came out."""
        return Replayed(
            path=self._log.path,
            run_id=self._log.run.run_id,
            epoch=self._log.run.epoch,
            shard_id=self._log.shard_id,
            version=self._shard.version,
            updates=self._updates,
            pulls=self._pulls,
            checksum=self._shard.read(lambda _, values: checksum_of(values)),
            ended=self._ended,
            cut_short=self.cut_short,
            difference=difference,
        )

    def _push(self, event: LoggedPush) -> None:
        self._require_no_more()
        gradient, logged = event.gradient, event.receipt
        push = f"push {gradient.sequence} of worker {gradient.worker_id!r}"
        receipt = self._shard.push(gradient, roster=event.roster)
        for name in _COMPARED:
            mine, theirs = getattr(receipt, name), getattr(logged, name)
            if mine != theirs:
                what = f"update {logged.version_after}, by {push}" if event.checksum else f"the answer to {push}"
                raise Different(f"{what}: {name} is logged as {_number(theirs)}, replayed it is {_number(mine)}")
        if event.checksum:
            self._compare_update(logged.version_after, event.update, event.checksum, f", by {push}")

    def _compare_update(self, version: int, update: Mapping[str, Any], checksum: str, by: str) -> None:
        if not self._made.updates:
            raise Different(f"update {version}{by}: it is logged, but the replay makes none")
        made_version, made_update, made_checksum = self._made.updates.popleft()
        for name, made in made_update.items():
            if update[name] != made:
                raise Different(
                    f"update {version}{by}: {name} is logged as {_number(update[name])}, replayed it is {_number(made)}"
                )
        if (made_version, made_checksum) != (version, checksum):
            raise Different(
                f"update {version}{by}: the shard's checksum is logged as {checksum}, replayed it is {made_checksum} "
                f"at version {made_version}"
            )
        self._updates += 1

    def _require_no_more(self) -> None:
        if self._made.updates:
            version, _, checksum = self._made.updates.popleft()
            raise Different(f"update {version}: the replay makes it (checksum {checksum}), but it is not logged")

    def _end(self, event: Ended) -> None:
        self._require_no_more()
        version, checksum = self._shard.read(lambda version, values: (version, checksum_of(values)))
        if (version, checksum) != (event.version, event.checksum):
            raise Different(
                f"the end: version {event.version} with CRC-32 {event.checksum} is logged, replayed it is version "
                f"{version} with {checksum}"
            )
        self._ended = True


_COMPARED = Receipt._fields


@dataclass
class _Made:
    """A recorder that keeps the updates that a shard makes, and nothing else."""

    # The version, rate and parts, and checksum of each.
    updates: deque[tuple[int, dict[str, Any], str]] = field(default_factory=deque)

    def updated(self, shard_id: int, update: Update, parameters: Floats) -> None:
        self.updates.append((update.version, update_to_plain(update), quick_checksum_of(parameters)))

    def pushed(self, shard_id: int, gradient: Gradient, receipt: Receipt, roster: Roster) -> None:
        """Is compared by its receipt."""

    def completed(self, shard_id: int, roster: Roster, version: int) -> None:
        """Shows in the updates that follow."""

    def configured(
        self,
        shard_id: int,
        behaviour: Behaviour | None,
        learning_rate: float | None,
        roster: Roster,
        version: int,
    ) -> None:
        """Shows in the updates that follow."""

    def pulled(self, shard_id: int, worker_id: str, version: int) -> None:
        """Changes nothing."""


def _number(value: object) -> str:
    return repr(value) if not isinstance(value, float) else f"{value:.17g}"
