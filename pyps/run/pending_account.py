"""What gradients that wait for an update may take of the memory."""

from __future__ import annotations

from collections import Counter
from threading import Lock

from pyps.core.arrays import Floats
from pyps.core.behaviour import Behaviour
from pyps.core.gradient import Gradient
from pyps.core.receipt import Outcome, Receipt
from pyps.core.recorder import Recorder
from pyps.core.roster import Roster
from pyps.core.shard import Shard
from pyps.core.update import Update
from pyps.statistics import Statistics
from pyps_wire.errors import LimitExceeded


class PendingAccount:
    """Counts the bytes of waiting gradients over all shards, and keeps one out that would not fit.

    A recorder in front of the run's own: it hears that a gradient is about to wait, and its exception prevents
    it. Called under a shard's lock, from several at once. The statistics hear through it what became of the
    gradients that have waited.
    """

    def __init__(self, bytes_max: int, *, statistics: Statistics, recorder: Recorder | None):
        self.bytes_max = bytes_max
        self._statistics = statistics
        self._recorder = recorder
        self._lock = Lock()
        # Guarded by _lock; a look without it may come too early.
        self._bytes: Counter[int] = Counter()
        self._total = 0

    @property
    def bytes_held(self) -> int:
        """Bytes of gradients that wait."""
        return self._total

    def note(self, shard: Shard) -> None:
        """Takes over what waits at a shard; to be called after anything that may have changed it."""
        if not shard.num_pending and not self._bytes[shard.shard_id]:
            # As with most protocols: whoever begins to wait meanwhile notes it after this.
            return
        with self._lock:
            # Read under our lock, so that of two notes the later one has the newer figure.
            self._set(shard.shard_id, shard.pending_bytes)

    def pushed(self, shard_id: int, gradient: Gradient, receipt: Receipt, roster: Roster) -> None:
        """Refuses (LimitExceeded) a gradient that would wait beyond the bound; else tells the run's recorder."""
        if receipt.outcome is Outcome.PENDING:
            self._reserve(shard_id, memoryview(gradient.payload).nbytes)
        if self._recorder is not None:
            self._recorder.pushed(shard_id, gradient, receipt, roster)

    def completed(self, shard_id: int, roster: Roster, version: int) -> None:
        """Tells the run's recorder."""
        if self._recorder is not None:
            self._recorder.completed(shard_id, roster, version)

    def configured(
        self, shard_id: int, behaviour: Behaviour | None, learning_rate: float | None, roster: Roster, version: int
    ) -> None:
        """Tells the run's recorder."""
        if self._recorder is not None:
            self._recorder.configured(shard_id, behaviour, learning_rate, roster, version)

    def updated(self, shard_id: int, update: Update, parameters: Floats) -> None:
        """Tells the statistics and the run's recorder."""
        self._statistics.applied(shard_id, update)
        if self._recorder is not None:
            self._recorder.updated(shard_id, update, parameters)

    def pulled(self, shard_id: int, worker_id: str, version: int) -> None:
        """Tells the run's recorder."""
        if self._recorder is not None:
            self._recorder.pulled(shard_id, worker_id, version)

    def _reserve(self, shard_id: int, num_bytes: int) -> None:
        with self._lock:
            if self._total + num_bytes > self.bytes_max:
                raise LimitExceeded(
                    f"{num_bytes} bytes more would make {self._total + num_bytes} bytes of gradients that wait for "
                    f"an update, this server keeps {self.bytes_max} at the most: raise --max-pending-bytes, or take "
                    "a protocol that keeps fewer"
                )
            self._set(shard_id, self._bytes[shard_id] + num_bytes)

    def _set(self, shard_id: int, num_bytes: int) -> None:
        self._total += num_bytes - self._bytes[shard_id]
        self._bytes[shard_id] = num_bytes
