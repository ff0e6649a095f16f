"""A run's events and waiting calls, for people, and a check of whether the server was suspended."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from threading import Lock

from pyps import logs
from pyps.core.effects import Wake

# Beyond this the oldest event of the most frequent kind is dropped: memory is bounded, and rare events are kept.
EVENTS_MAX = 1000

log = logs.get("pyps.run")


@dataclass(frozen=True, slots=True)
class Event:
    """An event of the run."""

    # Counts up from 1 as long as the server runs.
    number: int
    # In seconds of the run's clock.
    time: float
    # Of workers "joined", "counts", "back", "left", "expired", "stalled", "replica" and "owner"; of the run "round",
    # "work", "coordinator", "configured", "warning", "checkpoint", "standstill", "finished" and "reset".
    kind: str
    message: str
    # The worker that it is about; empty for none.
    worker: str


class Events:
    """The newest events, oldest first. May be used from any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Called with each event.
        self.on_event: Callable[[Event], None] = lambda event: None
        self._lock = Lock()
        # Guarded by _lock.
        self._events: defaultdict[str, deque[Event]] = defaultdict(deque)
        self._number = 0

    def add(self, kind: str, what: str, *, warning: bool = False, **facts: object) -> None:
        """Keep and log an event with its facts by name."""
        facts = {name: fact for name, fact in facts.items() if fact != ""}
        words = [f"{name.replace('_', ' ')} {fact}" for name, fact in facts.items()]
        message = f"{what}: {', '.join(words)}" if words else what
        with self._lock:
            self._number += 1
            event = Event(self._number, self._clock(), kind, message, str(facts.get("worker", "")))
            self._events[kind].append(event)
            if sum(map(len, self._events.values())) > EVENTS_MAX:
                max(self._events.values(), key=len).popleft()
        self.on_event(event)
        (log.warning if warning else log.info)(what, **facts)

    def since(self, number: int) -> list[Event]:
        """Return the kept events after that number."""
        with self._lock:
            kept = [event for event in chain(*self._events.values()) if event.number > number]
        return sorted(kept, key=attrgetter("number"))

    def __iter__(self) -> Iterator[Event]:
        return iter(self.since(0))


@dataclass(frozen=True, eq=False)
class Wait:
    """One waiting call. `describe` and `waits_for` may take a shard's lock: not for the event loop."""

    # The waiting worker; empty for an observer.
    worker_id: str
    # Returns in words what the call waits for now.
    describe: Callable[[], str]
    # Returns the workers whose push or step would end the wait.
    waits_for: Callable[[], tuple[str, ...]]
    # Makes the call check again.
    wake: Wake


class Waits:
    """The calls that wait now. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        # Guarded by _lock.
        self._waits: dict[Wait, None] = {}

    @contextmanager
    def waiting(self, wait: Wait) -> Iterator[None]:
        """List a wait while the block runs."""
        with self._lock:
            self._waits[wait] = None
        try:
            yield
        finally:
            with self._lock:
                del self._waits[wait]

    def wake_all(self) -> None:
        """Make every waiting call check the run's state again."""
        for wait in self._all():
            wait.wake()

    def descriptions(self) -> list[str]:
        """Return the waits in words, with the number of equal ones."""
        counts = Counter(wait.describe() for wait in self._all())
        return [what if count == 1 else f"{what} ({count} calls)" for what, count in counts.items()]

    def waits_for(self) -> dict[str, tuple[str, ...]]:
        """Return the workers that each waiting worker waits for."""
        result: dict[str, tuple[str, ...]] = {}
        for wait in self._all():
            if wait.worker_id:
                result[wait.worker_id] = tuple(sorted({*result.get(wait.worker_id, ()), *wait.waits_for()}))
        return result

    def _all(self) -> list[Wait]:
        with self._lock:
            return list(self._waits)


# A busy machine delays a check by less.
LATE_SECONDS = 1.0


class Standstill:
    """Measures for how long the server was suspended, by checks at an interval."""

    def __init__(self, interval_seconds: float, *, clock: Callable[[], float]) -> None:
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._looked_at = clock()

    def look(self) -> float:
        """Return the seconds by which this check is late; 0 for less than LATE_SECONDS."""
        before, self._looked_at = self._looked_at, self._clock()
        late = self._looked_at - before - self._interval_seconds
        return late if late > LATE_SECONDS else 0.0
