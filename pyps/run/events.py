"""What happened to a run, for people: who came and went, which round did without whom, what was changed."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
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
