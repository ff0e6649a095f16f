"""What waiting calls wait for, in words, for people who ask why nothing moves."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock


class Waits:
    """The waits under way. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._ids = itertools.count()
        # Guarded by _lock.
        self._waits: dict[int, tuple[str, Callable[[], None]]] = {}

    @contextmanager
    def waiting(self, what: str, wake: Callable[[], None]) -> Iterator[None]:
        """Shows a wait while the block runs; `wake` is called, from any thread, when it became pointless."""
        with self._lock:
            wait_id = next(self._ids)
            self._waits[wait_id] = (what, wake)
        try:
            yield
        finally:
            with self._lock:
                del self._waits[wait_id]

    def wake_all(self) -> None:
        """Makes every waiting call look again at the run's state: it has changed."""
        with self._lock:
            wakes = [wake for _, wake in self._waits.values()]
        for wake in wakes:
            wake()

    def descriptions(self) -> list[str]:
        """The waits in words, equal ones counted."""
        with self._lock:
            counts = Counter(what for what, _ in self._waits.values())
        return [what if count == 1 else f"{what} ({count} calls)" for what, count in counts.items()]
