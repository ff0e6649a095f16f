"""What waiting calls wait for, in words, for people who ask why nothing moves."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock


@dataclass(frozen=True, slots=True)
class Wait:
    """One waiting call. Both of its questions may take a shard's lock: not for the event loop."""

    # Who waits; empty for an observer.
    worker_id: str
    # What for, in words, as things stand when it is asked.
    describe: Callable[[], str]
    # The workers whose push or step would end it.
    waits_for: Callable[[], tuple[str, ...]]
    # Called from any thread when something happened that may have made the wait pointless; must be quick.
    wake: Callable[[], None]


class Waits:
    """The waits under way. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._ids = itertools.count()
        # Guarded by _lock.
        self._waits: dict[int, Wait] = {}

    @contextmanager
    def waiting(self, wait: Wait) -> Iterator[None]:
        """Shows a wait while the block runs."""
        with self._lock:
            wait_id = next(self._ids)
            self._waits[wait_id] = wait
        try:
            yield
        finally:
            with self._lock:
                del self._waits[wait_id]

    def wake_all(self) -> None:
        """Makes every waiting call look again at the run's state: it has changed."""
        for wait in self._all():
            wait.wake()

    def descriptions(self) -> list[str]:
        """The waits in words, equal ones counted."""
        counts = Counter(wait.describe() for wait in self._all())
        return [what if count == 1 else f"{what} ({count} calls)" for what, count in counts.items()]

    def waits_for(self) -> dict[str, tuple[str, ...]]:
        """Each waiting worker, and the workers that it waits for."""
        result: dict[str, tuple[str, ...]] = {}
        for wait in self._all():
            if wait.worker_id:
                result[wait.worker_id] = tuple(sorted({*result.get(wait.worker_id, ()), *wait.waits_for()}))
        return result

    def _all(self) -> list[Wait]:
        with self._lock:
            return list(self._waits.values())
