"""Counts of pushes, pulls and waits: in total, by worker and by shard; and the newest steps and waits."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from threading import Lock
from typing import NamedTuple

from pyps.core.gradient import PayloadKind
from pyps.core.receipt import Outcome, Reason, Receipt
from pyps.core.update import Update
from pyps_wire import inspector_pb2 as pb

# Upper bounds of the apply-time histogram's buckets, in seconds.
APPLY_SECONDS_BOUNDS = (
    1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip
RECENT_RECEIPTS_MAX = 1000
# Workers with counts of their own. Beyond that the one that pushed longest ago is forgotten: memory is bounded.
WORKERS_MAX = 4096
# Shards listed for each worker; of more the first.
SHARDS_LISTED_MAX = 1024
# Steps and waits kept.
ACTIVITIES_MAX = 4096
# A step or wait is over so many seconds after its newest part; the second is for a step with fewer shards than usual.
OVER_SECONDS, PARTLY_OVER_SECONDS = 1.0, 10.0
# Staleness is counted exactly below this, and to 1 part in 8 above.
EXACT_STALENESS_BELOW = 1024


@dataclass(slots=True)
class Tally:
    """Counts of pushed shards by outcome. Names that the message Tally has too are sent to callers."""

    pushes_applied: int = 0
    pushes_pending: int = 0
    pushes_rejected: int = 0
    pushes_duplicate: int = 0
    updates: int = 0
    # Seconds that workers waited for others.
    blocked_seconds: float = 0.0
    # Rejected pushes by reason.
    reasons: dict[Reason, int] = field(default_factory=dict)
    bytes_in: int = 0
    bytes_out: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0
    # Gradients in updates, and the share of the step size that staleness left of each.
    rate_scale_count: int = 0
    rate_scale_sum: float = 0.0
    histogram: dict[int, int] = field(default_factory=dict)

    def add(self, receipt: Receipt, *, payload_bytes: int) -> None:
        self.bytes_in += payload_bytes
        if receipt.duplicate:
            self.pushes_duplicate += 1
            return
        if receipt.outcome is Outcome.APPLIED:
            self.pushes_applied += 1
            self.updates += receipt.version_after - receipt.version_before
        elif receipt.outcome is Outcome.PENDING:
            self.pushes_pending += 1
        else:
            self.pushes_rejected += 1
            self.reasons[receipt.reason] = self.reasons.get(receipt.reason, 0) + 1
            return
        bucket = staleness = receipt.staleness
        if staleness:
            self.staleness_sum += staleness
            self.staleness_max = max(self.staleness_max, staleness)
            bucket = _staleness_bucket(staleness)
        self.histogram[bucket] = self.histogram.get(bucket, 0) + 1

    @property
    def pushes_dropped(self) -> int:
        """Valid pushes that the protocol did not need."""
        return self.reasons.get(Reason.DROPPED, 0)

    @property
    def rejected_by_reason(self) -> dict[str, int]:
        return {reason.name.lower(): count for reason, count in self.reasons.items()}

    @property
    def staleness_mean(self) -> float:
        """The mean staleness of accepted gradients; 0 before the first."""
        accepted = self.pushes_applied + self.pushes_pending
        return self.staleness_sum / accepted if accepted else 0.0

    @property
    def rate_scale_mean(self) -> float:
        """The mean share of the step size that staleness left; 1 before the first update."""
        return self.rate_scale_sum / self.rate_scale_count if self.rate_scale_count else 1.0

    @property
    def step_lost(self) -> float:
        """The share of the step size that staleness took."""
        return 1.0 - self.rate_scale_mean

    def include(self, other: Tally) -> None:
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.staleness_max = max(self.staleness_max, other.staleness_max)
        for reason, count in other.reasons.items():
            self.reasons[reason] = self.reasons.get(reason, 0) + count
        for bucket, count in other.histogram.items():
            self.histogram[bucket] = self.histogram.get(bucket, 0) + count

    def copy(self) -> Tally:
        return replace(self, histogram=dict(self.histogram), reasons=dict(self.reasons))


def tally_of(tally: Tally) -> pb.Tally:
    return pb.Tally(**{field.name: getattr(tally, field.name) for field in pb.Tally.DESCRIPTOR.fields})


def histogram_of(tally: Tally) -> pb.StalenessHistogram:
    return pb.StalenessHistogram(
        buckets=[
            pb.StalenessHistogram.Bucket(staleness=staleness, count=count)
            for staleness, count in sorted(tally.histogram.items())
        ],
        tally=tally_of(tally),
    )


_SUMS = tuple(item.name for item in fields(Tally) if item.name not in ("reasons", "histogram", "staleness_max"))


class Contacts(NamedTuple):
    """The shards that a worker pushed to, and those that it was sent; at most SHARDS_LISTED_MAX each."""

    pushed: set[int]
    pulled: set[int]


@dataclass(slots=True)
class Activity:
    """A step of a worker, over all shards that it pushed here, or a wait of one of its calls; by the run's clock."""

    worker_id: str
    # Incarnation and sequence of the step's push, or when its call began to wait.
    cause: tuple[int, int] | float
    # A step's: when its worker was sent parameters, or its wait ended, or its last push, whichever is latest.
    began: float
    ended: float
    # The answer of a shard that rejected the push, else of one where it waits; None for a wait.
    receipt: Receipt | None = None
    # The largest of its shards.
    staleness: int = 0
    updates: int = 0
    num_shards: int = 0
    # The workers whose push or step ended the wait.
    waited_for: tuple[str, ...] = ()
    # Its place in the list; 0 until it is listed.
    number: int = 0


