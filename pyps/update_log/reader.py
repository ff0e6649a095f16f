"""Reads one shard's update log: how the shard began, and what happened to it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pyps.checkpoint import RunHeader
from pyps.checksum import quick_checksum_of
from pyps.core import update_rules
from pyps.core.arrays import Floats
from pyps.core.behaviour import Behaviour
from pyps.core.gradient import Gradient
from pyps.core.ledger import Ledger, LedgerState
from pyps.core.receipt import Receipt
from pyps.core.recorder import Recorder
from pyps.core.roster import Roster
from pyps.core.shard import Shard
from pyps.plain import contribution_from_plain, push_from_plain
from pyps.update_log.lines import FORMAT, UpdateLogError, decode


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
        if begin["format"] != FORMAT:
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
        waiting = zip(begin["pending"], payloads[1 + num_slots :], strict=True)
        return Shard(
            self.shard_id,
            parameters,
            rule=update_rules.find(self.run.optimizer.rule),
            hyperparameters=begin["hyperparameters"],
            behaviour=Behaviour.parse(**begin["behaviour"]),
            epoch=self.run.epoch,
            version=begin["version"],
            slots=dict(zip(begin["slots"], slots, strict=True)),
            ledger=Ledger(LedgerState.from_json(begin["ledger"])),
            pending=tuple(contribution_from_plain(plain, payload) for plain, payload in waiting),
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
