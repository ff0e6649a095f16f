"""Keeps forked children from using their parent's connections, which would hang or crash."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from pyps_wire.errors import ForkedClient

# Grows in each forked child, so that objects know if they were made before the fork.
generation = 0

# Whether a connection was made.
_guarded = False

# gRPC's objects of open connections. A forked child must not free them: that needs threads which only the parent has.
kept_alive: set[object] = set()


def at_fork(*, before: Callable[[], object] | None = None, after_in_child: Callable[[], object] | None = None) -> None:
    """Call these around each fork of this process, if the system can fork."""
    if hasattr(os, "register_at_fork"):
        hooks = {"before": before, "after_in_child": after_in_child}
        os.register_at_fork(**{name: hook for name, hook in hooks.items() if hook is not None})


def tracked(
    *, before: Callable[[Any], object] = lambda each: None, after_in_child: Callable[[Any], object]
) -> weakref.WeakSet[Any]:
    """Return a set, for each of whose objects these are called around each fork."""
    objects: weakref.WeakSet[Any] = weakref.WeakSet()

    def on_each(hook: Callable[[Any], object]) -> None:
        for each in list(objects):
            hook(each)

    at_fork(before=partial(on_each, before), after_in_child=partial(on_each, after_in_child))
    return objects


def _begin_child() -> None:
    global generation
    generation += 1
    if _guarded:
        # Nor may the child's garbage collector free connections that the parent no longer uses.
        gc.freeze()


at_fork(after_in_child=_begin_child)


class ForkGuard:
    """Knows the process that made it."""

    def __init__(self) -> None:
        global _guarded
        _guarded = True
        self.generation = generation

    @property
    def in_child(self) -> bool:
        return self.generation != generation

    def check(self) -> None:
        if self.generation != generation:
            raise ForkedClient(
                f"This pyps client was made before process {os.getpid()} was forked and works only in the parent. Make "
                "a client in the child, or start the child with spawn (DataLoader: multiprocessing_context='spawn')."
            )
