"""The ledger: receipts of earlier pushes, by which a retried push is applied exactly once."""

from __future__ import annotations

import json
import struct
import zlib
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Any, Final, NamedTuple

from pyps.core.receipt import Outcome, Reason, Receipt
from pyps.core.roster import Roster

RECEIPTS_PER_LIFE = 8
LIVES_MAX = 1024
# Names of deleted lives, per life held.
NAMES_PER_LIFE = 4
# In CPython 3.11: the overhead of a receipt, of a life with its table entry, and of a name with its numbers.
_RECEIPT_BYTES = 45
_LIFE_BYTES = 370
_NAME_BYTES = 230


class Forgotten(Enum):
    """The answer of `Ledger.lookup` for a push whose receipt may have been deleted."""

    FORGOTTEN = "forgotten"


FORGOTTEN: Final = Forgotten.FORGOTTEN


class LedgerEntry(NamedTuple):
    """The receipts of one life (incarnation) of a worker."""

    worker_id: str
    incarnation: int
    # The largest sequence whose receipt was deleted; -1 for none.
    forgotten_sequence: int
    # By ascending sequence, as `packed` makes them.
    receipts: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class LedgerState:
    """A ledger's content, for a checkpoint."""

    # The life of the oldest push first.
    entries: tuple[LedgerEntry, ...] = ()
    # Up to it, no incarnation of an unknown name is new; -1 before a name was deleted.
    forgotten_incarnation: int = -1
    # By name, the largest incarnation among its deleted lives, and the largest sequence of that life.
    forgotten: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    lives_max: int = LIVES_MAX

    @classmethod
    def of_shard(cls, shard_id: int, states: Sequence[LedgerState]) -> LedgerState:
        """Return the ledger of a shard that is made of others, the newest first: a push that one has is none's again.

        Of a push that several answered, the receipt with the newest version is kept.
        """
        lives: dict[tuple[str, int], _Life] = {}
        names: dict[str, tuple[int, int]] = {}
        for state in states:
            # Lives that the newest has not are older.
            lives = {entry[:2]: _Life() for entry in state.entries if entry[:2] not in lives} | lives
            for name, latest in state.forgotten.items():
                names[name] = max(latest, names.get(name, latest))
            for worker_id, incarnation, forgotten_sequence, receipts in state.entries:
                life = lives[worker_id, incarnation]
                life.forgotten_sequence = max(life.forgotten_sequence, forgotten_sequence)
                life.receipts += [packed(unpacked(receipt)._replace(shard_id=shard_id)) for receipt in receipts]
        entries = []
        for key, life in lives.items():
            newest = {r[: _SEQUENCE.size]: r for r in sorted(life.receipts, key=lambda r: unpacked(r).version_after)}
            kept = sorted(newest.values())[-RECEIPTS_PER_LIFE:]
            if len(kept) < len(newest):
                (largest,) = _SEQUENCE.unpack_from(sorted(newest)[-RECEIPTS_PER_LIFE - 1])
                life.forgotten_sequence = max(life.forgotten_sequence, largest)
            entries.append(LedgerEntry(*key, life.forgotten_sequence, tuple(kept)))
        forgotten_incarnation = max(state.forgotten_incarnation for state in states)
        return cls(tuple(entries), forgotten_incarnation, names, max(state.lives_max for state in states))

    def to_plain(self) -> tuple[dict[str, Any], bytes]:
        """Return the state in plain lists, dictionaries, numbers and strings, and the receipts end to end."""
        plain = {
            "lives": [(*entry[:3], len(entry.receipts)) for entry in self.entries],
            "forgotten_incarnation": self.forgotten_incarnation,
            "forgotten": dict(self.forgotten),
            "lives_max": self.lives_max,
        }
        return plain, b"".join([receipt for entry in self.entries for receipt in entry.receipts])

    def to_bytes(self) -> bytes:
        """Return the state as bytes, compressed: the receipts of a worker are nearly alike."""
        plain, receipts = self.to_plain()
        return zlib.compress(json.dumps(plain).encode() + b"\n" + receipts, level=1)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> LedgerState:
        """Return the state that `to_bytes` gave; raise ValueError for other bytes."""
        try:
            text, _, receipts = zlib.decompress(data).partition(b"\n")
        except zlib.error as error:
            raise ValueError(str(error)) from None
        return cls.from_plain(json.loads(text), receipts)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], receipts: bytes) -> LedgerState:
        """Return the state that `to_plain` gave."""
        each = _split(receipts)
        entries = tuple(
            LedgerEntry(worker_id, incarnation, forgotten_sequence, tuple(islice(each, count)))
            for worker_id, incarnation, forgotten_sequence, count in plain["lives"]
        )
        names = {name: (incarnation, sequence) for name, (incarnation, sequence) in plain["forgotten"].items()}
        return cls(entries, plain["forgotten_incarnation"], names, plain["lives_max"])


