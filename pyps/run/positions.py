"""Where each worker's data stands, in its own words, for whoever takes the worker's place."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import TypeAlias

from pyps import logs
from pyps.run_header import PositionsState
from pyps_wire.errors import LimitExceeded

log = logs.get("pyps.run")

BYTES_MAX = 64 * 2**10
# Workers whose positions are kept, and their bytes; of more the one that pushed longest ago is forgotten.
WORKERS_MAX = 1024
TOTAL_BYTES_MAX = 32 * 2**20


# With the arguments of `note`; of a position that is withdrawn it is None.
Follower: TypeAlias = Callable[[str, int | None, int, int, bytes | None], None]


@dataclass(slots=True)
class _Kept:
    index: int | None
    incarnation: int
    # Sequences and positions of the newest pushes: of the last one some shards may not be there yet.
    newest: deque[tuple[int, bytes]] = field(default_factory=lambda: deque(maxlen=2))

    @property
    def num_bytes(self) -> int:
        return sum(len(position) for _, position in self.newest)


class Positions:
    """The positions that came with the newest pushes of each worker. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        # Guarded by _lock. The worker of the oldest push first.
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self.num_bytes = 0
        self._follower: Follower | None = None
        self._has_told = False

    def note(self, worker_id: str, index: int | None, incarnation: int, sequence: int, position: bytes) -> None:
        """Keep the position that holds once a push is applied. Call it before the push is."""
        if len(position) > BYTES_MAX:
            raise LimitExceeded(f"a data_position has {len(position)} bytes; expected {BYTES_MAX} at the most")
        with self._lock:
            kept = self._kept.get(worker_id)
            self.num_bytes -= 0 if kept is None else kept.num_bytes
            if kept is None or kept.incarnation < incarnation:
                kept = self._kept[worker_id] = _Kept(index, incarnation)
            if kept.incarnation == incarnation and (not kept.newest or kept.newest[-1][0] < sequence):
                kept.newest.append((sequence, position))
                self._kept.move_to_end(worker_id)
                if self._follower is not None:
                    self._follower(worker_id, index, incarnation, sequence, position)
            self.num_bytes += kept.num_bytes
            while len(self._kept) > WORKERS_MAX or self.num_bytes > TOTAL_BYTES_MAX:
                name, oldest = self._kept.popitem(last=False)
                self.num_bytes -= oldest.num_bytes
                if not self._has_told:
                    most = f"{WORKERS_MAX} workers, {TOTAL_BYTES_MAX} bytes"
                    log.warning("places in the data are forgotten, the oldest first", worker=name, kept_at_most=most)
                self._has_told = True

    def withdraw(self, worker_id: str, incarnation: int, sequence: int) -> None:
        """Forget the position of a worker's newest push, which was refused: else two of them would hide all before."""
        with self._lock:
            kept = self._kept.get(worker_id)
            if kept is not None and kept.incarnation == incarnation and [n for n, _ in kept.newest][-1:] == [sequence]:
                self.num_bytes -= len(kept.newest.pop()[1])
                if self._follower is not None:
                    self._follower(worker_id, kept.index, incarnation, sequence, None)

    def of_predecessor(
        self,
        worker_id: str,
        index: int | None,
        incarnation: int,
        *,
        is_alive: Callable[[str], bool],
        applied: Callable[[str, int], int],
    ) -> bytes:
        """Return the position of the newest push by an earlier life of the worker, else by a dead one of its index.

        `applied` returns the newest sequence of a worker's life that all shards have answered. b"" for none.
        """
        with self._lock:
            name, kept = worker_id, self._kept.get(worker_id)
            if kept is None and index is not None:
                others = [item for item in self._kept.items() if item[1].index == index and not is_alive(item[0])]
                name, kept = max(others, key=lambda item: item[1].incarnation, default=("", None))
            if kept is None or kept.incarnation >= incarnation:
                return b""
            life, newest = kept.incarnation, list(kept.newest)
        answered = applied(name, life)
        return next((position for sequence, position in reversed(newest) if sequence <= answered), b"")

    def follow(self, follower: Follower | None) -> None:
        """Tell a follower, in place of any before it, what is kept, and then each position before its push is applied.

        It is called under the lock.
        """
        with self._lock:
            self._follower = follower
            if follower is not None:
                for name, kept in self._kept.items():
                    for sequence, position in kept.newest:
                        follower(name, kept.index, kept.incarnation, sequence, position)

    def state(self) -> PositionsState:
        """Return the positions for a checkpoint; they share their memory."""
        with self._lock:
            return {name: (kept.index, kept.incarnation, tuple(kept.newest)) for name, kept in self._kept.items()}

    def restore(self, state: PositionsState) -> None:
        for name, (index, incarnation, newest) in state.items():
            for sequence, position in newest:
                self.note(name, index, incarnation, sequence, position)
