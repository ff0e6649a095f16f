"""Which pushes were answered already, and with what: this makes a retried push apply exactly once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from pyps.core.receipt import Outcome, Reason, Receipt

RECEIPTS_PER_LIFE = 8
LIVES_MAX = 1024
# Names of lives that were let go, for each life held.
NAMES_PER_LIFE = 4
# As CPython 3.11 has them: a receipt with the numbers in it, a life with its table and key, a name with its number.
_RECEIPT_BYTES = 350
_LIFE_BYTES = 600
_NAME_BYTES = 130


class Forgotten(Enum):
    """The ledger's answer about a push that it once may have answered and no longer remembers."""

    FORGOTTEN = "forgotten"


FORGOTTEN: Final = Forgotten.FORGOTTEN


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """What is remembered of one life (incarnation) of a worker."""

    worker_id: str
    incarnation: int
    # The largest sequence whose receipt was let go; -1 before any was.
    forgotten_sequence: int
    # By ascending sequence.
    receipts: tuple[Receipt, ...]


@dataclass(frozen=True, slots=True)
class LedgerState:
    """All that a ledger remembers, as it goes into a checkpoint."""

    # From the life heard of longest ago to the latest.
    entries: tuple[LedgerEntry, ...] = ()
    # At or below it, no incarnation of any worker is new; -1 before a name was let go.
    forgotten_incarnation: int = -1
    # By name, the largest incarnation among the lives that were let go.
    forgotten: Mapping[str, int] = field(default_factory=dict)
    lives_max: int = LIVES_MAX

    def to_json(self) -> dict[str, Any]:
        """Returns the state in plain lists, dictionaries, numbers and strings."""
        entries = [
            {
                "worker_id": entry.worker_id,
                "incarnation": entry.incarnation,
                "forgotten_sequence": entry.forgotten_sequence,
                "receipts": [_plain(receipt) for receipt in entry.receipts],
            }
            for entry in self.entries
        ]
        return {
            "entries": entries,
            "forgotten_incarnation": self.forgotten_incarnation,
            "forgotten": dict(self.forgotten),
            "lives_max": self.lives_max,
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> LedgerState:
        """Returns the state that `to_json` gave."""
        entries = tuple(
            LedgerEntry(**{**entry, "receipts": tuple(_receipt(fields) for fields in entry["receipts"])})
            for entry in plain["entries"]
        )
        # Ledgers of earlier releases kept no names.
        forgotten, lives_max = plain.get("forgotten", {}), plain.get("lives_max", LIVES_MAX)
        return cls(entries, plain["forgotten_incarnation"], dict(forgotten), lives_max)


class Ledger:
    """The latest receipts of each life of each worker, for one shard. Guarded by its shard's lock.

    It holds receipts of pushes that changed something or were decided for good: applied, pending, dropped,
    stale, repeated. Pushes that left no trace (not finite, other epoch, finished) are judged anew when they come
    again: the verdict is the same, or the push was never applied and may be.

    Memory is bounded, and what is let go is never mistaken for new, since sequences grow within a life and
    incarnations with the lives of one name. Of a life, whatever lies at or below the largest sequence let go is
    answered FORGOTTEN. Of a name, so is every life at or below the largest incarnation let go: a push that was
    ever recorded is either held, or its life lies there. Names that were let go are bounded too: the one with the
    smallest incarnation makes way, and that incarnation counts for all names from then on.

    So many short lives of some names never make another name's first push look old; only those of more names than
    the table holds can, and then only for lives that began before all of these. `lives_max` should be several
    times the workers that push at once.
    """

    def __init__(
        self,
        state: LedgerState | None = None,
        *,
        receipts_max: int = RECEIPTS_PER_LIFE,
        lives_max: int | None = None,
    ) -> None:
        """Begins with `state`; `lives_max` None takes the state's."""
        state = state or LedgerState()
        self._receipts_max = receipts_max
        self._lives_max = lives_max or state.lives_max
        # The life heard of longest ago comes first.
        self._lives: OrderedDict[tuple[str, int], _Life] = OrderedDict()
        self._forgotten: dict[str, int] = {}
        self._forgotten_incarnation = -1
        self.restore(state)

    def __len__(self) -> int:
        """Returns the number of receipts held."""
        return sum(len(life.receipts) for life in self._lives.values())

    @property
    def num_bytes(self) -> int:
        """About what it takes of the memory: to ask each of its objects would take longer than a push may wait."""
        return len(self) * _RECEIPT_BYTES + len(self._lives) * _LIFE_BYTES + len(self._forgotten) * _NAME_BYTES

    def lookup(self, worker_id: str, incarnation: int, sequence: int) -> Receipt | Forgotten | None:
        """Returns the push's receipt; None when it is new; FORGOTTEN when it may have been answered."""
        life = self._lives.get((worker_id, incarnation))
        if life is None:
            largest = max(self._forgotten.get(worker_id, -1), self._forgotten_incarnation)
            return FORGOTTEN if incarnation <= largest else None
        receipt = life.receipts.get(sequence)
        if receipt is None and sequence <= life.forgotten_sequence:
            return FORGOTTEN
        return receipt

    def record(self, worker_id: str, incarnation: int, receipt: Receipt) -> None:
        """Remembers the receipt of a push that `lookup` called new."""
        key = (worker_id, incarnation)
        life = self._lives.get(key)
        if life is None:
            life = self._lives[key] = _Life()
        self._lives.move_to_end(key)
        life.receipts[receipt.sequence] = receipt
        if len(life.receipts) > self._receipts_max:
            # Not the first recorded: pushes of one worker may overtake each other.
            life.forgotten_sequence = min(life.receipts)
            del life.receipts[life.forgotten_sequence]
        if len(self._lives) > self._lives_max:
            oldest, _ = self._lives.popitem(last=False)
            self._let_go(*oldest)

    def entries(self) -> LedgerState:
        """Returns all that is remembered."""
        entries = tuple(
            LedgerEntry(worker_id, incarnation, life.forgotten_sequence, life.sorted_receipts())
            for (worker_id, incarnation), life in self._lives.items()
        )
        return LedgerState(entries, self._forgotten_incarnation, dict(self._forgotten), self._lives_max)

    def restore(self, state: LedgerState) -> None:
        """Remembers what `entries` gave, and nothing else."""
        self._lives = OrderedDict(((entry.worker_id, entry.incarnation), _Life.of(entry)) for entry in state.entries)
        self._forgotten = dict(state.forgotten)
        self._forgotten_incarnation = state.forgotten_incarnation

    def _let_go(self, worker_id: str, incarnation: int) -> None:
        self._forgotten[worker_id] = max(incarnation, self._forgotten.get(worker_id, -1))
        if len(self._forgotten) > NAMES_PER_LIFE * self._lives_max:
            earliest = min(self._forgotten, key=self._forgotten.__getitem__)
            self._forgotten_incarnation = max(self._forgotten_incarnation, self._forgotten.pop(earliest))


class _Life:
    __slots__ = ("forgotten_sequence", "receipts")

    def __init__(self) -> None:
        self.receipts: dict[int, Receipt] = {}
        self.forgotten_sequence = -1

    @classmethod
    def of(cls, entry: LedgerEntry) -> _Life:
        life = cls()
        life.receipts = {receipt.sequence: receipt for receipt in entry.receipts}
        life.forgotten_sequence = entry.forgotten_sequence
        return life

    def sorted_receipts(self) -> tuple[Receipt, ...]:
        return tuple(self.receipts[sequence] for sequence in sorted(self.receipts))


def _plain(receipt: Receipt) -> dict[str, Any]:
    """Its fields, without those that say nothing: a checkpoint may hold millions of receipts."""
    defaults = Receipt._field_defaults
    return {name: value for name, value in receipt._asdict().items() if value != defaults.get(name)}


def _receipt(fields: Mapping[str, Any]) -> Receipt:
    kinds = {"outcome": Outcome(fields["outcome"]), "reason": Reason(fields.get("reason", Reason.UNSPECIFIED))}
    return Receipt(**{**fields, **kinds, "waiting_for": tuple(fields.get("waiting_for", ()))})