class Ledger:
    """The latest receipts of each life of each worker, for one shard. Guarded by its shard's lock.

    It holds receipts of pushes on which the protocol or the policy decided. Others (not finite, other epoch, finished)
    were not applied, so a retry is decided again.

    Memory is bounded, and a push whose receipt was deleted is never mistaken for new, since sequences grow within a
    life and incarnations with the lives of one name:

    * In a life that is held, sequences up to the largest deleted one are FORGOTTEN.
    * In a deleted life, sequences up to its largest are FORGOTTEN; later ones are new, and it is held again.
    * For a name, lives before its latest deleted one are FORGOTTEN.
    * Names of deleted lives are bounded too: the name with the smallest incarnation is deleted, and up to that
      incarnation the lives of all unknown names are FORGOTTEN from then on.

    The present lives of workers on the roster are deleted last, so other names cannot make a push of an active worker
    FORGOTTEN. `lives_max` should be several times the workers that push at once.
    """

    def __init__(
        self,
        state: LedgerState | None = None,
        *,
        receipts_max: int = RECEIPTS_PER_LIFE,
        lives_max: int | None = None,
    ) -> None:
        """Begin with `state`, and its `lives_max` where none is given."""
        state = state or LedgerState()
        self._receipts_max = receipts_max
        self._lives_max = lives_max or state.lives_max
        # The life of the oldest push first.
        self._lives = OrderedDict(
            ((entry.worker_id, entry.incarnation), _Life(entry.forgotten_sequence, entry.receipts))
            for entry in state.entries
        )
        # The latest life held of each name.
        self._latest = dict(sorted(self._lives))
        self._forgotten = dict(state.forgotten)
        self._forgotten_incarnation = state.forgotten_incarnation
        # The number of receipts, and their size. Read without the shard's lock.
        self.num_receipts = sum(len(entry.receipts) for entry in state.entries)
        self._packed_bytes = sum(len(receipt) for entry in state.entries for receipt in entry.receipts)

    @property
    def num_bytes(self) -> int:
        """An estimate of its memory, from counts. Read without the shard's lock."""
        lives, names = len(self._lives) * _LIFE_BYTES, len(self._forgotten) * _NAME_BYTES
        return self._packed_bytes + self.num_receipts * _RECEIPT_BYTES + lives + names

    def lookup(self, worker_id: str, incarnation: int, sequence: int) -> Receipt | Forgotten | None:
        """Return the push's receipt; None when it is new; FORGOTTEN when it may have been answered."""
        life = self._lives.get((worker_id, incarnation))
        if life is None:
            latest, largest = self._forgotten.get(worker_id, (-1, -1))
            if incarnation == latest:
                return FORGOTTEN if sequence <= largest else None
            return FORGOTTEN if incarnation <= max(latest, self._forgotten_incarnation) else None
        key = _SEQUENCE.pack(sequence)
        place = bisect_left(life.receipts, key)
        if place < len(life.receipts) and life.receipts[place].startswith(key):
            return unpacked(life.receipts[place])
        return FORGOTTEN if sequence <= life.forgotten_sequence else None

    def workers_since(self, version: int) -> set[str]:
        """Return the workers whose newest push came at that version of the shard or later."""
        lives = self._lives.items()
        return {
            name for (name, _), life in lives if life.receipts and unpacked(life.receipts[-1]).version_before >= version
        }

    def record(self, worker_id: str, incarnation: int, receipt: Receipt, *, roster: Roster) -> None:
        """Remember the receipt of a push that `lookup` called new; the lives of workers on the roster are kept."""
        key, data = (worker_id, incarnation), packed(receipt)
        life = self._lives.get(key)
        if life is None:
            life = self._lives[key] = self._begin(worker_id, incarnation)
        self._lives.move_to_end(key)
        insort(life.receipts, data)
        self.num_receipts += 1
        self._packed_bytes += len(data)
        if len(life.receipts) > self._receipts_max:
            # Not the first recorded: pushes of one worker may overtake each other.
            first = life.receipts.pop(0)
            (life.forgotten_sequence,) = _SEQUENCE.unpack_from(first)
            self.num_receipts -= 1
            self._packed_bytes -= len(first)
        if len(self._lives) > self._lives_max:
            self._delete_one(roster)

    def newest_sequence(self, worker_id: str, incarnation: int) -> int:
        """Return the largest sequence of a life's receipts; -1 where none was answered."""
        if (life := self._lives.get((worker_id, incarnation))) is not None:
            return int(_SEQUENCE.unpack_from(life.receipts[-1])[0]) if life.receipts else -1
        latest, largest = self._forgotten.get(worker_id, (-1, -1))
        return largest if latest == incarnation else -1

    def entries(self) -> LedgerState:
        entries = tuple(
            LedgerEntry(*key, life.forgotten_sequence, tuple(life.receipts)) for key, life in self._lives.items()
        )
        return LedgerState(entries, self._forgotten_incarnation, dict(self._forgotten), self._lives_max)

    def _begin(self, worker_id: str, incarnation: int) -> _Life:
        """Return a record for a life that is new or was deleted."""
        self._latest[worker_id] = max(incarnation, self._latest.get(worker_id, -1))
        latest, largest = self._forgotten.get(worker_id, (-1, -1))
        return _Life(largest if latest == incarnation else -1)

    def _delete_one(self, roster: Roster) -> None:
        """Delete the life of the oldest push, present lives of workers on the roster last."""
        for _ in range(len(self._lives)):
            (worker_id, incarnation), life = self._lives.popitem(last=False)
            if self._latest.get(worker_id) != incarnation or not roster.is_active(worker_id):
                break
            # To the end, behind all others.
            self._lives[worker_id, incarnation] = life
        else:
            (worker_id, incarnation), life = self._lives.popitem(last=False)
        self.num_receipts -= len(life.receipts)
        self._packed_bytes -= sum(map(len, life.receipts))
        if self._latest.get(worker_id) == incarnation:
            del self._latest[worker_id]
        largest = _SEQUENCE.unpack_from(life.receipts[-1])[0]
        self._forgotten[worker_id] = max((incarnation, largest), self._forgotten.get(worker_id, (-1, -1)))
        if len(self._forgotten) > NAMES_PER_LIFE * self._lives_max:
            earliest = min(self._forgotten, key=self._forgotten.__getitem__)
            self._forgotten_incarnation = max(self._forgotten_incarnation, self._forgotten.pop(earliest)[0])


