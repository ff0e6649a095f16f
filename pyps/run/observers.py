"""What people are told of a run: what happened to it, and what waiting calls wait for."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from threading import Lock

from pyps import logs

# Beyond this the oldest of the most frequent kind is forgotten: a long run does not fill the memory, and workers that
# come and go all the time push nothing out that happens once.
EVENTS_MAX = 1000

log = logs.get("pyps.run")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to the run. `time` is in seconds of the run's clock."""

    # Counts up from 1 as long as the server runs.
    number: int
    time: float
    # "joined", "left", "expired", "back", "stalled", "round", "configured", "owner", "ready", "finished",
    # "replica".
    kind: str
    message: str
    # Whom it is about; empty where that is no worker.
    worker: str


class Events:
    """The newest events, oldest first. May be used from any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = Lock()
        # Guarded by _lock.
        self._events: defaultdict[str, deque[Event]] = defaultdict(deque)
        self._number = 0

    def add(self, kind: str, what: str, *, warning: bool = False, **facts: object) -> None:
        """Notes what happened just now, with its facts by name, and logs it."""
        facts = {name: fact for name, fact in facts.items() if fact != ""}
        words = [f"{name.replace('_', ' ')} {fact}" for name, fact in facts.items()]
        message = f"{what}: {', '.join(words)}" if words else what
        with self._lock:
            self._number += 1
            event = Event(self._number, self._clock(), kind, message, str(facts.get("worker", "")))
            self._events[kind].append(event)
            if sum(map(len, self._events.values())) > EVENTS_MAX:
                max(self._events.values(), key=len).popleft()
        (log.warning if warning else log.info)(what, **facts)

    def since(self, number: int) -> list[Event]:
        """The events after that number, as far as they are kept."""
        with self._lock:
            kept = [event for event in chain(*self._events.values()) if event.number > number]
        return sorted(kept, key=attrgetter("number"))

    def __iter__(self) -> Iterator[Event]:
        return iter(self.since(0))


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


# A busy machine delays a look by less.
LATE_SECONDS = 1.0


class Standstill:
    """Tells by looks at a clock, which are due at an interval, for how long nobody could be heard."""

    def __init__(self, interval_seconds: float, *, clock: Callable[[], float]) -> None:
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._looked_at = clock()

    def look(self) -> float:
        """The seconds by which this look comes too late; 0 where that is little."""
        before, self._looked_at = self._looked_at, self._clock()
        late = self._looked_at - before - self._interval_seconds
        return late if late > LATE_SECONDS else 0.0
