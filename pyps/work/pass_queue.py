"""What plain and coordinated queues share: a pass, which portion is with whom, and who delivered it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from pyps.work.answers import Delivered, LeaseAnswer, Leased
from pyps.work.portions import Cut, DataSpec, PendingPortions, Portion
from pyps.work.workers import Lease, WaitingCalls, WorkerProgress
from pyps_wire.errors import BadRequest, Superseded

# Leases whose end is remembered, to be told to a worker that comes back with one.
ENDS_REMEMBERED = 10_000
# Deliveries of the present pass and those before it, to show that each example of a pass counted once.
PASSES_REMEMBERED = 8
# Where portions are many, the oldest are forgotten before that: so many fit into one message.
DELIVERIES_REMEMBERED = 50_000


@dataclass(slots=True)
class Counts:
    """What happened since the run began."""

    # Backup copies given out; portions that a backup copy finished first.
    copies: int = 0
    stolen: int = 0
    # Leases that ended because their workers died or gave nothing for too long.
    lost: int = 0
    # Results that were thrown away.
    wasted: int = 0
    passes_done: int = 0


class WorkPass:
    """A pass that goes on: a portion is pending, with somebody, or delivered. Guarded by its queue's lock."""

    # Claimed portions whose gradients are summed in one stage; 0 where gradients are pushed.
    portions_per_stage = 0

    def __init__(
        self, number: int, cut: Cut, *, batch_size: int = 0, pending: Iterable[tuple[int, int]] | None = None
    ) -> None:
        self.number = number
        self.cut = cut
        self.batch_size = batch_size
        self.pending = PendingPortions([(0, cut.num_portions)] if pending is None else pending)
        # The leases of each portion that is with somebody, in order of giving-out.
        self.running: dict[int, list[Lease]] = {}
        # Portions delivered, by worker.
        self.done_by: Counter[str] = Counter()
        # How often each portion was taken away from a worker that was too slow.
        self.times_stalled: Counter[int] = Counter()

    @property
    def num_done(self) -> int:
        """Delivered portions."""
        return self.cut.num_portions - len(self.pending) - len(self.running)

    @property
    def done(self) -> bool:
        """Whether every portion is delivered."""
        return not self.pending and not self.running

    def held(self) -> Iterator[Lease]:
        """The leases whose ends the pass waits for."""
        for leases in self.running.values():
            yield from leases

    def give(self, lease: Lease) -> None:
        """Gives a portion to a worker, beside those that have it."""
        if not lease.copy:
            self.pending.remove(lease.portion_id)
        self.running.setdefault(lease.portion_id, []).append(lease)

    def give_back(self, lease: Lease) -> None:
        """Ends a lease without a result. The portion stays with those that compute it too, else it is pending."""
        leases = self.running[lease.portion_id]
        leases.remove(lease)
        if not leases:
            del self.running[lease.portion_id]
            self.pending.add(lease.portion_id)

    def deliver(self, lease: Lease) -> list[Lease]:
        """Marks a portion as delivered; returns all its leases, that one too."""
        self.done_by[lease.worker.worker_id] += 1
        self.times_stalled.pop(lease.portion_id, None)
        return self.running.pop(lease.portion_id)

    def unfinished(self) -> list[tuple[int, int]]:
        """All portions that are not delivered, as runs."""
        return PendingPortions([*self.pending.runs, *((portion, portion + 1) for portion in self.running)]).runs


P = TypeVar("P", bound=WorkPass)
T = TypeVar("T")