class _Life:
    __slots__ = ("forgotten_sequence", "receipts")

    def __init__(self, forgotten_sequence: int = -1, receipts: Iterable[bytes] = ()) -> None:
        self.forgotten_sequence = forgotten_sequence
        self.receipts = list(receipts)


_SEQUENCE = struct.Struct(">Q")
# The sequence first, big-endian, so that receipts sort by it as bytes. Then the other fields in order, version_after as
# its difference from version_before, and the number of bytes of text that follow.
_FIXED = struct.Struct(">QIBqBBqdddIQqI")


def packed(receipt: Receipt) -> bytes:
    """Return a receipt as bytes: a ledger holds up to eight for each worker."""
    shard_id, sequence, outcome, before, after, reason, message, _, *numbers, waiting_for = receipt
    # No name and no message holds a zero: all are printable.
    text = "\0".join((message, *waiting_for)).encode()
    return _FIXED.pack(sequence, shard_id, outcome, before, after - before, reason, *numbers, len(text)) + text


def unpacked(data: bytes) -> Receipt:
    sequence, shard_id, outcome, before, updates, reason, *numbers, _ = _FIXED.unpack_from(data)
    message, *waiting_for = data[_FIXED.size :].decode().split("\0")
    fields = (shard_id, sequence, Outcome(outcome), before, before + updates, Reason(reason), message, False)
    return Receipt._make((*fields, *numbers, tuple(waiting_for)))


def _split(receipts: bytes) -> Iterator[bytes]:
    """Yield the receipts of concatenated bytes."""
    start = 0
    while start < len(receipts):
        end = start + _FIXED.size + _FIXED.unpack_from(receipts, start)[-1]
        yield receipts[start:end]
        start = end
