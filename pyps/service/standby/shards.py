"""The shards of a standby: they make the updates that the events of its server's shards make."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pyps.core.behaviour import Behaviour
from pyps.core.membership import WorkerState
from pyps.core.roster import Roster
from pyps.core.shard import Shard
from pyps.run.initialization import make_shard
from pyps.run.positions import Positions
from pyps.run_header import RestoredRun, RunHeader
from pyps.service.standby.feed import roster_from
from pyps.storage.plain import push_from_plain, quick_checksum_of
from pyps.storage.shard_file import unpack


class FollowedShards:
    """A run's shards. Of one shard, one thread at a time may call `apply`."""

    def __init__(self, header: RunHeader):
        self.header = header
        self.work: Mapping[str, Any] | None = None
        # The state of each worker, by name, and how many the job has.
        self.workers: tuple[Mapping[str, str], int] = {}, 0
        self.finished = False
        self.positions = Positions()
        self._shards: dict[int, Shard] = {}
        self._rosters: dict[int, Roster] = {}
        # The pieces that have come of a shard's state, with its first event.
        self._pieces: dict[int, tuple[Mapping[str, Any], list[bytes | memoryview]]] = {}
        self._places = {place.shard_id: place for place in header.partition.of_server(header.server_index)}
        # Shards that differ from the server's, until they come again.
        self._differs = set[int]()

    @property
    def versions(self) -> list[int]:
        """The versions of the shards that are here. From any thread."""
        return [shard.version for shard in list(self._shards.values())]

    def apply(self, line: Mapping[str, Any], payload: bytes | memoryview) -> bool:
        """Apply an event; return False where the shard has just been found to differ from the server's."""
        shard_id = line["shard_id"]
        if "roster" in line:
            self._rosters[shard_id] = roster_from(line["roster"])
        if line["event"] == "shard":
            self._pieces[shard_id] = line, []
            return True
        if line["event"] == "piece":
            self._add_piece(shard_id, payload)
            return True
        try:
            is_same = self._follow(self._shards[shard_id], line, payload)
        except Exception:
            # Whatever it is, the server has done it: the shard comes again.
            is_same = False
        if is_same or shard_id in self._differs:
            # One that differs goes on meanwhile: it may have to be taken over as it is.
            return True
        self._differs.add(shard_id)
        return False

    def _add_piece(self, shard_id: int, payload: bytes | memoryview) -> None:
        about, pieces = self._pieces[shard_id]
        pieces.append(payload)
        if len(pieces) < about["pieces"]:
            return
        del self._pieces[shard_id]
        # Where it comes again, the memory of the old one is free first.
        self._shards.pop(shard_id, None)
        state, _ = unpack(b"".join(pieces))
        shard = self._shards[shard_id] = make_shard(
            *(self.header.partition, self._places[shard_id], state, self.header.optimizer),
            behaviour=Behaviour.parse(**about["behaviour"]),
            epoch=self.header.epoch,
        )
        if about["finished"]:
            shard.finish()
        self._differs.discard(shard_id)

    def _follow(self, shard: Shard, line: Mapping[str, Any], payload: bytes | memoryview) -> bool:
        roster = self._rosters.get(shard.shard_id, Roster())
        match line["event"]:
            case "push":
                gradient, receipt = push_from_plain(line, payload)
                made = shard.push(gradient, roster=roster).receipt
                return (made.outcome, made.version_after) == (receipt.outcome, receipt.version_after)
            case "complete":
                shard.complete(roster)
            case "configure":
                if line["finished"]:
                    shard.finish()
                behaviour = None if line["behaviour"] is None else Behaviour.parse(**line["behaviour"])
                shard.configure(behaviour=behaviour, learning_rate=line["learning_rate"], roster=roster)
            case "checksum" if shard.has_rows:
                # A digest of rows reads all of them.
                return bool(shard.version == line["version"])
            case "checksum":
                present = shard.read(lambda version, values: (version, quick_checksum_of(values)))
                return present == (line["version"], line["checksum"])
        return True

    def given_up(self) -> RestoredRun:
        """Return the run for a server that goes on with it, which owns the arrays then."""
        header, states = self.header, {}
        rosters = [roster.num_expected for roster in self._rosters.values()]
        for shard_id in list(self._shards):
            shard = self._shards.pop(shard_id)
            states[shard_id] = shard.given_up()
            header = dataclasses.replace(header, behaviour=shard.behaviour.texts)
        (known, expected), num_workers = self.workers, max(rosters, default=0)
        if num_workers:
            # With those that are gone, which count as some that have pushed.
            num_gone = sum(state != WorkerState.ALIVE for state in known.values())
            num_workers = min(num_workers + num_gone, max(len(known), expected))
        return RestoredRun(
            *(header, states, self.work),
            num_workers=num_workers,
            workers=self.workers,
            positions=self.positions.state(),
            is_durable=False,
        )
