"""Replay of a shard's update log: the same core and kernels make every update again, and each is compared."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from pyps.core import rules
from pyps.core.behaviour import Behaviour
from pyps.core.gradient import PayloadKind
from pyps.core.ledger import Ledger, LedgerState
from pyps.core.receipt import Receipt
from pyps.core.recorder import Completed, Configured, Event, Pulled, Pushed, Recorder, Updated
from pyps.core.roster import Roster
from pyps.core.shard import Shard
from pyps.core.store import Rows
from pyps.core.table import make_table
from pyps.run_header import RunHeader
from pyps.storage.plain import checksum_of, contribution_from_plain, push_from_plain, quick_checksum_of
from pyps.storage.update_log import FORMAT, LoggedUpdate, UpdateLogError, decode

# Of a log's lines, at a time.
READ_BYTES = 2**16


class NotKept(NamedTuple):
    """The later gradients were not kept."""


class Ended(NamedTuple):
    """The log ended in order, with this version and CRC-32 of the shard."""

    version: int
    checksum: str


LoggedEvent = Pushed | LoggedUpdate | Completed | Configured | Pulled | NotKept | Ended


class ShardLog:
    """One shard's update log on disk."""

    def __init__(self, path: Path):
        """Read the beginning. Raises UpdateLogError when there is none, or another kind of file."""
        self.path = path
        self._payload_path = path.with_suffix(".payloads")
        begin = next(lines_in(path), None)
        if begin is None or begin["event"] != "begin":
            raise UpdateLogError(f"{path} ends before the shard's beginning")
        if begin["format"] != FORMAT:
            raise UpdateLogError(f"{path} is a {begin['format']!r}, this software reads {FORMAT!r}")
        self._begin = begin
        self.shard_id: int = begin["shard_id"]
        self.run = RunHeader.from_json(begin["run"])

    @property
    def replayable(self) -> bool:
        """True if the first parameters were kept (--log-gradients)."""
        return self._begin["payloads"] is not None

    def require_gradients(self) -> None:
        if not self.replayable:
            raise UpdateLogError(
                f"{self.path} holds no gradients: a server keeps them with --log-gradients, as far as "
                "--log-gradients-max-bytes allows"
            )

    @property
    def num_parameters(self) -> int:
        """The shard's, in a replayable log."""
        return int(self._begin["payloads"][0]["bytes"]) // 4

    def shard(self, recorder: Recorder | None = None) -> Shard:
        """Return the shard as it was at the beginning of a replayable log."""
        begin = self._begin
        with self._payload_path.open("rb") as file:
            payloads = [self._payload(file, place) for place in begin["payloads"]]
        num_slots, kinds = len(begin["slots"]), begin.get("rows") or {}
        parameters, *slots = (np.frombuffer(payload, "<f4") for payload in payloads[: 1 + num_slots])
        of_rows = payloads[1 + num_slots :][: len(kinds)]
        waiting = payloads[1 + num_slots + len(kinds) :][: len(begin["pending"])]
        common: dict[str, Any] = {
            "behaviour": Behaviour.parse(**begin["behaviour"]),
            "epoch": self.run.epoch,
            "version": begin["version"],
            "ledger": Ledger(LedgerState.from_plain(begin["ledger"], payloads[-1])),
            "pending": tuple(map(contribution_from_plain, begin["pending"], waiting)),
            "examples": begin["examples"],
            "learning_rate": begin["learning_rate"],
            "recorder": recorder,
        }
        if kinds:
            rows = {name: np.frombuffer(payload, kinds[name]) for name, payload in zip(kinds, of_rows, strict=True)}
            place = self.run.partition.shard(self.shard_id)
            table = self.run.model.tables[place.group]
            common |= {"rows": Rows(**rows), "offset": place.offset}
            return make_table(self.shard_id, table.name, table.shape, table.table, **common)
        return Shard(
            self.shard_id,
            parameters,
            rule=rules.find(self.run.optimizer.rule),
            hyperparameters=begin["hyperparameters"],
            kind=PayloadKind(begin["kind"]),
            slots=dict(zip(begin["slots"], slots, strict=True)),
            **common,
        )

    def events(self) -> Iterator[LoggedEvent]:
        """Yield the events in order. Ends early at a gradient not kept, or half a line of a killed server."""
        roster = Roster()
        lines = lines_in(self.path)
        next(lines)
        with (self._payload_path if self.replayable else Path(os.devnull)).open("rb") as payloads:
            for line in lines:
                match line["event"]:
                    case "roster":
                        roster = Roster(tuple(line["workers"]), line["missing"], tuple(line.get("coming", ())))
                    case "push" if line["payload"] is None:
                        yield NotKept()
                        return
                    case "push":
                        gradient, receipt = push_from_plain(line, self._payload(payloads, line["payload"]))
                        yield Pushed(self.shard_id, gradient, receipt, roster)
                        if "update" in line:
                            yield LoggedUpdate(receipt.version_after, line["update"], line["checksum"])
                    case "update":
                        yield LoggedUpdate(line["version"], line["update"], line["checksum"])
                    case "complete":
                        yield Completed(self.shard_id, roster, line["version"])
                    case "configure":
                        behaviour = None if line["behaviour"] is None else Behaviour.parse(**line["behaviour"])
                        yield Configured(
                            *(self.shard_id, behaviour, line["learning_rate"], roster),
                            *(line["version"], line["finished"]),
                        )
                    case "pull":
                        yield Pulled(self.shard_id, line["worker_id"], line["version"])
                    case "end":
                        yield Ended(line["version"], line["checksum"])
                    case other:
                        raise UpdateLogError(f"{self.path} has an event {other!r} that this software does not know")

    def _payload(self, file: BinaryIO, place: Mapping[str, Any]) -> bytes:
        file.seek(place["offset"])
        payload = file.read(place["bytes"])
        if len(payload) < place["bytes"] or quick_checksum_of(payload) != place["checksum"]:
            raise UpdateLogError(
                f"{self._payload_path} is damaged: the {place['bytes']} bytes at {place['offset']} are not what was "
                "written"
            )
        return payload


