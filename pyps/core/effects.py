"""Effects of an event, which the core returns and the run carries out, and waiting calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Generic, NamedTuple, TypeVar

# Makes a waiting call check again. Called without any lock, from any thread; it must be quick and must not raise.
Wake = Callable[[], None]

Key = TypeVar("Key", bound=Hashable)


class Notice(NamedTuple):
    """An event for people to read, with its facts by name."""

    kind: str
    what: str
    facts: Mapping[str, object]
    warning: bool = False


class Effects(NamedTuple):
    """What an event requires, in any order."""

    notices: tuple[Notice, ...] = ()
    # Workers whose portions of the data return to the queue; True for a worker that was lost rather than left.
    gone: tuple[tuple[str, bool], ...] = ()
    # Names of workers that are out: rounds may be complete without them.
    departed: tuple[str, ...] = ()
    # Calls that may request their step again.
    wakes: tuple[Wake, ...] = ()
    # Workers that others do not wait for until these request their next step.
    set_aside: tuple[str, ...] = ()
    # Whether first steps no longer wait for expected workers.
    opens_gate: bool = False

    def and_then(self, other: Effects) -> Effects:
        """Return these effects and others as one."""
        return Effects(
            self.notices + other.notices,
            self.gone + other.gone,
            self.departed + other.departed,
            self.wakes + other.wakes,
            self.set_aside + other.set_aside,
            self.opens_gate or other.opens_gate,
        )


NONE = Effects()


def notify(kind: str, what: str, *, warning: bool = False, **facts: object) -> Effects:
    return Effects((Notice(kind, what, facts, warning),))


class ParkedCalls(Generic[Key]):
    """Waiting calls, by what each waits for. Guarded by its owner, which wakes the calls after it unlocks."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls: dict[Key, dict[Wake, None]] = {}

    def park(self, key: Key, wake: Wake) -> None:
        """Add a call; a second time changes nothing."""
        self.calls.setdefault(key, {})[wake] = None

    def forget(self, key: Key, wake: Wake) -> bool:
        """Remove a call; return False if it is not there."""
        waiting = self.calls.get(key, {})
        if wake not in waiting:
            return False
        del waiting[wake]
        if not waiting:
            del self.calls[key]
        return True

    def take(self, keys: Iterable[Key]) -> list[Wake]:
        """Remove and return the calls that wait for one of these keys."""
        return [wake for key in keys for wake in self.calls.pop(key, ())]

    def take_all(self) -> list[Wake]:
        return self.take(list(self.calls))


def wake_all(calls: Iterable[Wake]) -> None:
    """Wake the calls. The caller holds no lock."""
    for wake in calls:
        wake()
