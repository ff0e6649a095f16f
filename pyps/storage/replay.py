"""Reads a shard's update log, makes its updates again through the same core and kernels, and compares every one."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pyps.core import rules
from pyps.core.arrays import Floats
from pyps.core.behaviour import Behaviour
from pyps.core.gradient import Gradient
from pyps.core.ledger import Ledger, LedgerState
from pyps.core.receipt import Receipt
from pyps.core.recorder import Recorder
from pyps.core.roster import Roster
from pyps.core.shard import Shard
from pyps.core.update import Update
from pyps.run_header import RunHeader
from pyps.storage.plain import checksum_of, contribution_from_plain, push_from_plain, quick_checksum_of, update_to_plain
from pyps.storage.update_log import FORMAT, UpdateLogError, decode

# Of format 2 the first line holds the receipts too.
_FORMATS_READ = ("pyps update log 2", FORMAT)


@dataclass(frozen=True, slots=True)
class LoggedPush:
    """A gradient that came, and how it was answered."""

    # Without its payload where that was not kept.
    gradient: Gradient
    receipt: Receipt
    roster: Roster
    payload_kept: bool
    # The update that the push made: its rate and parts, and the quick checksum of the shard after it; empty for none.
    update: Mapping[str, Any]
    checksum: str


@dataclass(frozen=True, slots=True)
class Updated:
    """An update that no push brought about."""

    version: int
    # Its rate and parts.
    update: Mapping[str, Any]
    checksum: str


@dataclass(frozen=True, slots=True)
class Completed:
    """A round was completed because other workers counted; its updates follow."""

    roster: Roster


@dataclass(frozen=True, slots=True)
class Configured:
    """What was in force changed; the updates that settled what waited follow."""

    behaviour: Behaviour | None
    learning_rate: float | None
    roster: Roster
    # Whether the run had ended: then nothing is settled.
    finished: bool


@dataclass(frozen=True, slots=True)
class Pulled:
    """A worker was given the parameters of a version."""

    worker_id: str
    version: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The log ended in order, with the shard so; the checksum is a CRC-32."""

    version: int
    checksum: str


Event = LoggedPush | Updated | Completed | Configured | Pulled | Ended


class ShardLog:
    """One shard's update log on disk."""

    def __init__(self, path: Path):
        """Reads the beginning. Raises UpdateLogError when there is none, or another kind of file."""
        self.path = path
        self._payload_path = path.with_suffix(".payloads")
        begin = next(self._lines(), None)
        if begin is None or begin["event"] != "begin":
            raise UpdateLogError(f"{path} ends before the shard's beginning")
        if begin["format"] not in _FORMATS_READ:
            raise UpdateLogError(f"{path} is a {begin['format']!r}, this software reads {FORMAT!r}")
        self._begin = begin
        self.shard_id: int = begin["shard_id"]
        self.run = RunHeader.from_json(begin["run"])

    @property
    def replayable(self) -> bool:
        """Whether the first parameters were kept (--log-gradients)."""
        return self._begin["payloads"] is not None

    def shard(self, recorder: Recorder | None = None) -> Shard:
        """The shard as it was at the beginning, of a replayable log."""
        begin = self._begin
        with self._payload_path.open("rb") as file:
            payloads = [self._payload(file, place) for place in begin["payloads"]]
        num_slots = len(begin["slots"])
        parameters, *slots = (_floats(payload) for payload in payloads[: 1 + num_slots])
        waiting = payloads[1 + num_slots :][: len(begin["pending"])]
        receipts = b"".join(payloads[1 + num_slots + len(waiting) :])
        return Shard(
            self.shard_id,
            parameters,
            rule=rules.find(self.run.optimizer.rule),
            hyperparameters=begin["hyperparameters"],
            behaviour=Behaviour.parse(**begin["behaviour"]),
            epoch=self.run.epoch,
            version=begin["version"],
            slots=dict(zip(begin["slots"], slots, strict=True)),
            ledger=Ledger(LedgerState.from_plain(begin["ledger"], receipts)),
            pending=tuple(map(contribution_from_plain, begin["pending"], waiting)),
            examples=begin["examples"],
            learning_rate=begin["learning_rate"],
            recorder=recorder,
        )

    def events(self) -> Iterator[Event]:
        """Yields what happened, in order. Ends early where a killed server left half a line."""
        roster = Roster()
        lines = self._lines()
        next(lines)
        with (self._payload_path if self.replayable else Path(os.devnull)).open("rb") as payloads:
            for line in lines:
                if line["event"] == "roster":
                    roster = Roster(tuple(line["workers"]), line["missing"], tuple(line.get("coming", ())))
                else:
                    yield self._event(line, roster, payloads)

    def _event(self, line: Mapping[str, Any], roster: Roster, payloads: BinaryIO) -> Event:
        match line["event"]:
            case "push":
                place = line["payload"]
                payload = b"" if place is None else self._payload(payloads, place)
                gradient, receipt = push_from_plain(line, payload)
                update, checksum = line.get("update", {}), line.get("checksum", "")
                return LoggedPush(gradient, receipt, roster, place is not None, update, checksum)
            case "update":
                return Updated(line["version"], line["update"], line["checksum"])
            case "complete":
                return Completed(roster)
            case "configure":
                texts = line["behaviour"]
                behaviour = None if texts is None else Behaviour.parse(**texts)
                return Configured(behaviour, line["learning_rate"], roster, line["finished"])
            case "pull":
                return Pulled(line["worker_id"], line["version"])
            case "end":
                return Ended(line["version"], line["checksum"])
        raise UpdateLogError(f"{self.path} has an event {line['event']!r} that this software does not know")

    def _lines(self) -> Iterator[dict[str, Any]]:
        try:
            file = self.path.open("rb")
        except OSError as error:
            raise UpdateLogError(f"{self.path} cannot be read: {error.strerror}") from None
        with file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                plain = decode(line)
                if plain is None:
                    raise UpdateLogError(
                        f"{self.path} is damaged, or no update log: line {number} is not what was written"
                    )
                yield plain

    def _payload(self, file: BinaryIO, place: Mapping[str, Any]) -> bytes:
        file.seek(place["offset"])
        payload = file.read(place["bytes"])
        if len(payload) < place["bytes"] or quick_checksum_of(payload) != place["checksum"]:
            raise UpdateLogError(
                f"{self._payload_path} is damaged: the {place['bytes']} bytes at {place['offset']} are not what was "
                "written"
            )
        return payload


def log_paths(folder: Path) -> list[Path]:
    """The logs of shards in a folder and the folders in it, in order."""
    return sorted(folder.rglob("shard-*.jsonl"))


def _floats(payload: bytes) -> Floats:
    return np.frombuffer(payload, dtype="<f4")


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
        receipt = self._shard.push(gradient, roster=event.roster).receipt
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
