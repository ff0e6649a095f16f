"""What an event asks of whoever keeps the run. The core decides; carrying it out is the owner's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple


class Told(NamedTuple):
    """Something that happened, for people: what, and its facts by name."""

    kind: str
    what: str
    facts: Mapping[str, object]
    warning: bool = False


class Effects(NamedTuple):
    """What is to be done about an event, in any order."""

    told: tuple[Told, ...] = ()
    # Workers whose portions of the data go back, and whether each was lost rather than left by itself.
    gone: tuple[tuple[str, bool], ...] = ()
    # Whom nobody waits for any more, by the names that the run has for them; rounds may be complete without them.
    departed: tuple[str, ...] = ()
    # Calls that ask again for their step now.
    wakes: tuple[Callable[[], None], ...] = ()
    # Workers that nobody waits for until they ask for their next step.
    set_aside: tuple[str, ...] = ()
    # Whether no expected worker is waited for any longer, before a first step neither.
    opens_gate: bool = False

    def and_then(self, other: Effects) -> Effects:
        """Returns both, one after the other."""
        return Effects(
            self.told + other.told,
            self.gone + other.gone,
            self.departed + other.departed,
            self.wakes + other.wakes,
            self.set_aside + other.set_aside,
            self.opens_gate or other.opens_gate,
        )


NONE = Effects()


def tell(kind: str, what: str, *, warning: bool = False, **facts: object) -> Effects:
    """Returns what only people are to hear of."""
    return Effects((Told(kind, what, facts, warning),))