class PassQueue(ABC, Generic[P]):
    """Passes over a data set, and what becomes of a portion when a worker comes, gives or goes.

    Guarded by its queue's lock; what is to be called after that is left with the waiting calls.
    """

    # Why a coordinator ended the work, and its own figures.
    end_reason: str | None = None
    scalars: Mapping[str, float] = MappingProxyType({})

    def __init__(self, calls: WaitingCalls, *, first_lease: int) -> None:
        self._calls = calls
        self.spec: DataSpec | None = None
        # The present one and, where that is not complete, those that free workers have begun after it.
        self.passes: list[P] = []
        # Of the present pass, or of the last one where none goes on.
        self.number = 0
        self.workers: dict[str, WorkerProgress] = {}
        # Those that left in the present pass, or are taken to be dead: apart, so that no lease looks at them.
        self.departed: dict[str, WorkerProgress] = {}
        self.counts = Counts()
        # Of the newest passes, in order, by lease.
        self.deliveries: dict[int, Delivered] = {}
        self.next_lease = first_lease
        self._ends: dict[int, str] = {}

    @property
    def present(self) -> P | None:
        """The present pass; None before a coordinator's first, and after a restore amid one."""
        return self.passes[0] if self.passes else None

    def require_open(self) -> DataSpec:
        """The data set; BadRequest where no worker has named it."""
        if self.spec is None:
            raise BadRequest("no worker has said what the data set is: let one open it first")
        return self.spec

    def enter(self, worker_id: str, incarnation: int) -> WorkerProgress:
        """The worker that calls; what an earlier process of its name held goes back. Superseded for such a one."""
        known = self.workers.get(worker_id) or self.departed.get(worker_id)
        worker = known or WorkerProgress(worker_id, incarnation)
        if incarnation < worker.incarnation:
            raise Superseded(
                f"a newer process goes by the name of worker {worker_id!r}: stop this one, or give it another name"
            )
        if incarnation > worker.incarnation:
            # The new process knows nothing of where the old one was, but its machine may still have the data.
            worker.measured.clear()
            worker.gave_at, worker.incarnation = None, incarnation
            self._take_back_all(worker, why=f"a newer process goes by the name of worker {worker_id!r}", lost=True)
        self.departed.pop(worker_id, None)
        self.workers[worker_id] = worker
        return worker

    def release(self, worker_id: str, *, lost: bool) -> None:
        """Lets a worker go: all that it holds goes back. `lost`: it is taken to be dead."""
        if worker := self.workers.pop(worker_id, None):
            self.departed[worker_id] = worker
            self._calls.wake(worker_id)
            self._take_back_all(worker, why=f"worker {worker_id!r} was taken to be gone", lost=lost)

    def _take_back_all(self, worker: WorkerProgress, *, why: str, lost: bool) -> None:
        leases = list(worker.leases.values())
        for lease in leases:
            self.give_back(lease, why=why)
        if lost and leases:
            self.counts.lost += len(leases)
            facts = {"worker": worker.worker_id, "portions": len(leases)}
            self._calls.note("portions of a lost worker go to others", warning=True, **facts)

    @abstractmethod
    def answer(self, worker: WorkerProgress, number: int | None, *, passes: int, now: float) -> LeaseAnswer:
        """What a free worker that asks for that pass (None: the present one, or the next) is to do.

        `passes`: how many it goes through, 0 where that is not known.
        """

    def objection(self, leases: Sequence[Lease]) -> str:
        """Why leases that hold cannot be delivered, empty where they can."""
        return ""

    def begin(self, *passes: P) -> None:
        """Puts passes in place of the present one."""
        self.passes, self.number = list(passes), passes[0].number
        self.departed.clear()
        oldest = self.number - PASSES_REMEMBERED + 1
        self.deliveries = {lease_id: done for lease_id, done in self.deliveries.items() if done.pass_ >= oldest}

    def choose(self, work_pass: P, worker: WorkerProgress) -> int | None:
        """The pending portion that a worker had best take; None where none is pending.

        Consecutive portions go to the same worker, and pass after pass the same ones: their data may lie with it.
        """
        pending = work_pass.pending
        if not pending:
            return None
        worker.enter(work_pass.number)
        if worker.next_portion is not None and worker.next_portion in pending:
            return worker.next_portion
        if worker.next_portion is None and worker.began_before is not None:
            first = work_pass.cut.containing(worker.began_before)
            if first in pending:
                return first
        start, stop = pending.longest()
        # Where another worker walks towards the run, that one keeps the first half of it.
        taken = any(other.pass_ == work_pass.number and other.next_portion == start for other in self.workers.values())
        return (start + stop) // 2 if taken else start

    def give(self, work_pass: P, worker: WorkerProgress, portion_id: int, *, now: float) -> Leased:
        """Gives a portion to a worker, beside those that have it."""
        worker.enter(work_pass.number)
        portion = work_pass.cut.portion(portion_id, lease_id=self.next_lease)
        lease = Lease(work_pass.number, portion, worker, now, copy=portion_id in work_pass.running)
        self.next_lease += 1
        worker.leases[lease.lease_id] = lease
        work_pass.give(lease)
        worker.next_portion = portion_id + 1
        if worker.began is None and not lease.copy:
            worker.began = portion.start
        following = self.choose(work_pass, worker)
        return Leased(
            work_pass.number,
            portion,
            next=None if following is None else work_pass.cut.portion(following),
            batch_size=work_pass.batch_size,
            portions_per_stage=work_pass.portions_per_stage,
        )

    def find(self, worker: WorkerProgress, lease_id: int) -> tuple[Lease | None, str]:
        """A worker's lease or, where it has none by that number, why. BadRequest for one that never was."""
        if not 0 < lease_id < self.next_lease:
            raise BadRequest(f"lease {lease_id} was never given out: send the lease_id of the portion that was leased")
        if lease_id in worker.leases:
            return worker.leases[lease_id], ""
        if delivered := self.deliveries.get(lease_id):
            return None, f"lease {lease_id} was delivered by worker {delivered.worker_id!r} before"
        holder = next((other.worker_id for other in self.workers.values() if lease_id in other.leases), None)
        if holder is not None:
            return None, f"lease {lease_id} is worker {holder!r}'s, not {worker.worker_id!r}'s"
        why = self._ends.get(lease_id)
        return None, why or f"lease {lease_id} ended with its pass, or the server was restored since"

    def give_back(self, lease: Lease, *, why: str) -> None:
        """Ends a lease without a result: somebody else may have its portion now."""
        self.pass_of(lease).give_back(lease)
        self.end_lease(lease, why=why)
        self._calls.wake_workers()

    def end_lease(self, lease: Lease, *, why: str) -> None:
        """Forgets a lease, but not why it ended where that is worth telling."""
        del lease.worker.leases[lease.lease_id]
        if why:
            _remember(self._ends, lease.lease_id, why, ENDS_REMEMBERED)

    def take_in(
        self, worker: WorkerProgress, leases: Sequence[Lease], *, stage_id: int, loss_sum: float, now: float
    ) -> None:
        """Counts portions as delivered, and passes as done."""
        for lease in leases:
            done = Delivered(lease.pass_, lease.portion, worker.worker_id, worker.incarnation)
            _remember(self.deliveries, lease.lease_id, done, DELIVERIES_REMEMBERED)
            why = f"portion {lease.portion_id} was delivered by worker {worker.worker_id!r} before"
            for other in self.pass_of(lease).deliver(lease):
                self.counts.wasted += other is not lease
                self.end_lease(other, why=why if other is not lease else "")
        worker.gave_at = now
        while self.passes[0].done:
            self.counts.passes_done += 1
            self._calls.wake_all()
            if len(self.passes) == 1:
                break
            self.begin(*self.passes[1:])

    def delivered_before(self, worker: WorkerProgress, lease_id: int, *, stage_id: int) -> bool:
        """Whether this very worker delivered the lease."""
        done = self.deliveries.get(lease_id)
        return done is not None and (done.worker_id, done.incarnation) == (worker.worker_id, worker.incarnation)

    def pass_of(self, lease: Lease) -> P:
        """The pass of a lease that holds."""
        return self.passes[lease.pass_ - self.number]

    def waits_for(self, worker_id: str) -> tuple[str, ...]:
        """Whose portions a worker waits for, in order of name."""
        holders = {lease.worker.worker_id for lease in self.present.held()} if self.present else set()
        return tuple(sorted(holders - {worker_id} or holders))

    def to_json(self) -> dict[str, Any]:
        """All that a restored queue needs; portions that are with workers count as pending."""
        # Names once, and a short list for each delivery.
        index = {name: place for place, name in enumerate({done.worker_id: 0 for done in self.deliveries.values()})}
        rows = [
            [done.pass_, part.portion_id, part.start, part.stop, lease_id, index[done.worker_id], done.incarnation]
            for lease_id, done in self.deliveries.items()
            for part in [done.portion]
        ]
        return {
            "spec": self.spec and asdict(self.spec),
            "pass": self.number,
            "plain": [],
            "next_lease": self.next_lease,
            "coordinator_epoch": 0,
            "counts": asdict(self.counts),
            "deliveries": {"workers": list(index), "rows": rows},
        }

    def restore(self, plain: Mapping[str, Any]) -> None:
        """Goes on where `to_json` stood."""
        self.number = int(plain["pass"])
        self.next_lease = max(self.next_lease, int(plain["next_lease"]))
        self.counts = Counts(**plain["counts"])
        names = plain["deliveries"]["workers"]
        for pass_, portion_id, start, stop, lease_id, place, incarnation in plain["deliveries"]["rows"]:
            portion = Portion(portion_id, start, stop, lease_id)
            self.deliveries[lease_id] = Delivered(pass_, portion, names[place], incarnation)


def _remember(newest: dict[int, T], lease_id: int, what: T, most: int) -> None:
    """Adds to what is remembered of leases, and forgets the oldest beyond the most."""
    newest[lease_id] = what
    if len(newest) > most:
        del newest[next(iter(newest))]