def lines_in(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a log, except the last where it is not whole. Raises UpdateLogError."""
    number = place = 0
    while True:
        try:
            # Not held open: a run may have more shards than a process may have files.
            with path.open("rb") as file:
                file.seek(place)
                lines = file.readlines(READ_BYTES)
        except OSError as error:
            raise UpdateLogError(f"{path} cannot be read: {error.strerror}") from None
        for line in lines:
            number += 1
            if not line.endswith(b"\n"):
                return
            plain = decode(line)
            if plain is None:
                raise UpdateLogError(f"{path} is damaged, or no update log: line {number} is not what was written")
            yield plain
        if not lines:
            return
        place += sum(map(len, lines))


def log_paths(folder: Path) -> list[Path]:
    """Return the logs of shards in a folder and its folders, in order."""
    return sorted(folder.rglob("shard-*.jsonl"))


class Different(Exception):
    """Something differs from the log; the text says what."""


def replay(path: Path) -> Replayed:
    """Replay a shard's log up to its end, the first difference or the first gradient that was not kept.

    Raises UpdateLogError when the log cannot be read, or no gradients were kept at all.
    """
    log = ShardLog(path)
    log.require_gradients()
    replayed = Replayed(log)
    try:
        for event in log.events():
            replayed.follow(event)
    except Different as error:
        replayed.difference = str(error)
    return replayed


class Replayed:
    """A shard that follows its log, and the result of that."""

    def __init__(self, log: ShardLog):
        self.run = log.run
        self.shard_id = log.shard_id
        # How many were followed.
        self.updates = self.pulls = 0
        # Whether the log ended in order; a killed server's did not.
        self.ended = False
        # Whether the replay ended early, at the first gradient that was not kept.
        self.cut_short = False
        # The first update or answer that differs, in words, with both numbers; empty where none does.
        self.difference = ""
        # Updates that the shard has made, before the log's line of them is read.
        self._made: deque[LoggedUpdate] = deque()
        self._shard: Shard = log.shard(self)
        # In words, the push that the next update comes from.
        self._cause = ""

    @property
    def version(self) -> int:
        """The version at which the replay ended."""
        return self._shard.version

    @property
    def checksum(self) -> str:
        """The CRC-32 of the parameters there."""
        return self._shard.read(lambda _, values: checksum_of(values))

    def record(self, event: Event) -> None:
        """Keep the updates that the shard makes, in which all else shows."""
        if isinstance(event, Updated):
            self._made.append(LoggedUpdate.of(event))

    def write(self, shard_id: int) -> None:
        """Nothing: the updates are compared, not written."""

    def follow(self, event: LoggedEvent) -> None:
        """Apply an event to the shard; raise Different where the result is not the logged one."""
        if isinstance(event, LoggedUpdate):
            self._compare(event)
            return
        if self._made:
            made = self._made.popleft()
            raise Different(
                f"update {made.version}: the replay makes it (checksum {made.checksum}), but it is not logged"
            )
        match event:
            case Pushed():
                self._push(event)
            case Completed():
                self._shard.complete(event.roster)
            case Configured():
                if event.finished:
                    self._shard.finish()
                self._shard.configure(behaviour=event.behaviour, learning_rate=event.learning_rate, roster=event.roster)
            case Pulled():
                self.pulls += 1
            case NotKept():
                self.cut_short = True
            case Ended(version, checksum):
                if (self.version, self.checksum) != (version, checksum):
                    raise Different(
                        f"the end: version {version} with CRC-32 {checksum} is logged, replayed it is version "
                        f"{self.version} with {self.checksum}"
                    )
                self.ended = True

    def _push(self, event: Pushed) -> None:
        gradient, logged = event.gradient, event.receipt
        push = f"push {gradient.sequence} of worker {gradient.worker_id!r}"
        if logged.version_after > logged.version_before:
            self._cause = f", by {push}"
        receipt = self._shard.push(gradient, roster=event.roster).receipt
        for name, mine, theirs in zip(Receipt._fields, receipt, logged, strict=True):
            if mine != theirs:
                what = f"update {logged.version_after}{self._cause}" if self._cause else f"the answer to {push}"
                raise Different(f"{what}: {name} is logged as {_number(theirs)}, replayed it is {_number(mine)}")

    def _compare(self, logged: LoggedUpdate) -> None:
        what, self._cause = f"update {logged.version}{self._cause}", ""
        if not self._made:
            raise Different(f"{what}: it is logged, but the replay makes none")
        made = self._made.popleft()
        for name, mine in made.update.items():
            theirs = logged.update[name]
            if mine != theirs:
                raise Different(f"{what}: {name} is logged as {_number(theirs)}, replayed it is {_number(mine)}")
        if (made.version, made.checksum) != (logged.version, logged.checksum):
            raise Different(
                f"{what}: the shard's checksum is logged as {logged.checksum}, replayed it is {made.checksum} "
                f"at version {made.version}"
            )
        self.updates += 1


def _number(value: object) -> str:
    return repr(value) if not isinstance(value, float) else f"{value:.17g}"
