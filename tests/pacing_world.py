"""Workers around a pacer, for unit tests of who may begin a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hypothesis import strategies as st

from pyps.core.pacing import ClockBound, Pacer, Release, StagedPacer, TurnTaking

WORKERS = "abcde"
MAKERS: dict[str, Callable[[], Pacer]] = {
    "turns": TurnTaking,
    "bound 0": lambda: ClockBound(0),
    "bound 3": lambda: ClockBound(3),
    "release": lambda: Release(4, 3),
    "serial, then free": lambda: StagedPacer(TurnTaking(), None, updates=5),
    "serial, one by one, then free": lambda: StagedPacer(TurnTaking(), None, updates=5, release_every=2),
    "in step, one by one, then bound": lambda: StagedPacer(None, ClockBound(1), updates=5, release_every=2),
    "serial, one by one, then turns": lambda: StagedPacer(TurnTaking(), TurnTaking(), updates=5, release_every=2),
}

# What befalls which worker: it asks for its next step, it departs, or it comes anew with a count of its own.
happenings = st.lists(
    st.tuples(st.sampled_from(WORKERS), st.sampled_from(["ask", "ask", "ask", "ask", "depart", "anew"])), max_size=120
)


class World:
    """Workers around a pacer, as a server keeps them: each push is an update."""

    def __init__(self, pacer: Pacer) -> None:
        self.pacer = pacer
        self.version = 0
        self.counts = dict.fromkeys(WORKERS, 0)
        self.computing: set[str] = set()
        self.waiting: set[str] = set()
        self.turns: list[str] = []

    def play(self, happenings: Iterable[tuple[str, str]]) -> None:
        for worker_id, what in happenings:
            if what == "ask":
                self.ask(worker_id)
            elif what == "depart":
                self.depart(worker_id)
            else:
                self.depart(worker_id)
                self.counts[worker_id] = 0
                self.ask(worker_id)

    def ask(self, worker_id: str) -> None:
        """Pushes where the worker computes, then asks for its next step; asks once more where it waits."""
        if worker_id in self.computing:
            self.computing.remove(worker_id)
            self.counts[worker_id] += 1
            self.version += 1
            self.let_go(self.pacer.advanced(self.version))
        self.waiting.add(worker_id)
        if self.pacer.asks(self.version):
            self.let_go(self.pacer.arrive(worker_id, self.counts[worker_id]))
        else:
            self.let_go(list(self.waiting))

    def depart(self, worker_id: str) -> None:
        self.computing.discard(worker_id)
        self.waiting.discard(worker_id)
        self.let_go(self.pacer.depart(worker_id))

    def let_go(self, worker_ids: list[str]) -> None:
        """Only those may be named that wait, each once."""
        assert len(set(worker_ids)) == len(worker_ids)
        assert set(worker_ids) <= self.waiting
        self.waiting -= set(worker_ids)
        self.computing |= set(worker_ids)
        self.turns += worker_ids


def arrive_all(pacer: Pacer, workers: str, clock: int = 0) -> list[str]:
    """Returns all that were let go while these workers asked in this order."""
    return [let_go for worker_id in workers for let_go in pacer.arrive(worker_id, clock)]
