"""One mutex for the whole model: ASGD as it was first described (Zhang et al. 2013)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from pyps.core.gradient import Finding, require_fitting, require_possible_version
from pyps.core.plan import PushPlan
from pyps.core.roster import Roster
from pyps.core.shard import Pushed, Shard


class WholeModel:
    """All shards of a model, pushed and read under one mutex, so that every read sees one state of the whole model.

    A push has to be here in full, and a read copies: the mutex is never held while a network is waited for.
    Every method may be called from any thread.
    """

    def __init__(self, shards: Mapping[int, Shard], *, on_lock: Callable[[bool], None] | None = None) -> None:
        """`on_lock` is told, under the mutex, when it was taken (True) and that it will be let go (False)."""
        self.shards = shards
        self._on_lock = on_lock
        self._mutex = threading.Lock()

    def push(self, parts: Sequence[PushPlan], *, roster: Roster, finding: Finding | None = None) -> list[Pushed]:
        """Handles the parts of a push as one; returns what became of each, in order.

        `finding` is as for `Shard.push`; the parameters that they are answered with are one state of the model.
        Raises as `Shard.push`, and then has applied none of them. A part that is refused leaves the others alone.
        """
        for part in parts:
            require_fitting(part.gradient, shard_id=part.shard_id, shard_length=self.shards[part.shard_id].length)
        with self.held():
            for shard_id, gradient, *_ in parts:
                shard = self.shards[shard_id]
                if gradient.epoch == shard.epoch:
                    require_possible_version(gradient, shard_id=shard_id, version=shard.version)
            # Made or left with the first.
            memory = parts[0].memory if parts else None
            if memory is not None:
                memory.require_attached()
            return [
                self.shards[shard_id].push(
                    gradient, roster=roster, reply=reply, held_version=held_version, finding=finding
                )
                for shard_id, gradient, reply, held_version, *_ in parts
            ]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Holds the mutex, for what has to happen between two pushes."""
        with self._mutex:
            if self._on_lock is not None:
                self._on_lock(True)
            try:
                yield
            finally:
                if self._on_lock is not None:
                    self._on_lock(False)
