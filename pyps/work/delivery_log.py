"""Who delivered which portion: what shows that each example of a pass counted once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pyps.work.answers import Delivered
from pyps.work.portions import Portion

# The present pass and those before it.
PASSES_REMEMBERED = 8
# Where portions are many, the oldest are forgotten before that: so many fit into one message.
DELIVERIES_REMEMBERED = 50_000


class DeliveryLog:
    """The deliveries of the newest passes, in order, by lease. Guarded by its queue's lock."""

    def __init__(self) -> None:
        self._by_lease: dict[int, Delivered] = {}

    def __iter__(self) -> Iterator[Delivered]:
        return iter(self._by_lease.values())

    def get(self, lease_id: int) -> Delivered | None:
        """The delivery under that lease, as far as it is remembered."""
        return self._by_lease.get(lease_id)

    def add(self, delivered: Delivered) -> None:
        """Notes a delivery."""
        self._by_lease[delivered.portion.lease_id] = delivered
        if len(self._by_lease) > DELIVERIES_REMEMBERED:
            del self._by_lease[next(iter(self._by_lease))]

    def begin_pass(self, pass_: int) -> None:
        """Forgets passes that are long over."""
        oldest = pass_ - PASSES_REMEMBERED + 1
        self._by_lease = {lease: done for lease, done in self._by_lease.items() if done.pass_ >= oldest}

    def to_json(self) -> dict[str, Any]:
        """The log as plain values: names once, a short list for each delivery."""
        workers = sorted({done.worker_id for done in self})
        index = {worker_id: place for place, worker_id in enumerate(workers)}
        rows = [
            [
                done.pass_,
                *(done.portion.portion_id, done.portion.start, done.portion.stop, done.portion.lease_id),
                *(index[done.worker_id], done.incarnation),
            ]
            for done in self
        ]
        return {"workers": workers, "rows": rows}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> DeliveryLog:
        """The log of plain values."""
        log = cls()
        for pass_, portion_id, start, stop, lease_id, place, incarnation in plain["rows"]:
            portion = Portion(portion_id, start, stop, lease_id)
            log.add(Delivered(pass_, portion, plain["workers"][place], incarnation))
        return log
