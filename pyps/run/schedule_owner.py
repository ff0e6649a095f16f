"""Whose learning rates are in force: the server's schedule, or those that one worker sends with its pushes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

from pyps.core.receipt import Outcome, Receipt
from pyps.run.events import Events
from pyps_wire.errors import ScheduleOwned


class ScheduleOwner:
    """At most one worker, or replica, from its first learning rate until it goes. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        # Guarded by _lock.
        self._worker_id = ""

    @property
    def worker_id(self) -> str:
        """The worker that owns the schedule; empty when none has sent a learning rate."""
        return self._worker_id

    def claim(self, worker_id: str, *, schedule: str) -> bool:
        """Lets a worker set the learning rate; True where it is the owner from now on.

        Raises ScheduleOwned where another worker does, or the server's own schedule (`schedule`, empty where it
        has none).
        """
        if schedule:
            raise ScheduleOwned(
                f"worker {worker_id!r} sent a learning rate, but this server has a schedule of its own "
                f"({schedule}): drop --schedule on the server, or the scheduler in the worker"
            )
        with self._lock:
            if self._worker_id and self._worker_id != worker_id:
                raise ScheduleOwned(
                    f"worker {worker_id!r} sent a learning rate, but worker {self._worker_id!r} owns the schedule: "
                    "let one worker change the rate (owns_schedule=True) and give the others owns_schedule=False"
                )
            claimed = not self._worker_id
            self._worker_id = worker_id
            return claimed

    def release(self, worker_id: str) -> bool:
        """Ends a worker's ownership; False where it was not the owner."""
        with self._lock:
            owned = self._worker_id == worker_id and bool(worker_id)
            if owned:
                self._worker_id = ""
            return owned

    @contextmanager
    def claiming(self, worker_ids: Sequence[str], *, schedule: str, events: Events) -> Iterator[list[Receipt]]:
        """Makes a worker that sends rates the owner, if one of the receipts then says that a gradient was taken.

        Yields the list to put the receipts into. Raises ScheduleOwned where another owns the schedule.
        """
        receipts: list[Receipt] = []
        claimed = [worker_id for worker_id in worker_ids if self.claim(worker_id, schedule=schedule)]
        try:
            yield receipts
        finally:
            for worker_id in claimed:
                if any(receipt.outcome is not Outcome.REJECTED for receipt in receipts):
                    events.add("owner", "worker owns the schedule of the learning rate", worker=worker_id)
                else:
                    self.release(worker_id)
