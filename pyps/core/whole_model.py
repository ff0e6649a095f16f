"""One mutex for the whole model: ASGD as it was first described (Zhang et al. 2013)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from pyps.core.arrays import Floats
from pyps.core.finding import Finding
from pyps.core.gradient import Gradient, require_fitting, require_possible_version
from pyps.core.receipt import Receipt
from pyps.core.reply import Answer
from pyps.core.roster import Roster
from pyps.core.shard import Shard

T = TypeVar("T")


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

    def push(
        self,
        gradients: Sequence[tuple[int, Gradient]],
        *,
        roster: Roster,
        answers: Mapping[int, Answer] | None = None,
        finding: Finding | None = None,
    ) -> list[Receipt]:
        """Handles the parts of a push, (shard_id, gradient) each, as one; returns their receipts in order.

        `answers`, by shard, and `finding` are as for `Shard.push`; what they are given is one state of the model.
        Raises as `Shard.push`, and then has applied none of them. A part that is refused leaves the others alone.
        """
        for shard_id, gradient in gradients:
            require_fitting(gradient, shard_id=shard_id, shard_length=self.shards[shard_id].length)
        with self.held():
            for shard_id, gradient in gradients:
                shard = self.shards[shard_id]
                if gradient.epoch == shard.epoch:
                    require_possible_version(gradient, shard_id=shard_id, version=shard.version)
            answer_of = (answers or {}).get
            return [
                self.shards[shard_id].push(gradient, roster=roster, answer=answer_of(shard_id), finding=finding)
                for shard_id, gradient in gradients
            ]

    def read(
        self,
        readers: Mapping[int, Callable[[int, Floats], T]],
        *,
        worker_id: str | None = None,
        provided: Callable[[], bool] = lambda: True,
    ) -> dict[int, T]:
        """Returns what each shard's `reader(version, parameters)` makes of it, all of one state of the model.

        `provided` is called first, of the same moment: nothing is read where it says no.
        """
        with self.held():
            if not provided():
                return {}
            return {
                shard_id: self.shards[shard_id].read(reader, worker_id=worker_id)
                for shard_id, reader in readers.items()
            }

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