@dataclass(slots=True)
class Counted:
    """What is counted of a worker."""

    tally: Tally = field(default_factory=Tally)
    contacts: Contacts = field(default_factory=lambda: Contacts(set(), set()))
    # When its next step begins, if that is known.
    since: float = math.inf
    newest: Activity | None = None


class LoggedReceipt(NamedTuple):
    """A receipt, with its worker and the time by the run's clock."""

    worker_id: str
    receipt: Receipt
    now: float


def activity_of(activity: Activity, *, now: float) -> pb.Activity:
    receipt = activity.receipt
    return pb.Activity(
        number=activity.number,
        worker_id=activity.worker_id,
        age_seconds=now - activity.ended,
        seconds=activity.ended - activity.began,
        sequence=receipt.sequence if receipt else 0,
        outcome=int(receipt.outcome) if receipt else 0,  # type: ignore[arg-type]
        reason=int(receipt.reason) if receipt else 0,  # type: ignore[arg-type]
        staleness=activity.staleness,
        updates=activity.updates,
        waited_for=activity.waited_for,
    )


class Statistics:
    """Counts pushes, pulls and waits. Every method may be called from any thread.

    One lock guards all; a push holds it for a few additions. The total over shards is added up on request.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        # Guarded by _lock.
        # Counts that belong to no shard.
        self._of_no_shard = Tally()
        self._workers: OrderedDict[str, Counted] = OrderedDict()
        self._shards: dict[int, Tally] = {}
        # Of each a LoggedReceipt's fields, which is made for who asks.
        self._recent: deque[tuple[str, Receipt, float]] = deque(maxlen=RECENT_RECEIPTS_MAX)
        # How many have begun; those that may still grow, or were not asked for; and those with a number.
        self._num_begun = self._num_listed = 0
        self._growing: deque[Activity] = deque(maxlen=ACTIVITIES_MAX)
        self._listed: deque[Activity] = deque(maxlen=ACTIVITIES_MAX)
        self._last_update: float | None = None
        self._apply_counts = [0] * (len(APPLY_SECONDS_BOUNDS) + 1)
        self._apply_sum = 0.0

    def pushed(
        self,
        worker_id: str,
        shard_id: int,
        receipt: Receipt,
        *,
        payload_bytes: int,
        now: float,
        incarnation: int = 0,
        update: Update | None = None,
        answer_bytes: int = 0,
        apply_seconds: float | None = None,
    ) -> None:
        """Count one answered push, and the gradients of the update that it made.

        Args:
            answer_bytes: Bytes of the parameters that were sent with its receipt.
            apply_seconds: Its time in the shard, the wait for the lock included.
        """
        with self._lock:
            counted = self._workers.get(worker_id) or self._worker(worker_id)
            worker, contacts = counted.tally, counted.contacts
            shard = self._shards.get(shard_id) or self._shard(shard_id)
            self._workers.move_to_end(worker_id)
            worker.add(receipt, payload_bytes=payload_bytes)
            shard.add(receipt, payload_bytes=payload_bytes)
            if shard_id not in contacts.pushed:
                _note(contacts.pushed, shard_id)
            self._recent.append((worker_id, receipt, now))
            if answer_bytes:
                self._of_no_shard.bytes_out += answer_bytes
                worker.bytes_out += answer_bytes
                if shard_id not in contacts.pulled:
                    _note(contacts.pulled, shard_id)
            if not receipt.duplicate:
                # Without a call of its own: every push comes here.
                updates = receipt.version_after - receipt.version_before
                if updates:
                    self._last_update = now
                step, push = counted.newest, (incarnation, receipt.sequence)
                if step is None or step.cause != push:
                    began = counted.since if counted.since < now else now
                    step = Activity(worker_id, push, began, now, receipt, receipt.staleness, updates, 1)
                    counted.newest = step
                    self._growing.append(step)
                    self._num_begun += 1
                else:
                    step.ended, step.num_shards = now, step.num_shards + 1
                    if receipt.staleness > step.staleness:
                        step.staleness = receipt.staleness
                    if updates > step.updates:
                        step.updates = updates
                    if step.receipt is not None and receipt.outcome > step.receipt.outcome:
                        step.receipt = receipt
                counted.since = now
            if update is not None:
                parts = update.parts
                if len(parts) == 1 and parts[0].contribution.gradient.kind != PayloadKind.NOTHING:
                    worker.rate_scale_count += 1
                    worker.rate_scale_sum += receipt.rate_scale
                    shard.rate_scale_count += 1
                    shard.rate_scale_sum += receipt.rate_scale
                else:
                    self._count_parts(shard, update)
            if apply_seconds is not None:
                self._apply_counts[bisect_left(APPLY_SECONDS_BOUNDS, apply_seconds)] += 1
                self._apply_sum += apply_seconds

    def pulled(self, worker_id: str, payload_bytes: int, *, now: float, shard_ids: Iterable[int] = ()) -> None:
        """Count the payload of these shards, which was sent to a worker or an observer."""
        with self._lock:
            self._of_no_shard.bytes_out += payload_bytes
            counted = self._worker(worker_id)
            counted.tally.bytes_out += payload_bytes
            counted.since = now
            for shard_id in shard_ids:
                _note(counted.contacts.pulled, shard_id)

    def updated(self, shard_id: int, updates: Sequence[Update], *, now: float) -> None:
        """Count updates without a push: of a round that was completed as it was, or of settled gradients."""
        with self._lock:
            shard = self._shard(shard_id)
            shard.updates += len(updates)
            for update in updates:
                self._count_parts(shard, update)
            self._last_update = now

    def scaled(self, shard_id: int, rate_scales: Iterable[tuple[str, float]]) -> None:
        """Count the share of the step size that staleness left of an update's gradients, by worker."""
        with self._lock:
            for worker_id, rate_scale in rate_scales:
                self._count_scale(self._shard(shard_id), worker_id, rate_scale)

    def blocked(
        self, worker_id: str, seconds: float, *, since: float, now: float, waited_for: tuple[str, ...] = ()
    ) -> None:
        """Count a wait that ends now, of a call that has waited since then, and go on with the call's earlier waits."""
        with self._lock:
            counted = self._worker(worker_id)
            for tally in (self._of_no_shard, counted.tally):
                tally.blocked_seconds += seconds
            wait = counted.newest
            if wait is None or wait.cause != since or wait.number:
                wait = counted.newest = Activity(worker_id, since, now - seconds, now)
                self._growing.append(wait)
                self._num_begun += 1
            wait.ended = counted.since = now
            wait.waited_for = waited_for

    def total(self) -> Tally:
        """Return the counts over all workers and shards."""
        with self._lock:
            total, shards = self._of_no_shard.copy(), list(self._shards.values())
        for tally in shards:
            # One at a time: a push waits for one shard's sum, not for a thousand.
            with self._lock:
                total.include(tally)
        return total

    def worker(self, worker_id: str) -> Tally:
        """Return the counts of a worker; zeros for an unknown one."""
        with self._lock:
            counted = self._workers.get(worker_id)
            return Tally() if counted is None else counted.tally.copy()

    def contacts(self, worker_id: str) -> Contacts:
        """Return the shards that a worker pushed to and pulled; none for an unknown one."""
        with self._lock:
            counted = self._workers.get(worker_id) or Counted()
            return Contacts(*map(set, counted.contacts))

    def shard(self, shard_id: int) -> Tally:
        """Return the counts of a shard; zeros before its first push."""
        with self._lock:
            return self._shards.get(shard_id, Tally()).copy()

    @property
    def last_update(self) -> float | None:
        """The time of the last update by the run's clock; None before the first."""
        with self._lock:
            return self._last_update

    def recent(self, limit: int, worker_id: str = "") -> list[LoggedReceipt]:
        """Return the newest receipts, newest first; of all workers for ""."""
        with self._lock:
            receipts = list(self._recent)
        wanted = (LoggedReceipt(*fields) for fields in reversed(receipts) if worker_id in ("", fields[0]))
        return list(islice(wanted, limit))

    def activities(self, after: int, limit: int, *, now: float) -> tuple[list[Activity], int]:
        """Return steps and waits after that number, and how many before them are kept no longer; oldest first.

        After 0, and after a number that none has, these are the newest.
        """
        with self._lock:
            growing = list(self._growing)
            self._growing.clear()
            # Those that nobody asked for in time have numbers too.
            self._num_listed = self._num_begun - len(growing)
            for each in growing:
                if self._is_over(each, now):
                    self._num_listed += 1
                    each.number = self._num_listed
                    self._listed.append(each)
                else:
                    self._growing.append(each)
            listed, newest = list(self._listed), self._num_listed
        if not 0 < after <= newest:
            return listed[-limit:], 0
        found = [each for each in listed if each.number > after][:limit]
        return found, found[-1].number - after - len(found) if found else 0

    def apply_seconds(self) -> tuple[list[int], float]:
        """Return a histogram of the seconds that pushes took in their shard, and their sum.

        Count i is of times up to APPLY_SECONDS_BOUNDS[i] and above the bound before; the last one is of longer times.
        """
        with self._lock:
            return list(self._apply_counts), self._apply_sum

    # Call the methods below under the lock.

    def _is_over(self, activity: Activity, now: float) -> bool:
        """Return whether nothing more comes of a step or a wait."""
        counted = self._workers.get(activity.worker_id)
        if counted is None or counted.newest is not activity:
            return True
        partly = activity.receipt is not None and activity.num_shards < len(counted.contacts.pushed)
        return now - activity.ended > (PARTLY_OVER_SECONDS if partly else OVER_SECONDS)

    def _worker(self, worker_id: str) -> Counted:
        counted = self._workers.get(worker_id)
        if counted is None:
            counted = self._workers[worker_id] = Counted()
            if len(self._workers) > WORKERS_MAX:
                self._workers.popitem(last=False)
        return counted

    def _count_parts(self, shard: Tally, update: Update) -> None:
        """Count the share of the step size that staleness left of each of an update's gradients.

        For a gradient that waited it depends on the others, and is known with the update only.
        """
        for part in update.parts:
            gradient = part.contribution.gradient
            if gradient.kind == PayloadKind.NOTHING:
                continue
            self._count_scale(shard, gradient.worker_id, update.rate_scale(part))

    def _count_scale(self, shard: Tally, worker_id: str, rate_scale: float) -> None:
        for tally in (self._worker(worker_id).tally, shard):
            tally.rate_scale_count += 1
            tally.rate_scale_sum += rate_scale

    def _shard(self, shard_id: int) -> Tally:
        tally = self._shards.get(shard_id)
        if tally is None:
            tally = self._shards[shard_id] = Tally()
        return tally


def _note(shards: set[int], shard_id: int) -> None:
    if len(shards) < SHARDS_LISTED_MAX:
        shards.add(shard_id)


def _staleness_bucket(staleness: int) -> int:
    """Return a small staleness itself, a larger one rounded down to four leading bits: buckets stay few."""
    if staleness < EXACT_STALENESS_BELOW:
        return staleness
    dropped_bits = staleness.bit_length() - 4
    return staleness >> dropped_bits << dropped_bits
