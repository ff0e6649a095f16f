"""The queue of a data set's portions: each is delivered exactly once a pass, whatever dies.

Without a coordinator (Downpour, ASGD) a pass is an epoch, and one worker has a portion at a time. The next epoch begins
when every portion is delivered and a worker requests one, or earlier for a worker that finds no portion left.

With a coordinator (Sandblaster, Dean et al. 2012, section 4.2), the coordinator begins each pass, and near its end
several workers get the same portion. Beyond the paper, a worker claims a portion before its gradient enters a sum, and
the first claim wins.

No call waits here: a worker that gets no portion passes a wake function, which is called when it may try again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from pyps.core.effects import Wake
from pyps.work.passes import Delivered, Lease, Verdict, WorkerProgress, WorkPass
from pyps.work.portions import DataSpec, Division, Portion
from pyps.work.waiting import WaitingCalls
from pyps_wire import work_pb2 as wire
from pyps_wire.errors import InvalidArgument, StateLost, Superseded

# A worker is stuck after this many times the time that its own speed predicts.
SLACK = 3.0
# The most ended leases whose reason is remembered, for workers that still claim or deliver one.
ENDS_REMEMBERED = 10_000
# How many passes' deliveries are remembered, to show that each example was trained on once; and the most deliveries,
# which must fit into a message.
PASSES_REMEMBERED = 8
DELIVERIES_REMEMBERED = 50_000

T = TypeVar("T")


def lease_reply(outcome: wire.LeaseReply.Outcome, pass_: int, **more: Any) -> wire.LeaseReply:
    # The field's name is a keyword of Python's.
    return wire.LeaseReply(outcome=outcome, **{"pass": pass_, **more})


@dataclass(slots=True)
class Counts:
    """Events since the run began."""

    # Backup copies given out; portions that a backup copy finished first.
    copies: int = 0
    stolen: int = 0
    # Leases that ended because their workers died or delivered nothing for too long.
    lost: int = 0
    # Discarded results.
    wasted: int = 0
    passes_done: int = 0


class WorkQueue:
    """Portions, pass after pass. Every method may be called from any thread; `now` is in seconds of one clock."""

    def __init__(
        self,
        *,
        stall_seconds: float,
        batch_size_of: Callable[[int], int] = lambda epoch: 0,
        accumulate: Callable[[], int] = lambda: 0,
        epochs_ahead: Callable[[], int] = lambda: 0,
        on_event: Callable[..., object] = lambda *what, **facts: None,
        first_lease: int = 1,
    ) -> None:
        """Make a queue without a data set. It calls the functions under its lock, so they may take no lock.

        Args:
            stall_seconds: The least time without a result after which a worker loses a portion that others wait for.
            batch_size_of: Returns the examples in a minibatch of an epoch, 0 if the server does not set them.
            accumulate: Returns how many minibatches the protocol sums in a push.
            epochs_ahead: Returns how many epochs after the current one free workers may begin.
            on_event: `on_event(kind, what, **facts)` records an event.
            first_lease: Greater than every lease of an earlier process of this server.
        """
        self._stall_seconds = stall_seconds
        self._batch_size_of = batch_size_of
        self._accumulate = accumulate
        self._epochs_ahead = epochs_ahead
        self._calls = WaitingCalls(on_event)
        # Guarded by the lock of _calls.
        self.spec: DataSpec | None = None
        # The current pass, or the last one.
        self.pass_ = 0
        # The current pass and those that free workers have begun after it. Empty before a coordinator's first pass, and
        # after a restore during a coordinator's pass.
        self._passes: list[WorkPass] = []
        self._workers: dict[str, WorkerProgress] = {}
        # Workers that left or were lost in the current pass; they have no leases.
        self._departed: dict[str, WorkerProgress] = {}
        self._counts = Counts()
        # The newest deliveries, in order, by lease.
        self._deliveries: dict[int, Delivered] = {}
        self._next_lease = first_lease
        # By ended lease, the reason.
        self._ends: dict[int, str] = {}
        # The epochs of the current coordinator and of the one that began the pass, the reason why a coordinator ended
        # the work, and a coordinator's figures.
        self._coordinator_epoch = self._begun_by = 0
        self._end_reason: str | None = None
        self._scalars: dict[str, float] = {}

    # For workers.

    def open(self, spec: DataSpec, *, worker_id: str) -> None:
        """Set the data set. Raises InvalidArgument for a later call that differs from the first."""
        with self._calls.settled():
            if self.spec is not None:
                self.spec.require_same(spec, worker_id=worker_id)
                return
            if not spec.coordinated:
                self._begin(self._epoch(spec, 0))
            self.spec = spec
            self._calls.wake_all()
            self._calls.note("data set opened", name=spec.name, examples=spec.num_examples, worker=worker_id)

    def announce(self, worker_id: str, call: Wake) -> None:
        """Record a worker's call, named by its wake function, before the `lease` for it."""
        with self._calls.settled():
            self._calls.announce(worker_id, call)

    def forget(self, call: Wake) -> None:
        """Drop a call that has ended."""
        with self._calls.lock:
            self._calls.forget(call)

    def lease(
        self,
        worker_id: str,
        incarnation: int,
        *,
        pass_: int | None = None,
        passes: int = 0,
        now: float,
        wake: Wake | None = None,
        held: Collection[int] | None = None,
    ) -> wire.LeaseReply:
        """Give a free worker a portion of a pass.

        Args:
            worker_id: The worker.
            incarnation: Its process.
            pass_: The requested pass; None for the current one, or the next.
            passes: How many passes the worker trains, 0 if unknown. The portion may be of a later one of these.
            now: The time.
            wake: The announced call; with OUTCOME_NOTHING_NOW called once when it may ask again. None for a call that
                does not wait.
            held: The leases that the worker knows; its other leases end, as their answers were lost.

        Raises:
            WaitTimedOut: The announced call has ended, or its worker has made another.
        """
        with self._calls.settled():
            self._require_open()
            if wake is not None:
                self._calls.require_latest(worker_id, wake)
            worker = self._enter(worker_id, incarnation)
            if wake is None:
                self._calls.announce(worker_id, None)
            for lease in list(worker.leases.values()):
                if held is not None and lease.portion.lease_id not in held:
                    self._give_back(lease, why=f"worker {worker_id!r} requested work without naming it")
                    # It begins with that portion again.
                    worker.enter(lease.pass_)
                    worker.next_portion = lease.portion.portion_id
            answer = self._answer(worker, pass_, passes=passes, now=now)
            if answer.outcome == wire.LeaseReply.OUTCOME_NOTHING_NOW:
                self._calls.wait(worker_id, wake, now=now)
            return answer

    def claim(self, worker_id: str, incarnation: int, lease_id: int, *, now: float) -> Verdict:
        """Accept the first claim of a portion, and repetitions of it; refuse those of other copies."""
        with self._calls.settled():
            self._require_open()
            self._require_coordinated()
            worker = self._enter(worker_id, incarnation)
            lease, reason = self._find(worker, lease_id)
            if lease is None:
                return Verdict(False, reason)
            work_pass = self._pass_of(lease)
            winner = work_pass.claimed.get(lease.portion.portion_id)
            if winner is lease:
                return Verdict(True)
            worker.computed([lease], now=now)
            if winner is not None:
                self._counts.wasted += 1
                reason = f"portion {lease.portion.portion_id} was claimed by worker {winner.worker.worker_id!r} before"
                work_pass.give_back(lease)
                self._end_lease(lease, why=reason)
                return Verdict(False, reason)
            work_pass.claimed[lease.portion.portion_id] = lease
            self._counts.stolen += lease.copy and len(work_pass.running[lease.portion.portion_id]) > 1
            return Verdict(True)

    def deliver(
        self,
        worker_id: str,
        incarnation: int,
        lease_ids: Sequence[int],
        *,
        stage_id: int = 0,
        loss_sum: float = 0.0,
        example_count: int,
        now: float,
    ) -> Verdict:
        """Accept portions whose gradients are pushed or, with a coordinator, claimed and staged: all or none.

        After a refusal all leases of the call end: their gradients are in one sum.
        """
        with self._calls.settled():
            self._require_open()
            worker = self._enter(worker_id, incarnation)
            if not lease_ids or len(set(lease_ids)) < len(lease_ids):
                raise InvalidArgument(
                    f"worker {worker_id!r} delivers the leases {list(lease_ids)}; expected one or more, each once"
                )
            if all(self._delivered_before(worker, lease_id, stage_id=stage_id) for lease_id in lease_ids):
                return Verdict(True)
            found = [self._find(worker, lease_id) for lease_id in lease_ids]
            leases = [lease for lease, _ in found if lease is not None]
            reasons = [reason for lease, reason in found if lease is None]
            if self._coordinated:
                reasons += [
                    f"lease {lease.portion.lease_id} was not claimed: claim it before its gradient enters a sum"
                    for lease in leases
                    if self._pass_of(lease).claimed.get(lease.portion.portion_id) is not lease
                ]
            if reasons:
                self._counts.wasted += len(leases)
                for lease in leases:
                    self._give_back(lease, why=f"it was delivered with another that was refused: {reasons[0]}")
                return Verdict(False, reasons[0])
            expected = sum(lease.portion.num_examples for lease in leases)
            if example_count != expected:
                raise InvalidArgument(
                    f"worker {worker_id!r} delivers {example_count} examples, but its portions have {expected}:"
                    " deliver whole portions"
                )
            if not self._coordinated:
                worker.computed(leases, now=now)
                # A call of the worker that waits may get a portion of the next pass now.
                self._calls.wake(worker_id)
            elif stage_id or not math.isfinite(loss_sum):
                self._passes[0].stage(leases, stage_id=stage_id, loss_sum=loss_sum)
                worker.gave_at = now
            else:
                raise InvalidArgument(
                    f"worker {worker_id!r} delivers a finite loss without a stage: stage the gradients first"
                )
            self._take_in(worker, leases)
            return Verdict(True)

    def release(self, worker_id: str, *, lost: bool) -> None:
        """Take the portions of a worker that left or was lost."""
        with self._calls.settled():
            if worker := self._workers.pop(worker_id, None):
                self._departed[worker_id] = worker
                self._calls.wake(worker_id)
                self._take_back_all(worker, why=f"worker {worker_id!r} left or was lost", lost=lost)

    # For a coordinator. These raise Superseded if another one attached later.

    def attach(self, coordinator_epoch: int) -> None:
        """Make a coordinator the current one; work that an earlier one had ended continues."""
        self._require_coordinated()
        with self._calls.settled():
            if self._require_latest(coordinator_epoch):
                if self._end_reason is not None:
                    self._calls.note("work continues: another coordinator attached", ended=self._end_reason)
                self._coordinator_epoch, self._end_reason = coordinator_epoch, None
                # Waiting calls of earlier coordinators must raise Superseded.
                self._calls.wake_all()

    def begin_pass(
        self,
        pass_: int,
        *,
        coordinator_epoch: int,
        num_portions: int,
        copies_max: int,
        portions_per_stage: int,
        scalars: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Begin a pass in place of the current one, whose leases end. A repeated call has no effect.

        Raises InvalidArgument unless the pass has a higher number than all before.
        """
        self._require_coordinated()
        with self._calls.settled():
            spec = self._require_open()
            sizes = {"num_portions": num_portions, "copies_max": copies_max, "portions_per_stage": portions_per_stage}
            for name, value in ("pass", pass_), *sizes.items():
                if value < 1:
                    raise InvalidArgument(f"{name} is {value}; expected 1 at least")
            is_new = self._require_latest(coordinator_epoch)
            if self._end_reason is not None and not is_new:
                raise InvalidArgument(
                    f"pass {pass_} cannot begin: the coordinator has ended the work ({self._end_reason})"
                )
            if self._passes and (self.pass_, self._begun_by) == (pass_, coordinator_epoch):
                return
            # A worker with parameters of an earlier pass of that number would compute on them.
            if pass_ <= self.pass_:
                raise InvalidArgument(
                    f"pass {pass_} cannot begin: pass {self.pass_} has begun before; take a higher one"
                )
            division = Division.by_number(spec.num_examples, num_portions)
            self._coordinator_epoch = self._begun_by = coordinator_epoch
            self._end_reason, self._scalars = None, dict(scalars)
            for worker in self._workers.values():
                worker.leases.clear()
            self._begin(WorkPass(pass_, division, copies_max=copies_max, portions_per_stage=portions_per_stage))
            self._calls.wake_all()

    def await_pass(self, pass_: int, *, coordinator_epoch: int, wake: Wake | None = None) -> wire.AwaitPassReply:
        """Return the result of a pass. If it is incomplete, `wake` is called once when that may have changed.

        Pass 0 never begins: its wake function is called when the data set is opened.

        Raises:
            InvalidArgument: It is not the current pass.
            StateLost: It was incomplete when the server's checkpoint was written.
        """
        self._require_coordinated()
        with self._calls.settled():
            self._require_latest(coordinator_epoch)
            outcome = wire.AwaitPassReply(complete=False)
            if pass_:
                if pass_ != self.pass_:
                    raise InvalidArgument(f"pass {pass_} is awaited, but the present one is {self.pass_}: await that")
                if not self._passes:
                    raise StateLost(
                        f"pass {pass_} is not under way: the server was restored from a checkpoint, and its"
                        " stages are gone; begin another pass"
                    )
                outcome = self._passes[0].outcome()
            if wake is not None and not outcome.complete:
                self._calls.watch(wake)
            return outcome

    def end(self, *, coordinator_epoch: int, message: str) -> None:
        self._require_coordinated()
        with self._calls.settled():
            self._require_latest(coordinator_epoch)
            if self._end_reason is None:
                self._calls.note("work ended", reason=message)
            self._coordinator_epoch, self._end_reason = coordinator_epoch, message
            self._calls.wake_all()

    # For the owner.

    def tick(self, now: float) -> None:
        """End leases that others wait for, if their workers have delivered nothing for too long.

        A worker gets three times the time that its own speed predicts. The time doubles whenever the portion is taken
        from a worker, so that a portion that is slow everywhere is completed in the end.
        """
        with self._calls.settled():
            since = self._calls.since(now)
            if since is None:
                return
            for lease in [lease for work_pass in self._passes for lease in work_pass.awaited()]:
                worker, times_stalled = lease.worker, self._pass_of(lease).times_stalled
                if self._calls.names == {worker.worker_id}:
                    # Only itself waits, and its next call names the leases that it knows.
                    continue
                predicted = SLACK * lease.portion.num_examples / worker.speed if worker.speed else 0.0
                patience = math.ldexp(
                    max(self._stall_seconds, predicted), min(times_stalled[lease.portion.portion_id], 32)
                )
                idle = now - max(since, lease.leased_at, worker.gave_at or lease.leased_at)
                if idle >= patience:
                    times_stalled[lease.portion.portion_id] += 1
                    self._counts.lost += 1
                    why = f"worker {worker.worker_id!r} delivered nothing for {idle:.1f} s, and others waited"
                    self._give_back(lease, why=why)
                    facts = {
                        "worker": worker.worker_id,
                        "portion": lease.portion.portion_id,
                        "idle_seconds": round(idle, 1),
                    }
                    self._calls.note("portion taken from a worker that others waited for", warning=True, **facts)

    def waits_for(self, worker_id: str) -> tuple[str, ...]:
        """Return the names of workers whose portions a worker waits for; "the coordinator" between its passes."""
        with self._calls.lock:
            if self.spec is not None and self._coordinated and (not self._passes or self._passes[0].done):
                return ("the coordinator",)
            holders = {lease.worker.worker_id for work_pass in self._passes[:1] for lease in work_pass.awaited()}
            return tuple(sorted(holders - {worker_id} or holders))

    def progress(self, *, deliveries: bool = False) -> wire.WorkProgress:
        """Return the progress, on request with the remembered deliveries."""
        with self._calls.lock:
            progress = wire.WorkProgress(
                data=wire.DataSpec(**asdict(self.spec)) if self.spec else None,
                ahead=sum(later.num_done for later in self._passes[1:]),
                ended=self._end_reason is not None,
                scalars=self._scalars,
                **{"pass": self.pass_, **asdict(self._counts)},
            )
            current = self._passes[0] if self._passes else None
            if current:
                progress.num_portions, progress.done = current.division.num_portions, current.num_done
                progress.running, progress.pending = len(current.running), len(current.pending)
            for name, worker in sorted({**self._workers, **self._departed}.items()):
                done = current.done_by[name] if current else 0
                progress.workers.add(
                    worker_id=name, done=done, running=len(worker.leases), examples_per_second=worker.speed
                )
            for each in self._deliveries.values() if deliveries else ():
                progress.deliveries.add(
                    portion=wire.Portion(**asdict(each.portion)),
                    worker_id=each.worker_id,
                    incarnation=each.incarnation,
                    **{"pass": each.pass_},
                )
            return progress

    def state(self) -> dict[str, Any]:
        """Return all that a restored queue needs, for JSON; leased portions are pending in it."""
        with self._calls.lock:
            # Each name once, and a short list for each delivery.
            names = list(dict.fromkeys(done.worker_id for done in self._deliveries.values()))
            index = {name: place for place, name in enumerate(names)}
            rows = [
                [done.pass_, part.portion_id, part.start, part.stop, lease_id, index[done.worker_id], done.incarnation]
                for lease_id, done in self._deliveries.items()
                for part in [done.portion]
            ]
            epochs = [
                {
                    "portion_examples": work_pass.division.portion_examples,
                    "batch_size": work_pass.batch_size,
                    "unfinished": [list(run) for run in work_pass.unfinished()],
                }
                # A coordinator's pass cannot continue: its stages are lost with the server.
                for work_pass in ([] if self._coordinated else self._passes)
            ]
            return {
                "spec": self.spec and asdict(self.spec),
                "pass": self.pass_,
                "epochs": epochs,
                "next_lease": self._next_lease,
                "coordinator_epoch": self._coordinator_epoch,
                "counts": asdict(self._counts),
                "deliveries": {"workers": names, "rows": rows},
            }

    def restore(self, plain: Mapping[str, Any]) -> None:
        """Continue from `state()`, before any other call. Raises InvalidArgument if it cannot be read."""
        with self._calls.lock:
            try:
                self._restore(plain)
            except InvalidArgument:
                raise
            except (KeyError, TypeError, ValueError, IndexError) as error:
                problem = f"the checkpoint's work queue cannot be read ({type(error).__name__}: {error})"
                raise InvalidArgument(f"{problem}: take another checkpoint") from None

    # The rest is called under the lock, except _require_coordinated.

    def _restore(self, plain: Mapping[str, Any]) -> None:
        self.spec = DataSpec(**plain["spec"]) if plain["spec"] is not None else None
        self.pass_ = int(plain["pass"])
        self._next_lease = max(self._next_lease, int(plain["next_lease"]))
        self._coordinator_epoch = int(plain["coordinator_epoch"])
        self._counts = Counts(**plain["counts"])
        names = plain["deliveries"]["workers"]
        for pass_, portion_id, start, stop, lease_id, place, incarnation in plain["deliveries"]["rows"]:
            portion = Portion(portion_id, start, stop, lease_id)
            self._deliveries[lease_id] = Delivered(pass_, portion, names[place], incarnation)
        if self.spec is None or self.spec.coordinated:
            return
        for number, kept in enumerate(plain["epochs"], start=self.pass_):
            division = Division.by_size(self.spec.num_examples, int(kept["portion_examples"]))
            pending = [(int(start), int(stop)) for start, stop in kept["unfinished"]]
            self._passes.append(WorkPass(number, division, batch_size=int(kept["batch_size"]), pending=pending))
        if not self._passes:
            raise ValueError("there is no pass in it")

    @property
    def _coordinated(self) -> bool:
        # A coordinator may attach before a worker opens the data set.
        return self.spec is None or self.spec.coordinated

    def _require_coordinated(self) -> None:
        spec = self.spec
        if spec is not None and not spec.coordinated:
            raise InvalidArgument(
                f"the workers opened the data set {spec.name!r} for passes without a coordinator: have them"
                " call pyps_client.sandblaster"
            )

    def _require_open(self) -> DataSpec:
        if self.spec is None:
            raise InvalidArgument("no worker has said what the data set is: let one open it first")
        return self.spec

    def _require_latest(self, coordinator_epoch: int) -> bool:
        """Raise Superseded for an earlier coordinator; return whether this one is new."""
        if coordinator_epoch < self._coordinator_epoch:
            raise Superseded(
                f"coordinator {coordinator_epoch} was followed by coordinator {self._coordinator_epoch}: stop this one"
            )
        return coordinator_epoch > self._coordinator_epoch

    def _enter(self, worker_id: str, incarnation: int) -> WorkerProgress:
        """Return the calling worker, without leases of an earlier process. Raises Superseded for an earlier process."""
        known = self._workers.get(worker_id) or self._departed.get(worker_id)
        worker = known or WorkerProgress(worker_id, incarnation)
        if incarnation < worker.incarnation:
            raise Superseded(
                f"a newer process has the name of worker {worker_id!r}: stop this one, or give it another name"
            )
        if incarnation > worker.incarnation:
            # The new process has no portions, but its machine may still have the data.
            worker.measured.clear()
            worker.gave_at, worker.incarnation = None, incarnation
            self._take_back_all(worker, why=f"a newer process has the name of worker {worker_id!r}", lost=True)
        self._departed.pop(worker_id, None)
        self._workers[worker_id] = worker
        return worker

    def _take_back_all(self, worker: WorkerProgress, *, why: str, lost: bool) -> None:
        leases = list(worker.leases.values())
        for lease in leases:
            self._give_back(lease, why=why)
        if lost and leases:
            self._counts.lost += len(leases)
            facts = {"worker": worker.worker_id, "portions": len(leases)}
            self._calls.note("portions of a lost worker go to others", warning=True, **facts)

    def _epoch(self, spec: DataSpec, number: int) -> WorkPass:
        """Return a new epoch, divided by the current settings. Raises InvalidArgument if portions have no size."""
        batch_size = self._batch_size_of(number) or spec.batch_size
        portion_examples = spec.portion_examples or batch_size * max(1, self._accumulate())
        if not portion_examples:
            raise InvalidArgument(
                f"the size of the portions of the data set {spec.name!r} is unknown: give portion_examples or"
                " batch_size, or start the servers with --batch-growth"
            )
        return WorkPass(number, Division.by_size(spec.num_examples, portion_examples), batch_size=batch_size)

    def _begin(self, *passes: WorkPass) -> None:
        self._passes, self.pass_ = list(passes), passes[0].number
        self._departed.clear()
        oldest = self.pass_ - PASSES_REMEMBERED + 1
        self._deliveries = {lease_id: done for lease_id, done in self._deliveries.items() if done.pass_ >= oldest}

    def _answer(self, worker: WorkerProgress, number: int | None, *, passes: int, now: float) -> wire.LeaseReply:
        if not self._coordinated:
            return self._answer_in_epoch(worker, number, passes=passes, now=now)
        if self._end_reason is not None:
            return lease_reply(wire.LeaseReply.OUTCOME_ENDED, self.pass_, message=self._end_reason)
        if self._passes:
            current = self._passes[0]
            portion_id = self._choose(current, worker)
            if portion_id is None:
                portion_id = current.copy_for(worker)
                self._counts.copies += portion_id is not None
            if portion_id is not None:
                return self._give(current, worker, portion_id, now=now)
        return lease_reply(wire.LeaseReply.OUTCOME_NOTHING_NOW, self.pass_)

    def _answer_in_epoch(
        self, worker: WorkerProgress, number: int | None, *, passes: int, now: float
    ) -> wire.LeaseReply:
        spec, current = self._require_open(), self._passes[0]
        if number is not None and number < current.number + current.done:
            return lease_reply(wire.LeaseReply.OUTCOME_PASS_DONE, number)
        if current.done:
            self._begin(self._epoch(spec, current.number + 1))
        # A request for a later pass may get a portion of an earlier one, which no other worker might request.
        last = max(self.pass_, min(self.pass_ + self._epochs_ahead(), passes - 1))
        for number in range(self.pass_, last + 1):
            if number - self.pass_ == len(self._passes):
                self._passes.append(self._epoch(spec, number))
            work_pass = self._passes[number - self.pass_]
            portion_id = self._choose(work_pass, worker)
            if portion_id is not None:
                return self._give(work_pass, worker, portion_id, now=now)
            if any(lease.pass_ == number for lease in worker.leases.values()):
                # It must complete its part of this pass first: a single worker never mixes two.
                break
        return lease_reply(wire.LeaseReply.OUTCOME_NOTHING_NOW, self.pass_)

    def _choose(self, work_pass: WorkPass, worker: WorkerProgress) -> int | None:
        """Return the pending portion that a worker should take; None if none is pending.

        A worker gets consecutive portions, and the same in every pass: it may have their data in memory.
        """
        pending = work_pass.pending
        if not pending:
            return None
        worker.enter(work_pass.number)
        if worker.next_portion is not None and worker.next_portion in pending:
            return worker.next_portion
        if worker.next_portion is None and worker.began_before is not None:
            first = work_pass.division.containing(worker.began_before)
            if first in pending:
                return first
        start, stop = pending.longest()
        # If another worker will come to the start of the range, take the second half.
        taken = any(other.pass_ == work_pass.number and other.next_portion == start for other in self._workers.values())
        return (start + stop) // 2 if taken else start

    def _give(self, work_pass: WorkPass, worker: WorkerProgress, portion_id: int, *, now: float) -> wire.LeaseReply:
        worker.enter(work_pass.number)
        portion = work_pass.division.portion(portion_id, lease_id=self._next_lease)
        lease = Lease(work_pass.number, portion, worker, now, copy=portion_id in work_pass.running)
        self._next_lease += 1
        worker.leases[lease.portion.lease_id] = lease
        work_pass.give(lease)
        worker.next_portion = portion_id + 1
        if worker.began is None and not lease.copy:
            worker.began = portion.start
        following = self._choose(work_pass, worker)
        return lease_reply(
            wire.LeaseReply.OUTCOME_LEASED,
            work_pass.number,
            portion=asdict(portion),
            next=None if following is None else asdict(work_pass.division.portion(following)),
            batch_size=work_pass.batch_size,
            portions_per_stage=work_pass.portions_per_stage,
        )

    def _find(self, worker: WorkerProgress, lease_id: int) -> tuple[Lease | None, str]:
        """Return a worker's lease or, if it has none with that number, the reason.

        Raises InvalidArgument for a number that was never given out.
        """
        if not 0 < lease_id < self._next_lease:
            raise InvalidArgument(
                f"lease {lease_id} was never given out: send the lease_id of the portion that was leased"
            )
        if lease_id in worker.leases:
            return worker.leases[lease_id], ""
        if delivered := self._deliveries.get(lease_id):
            return None, f"lease {lease_id} was delivered by worker {delivered.worker_id!r} before"
        holder = next((other.worker_id for other in self._workers.values() if lease_id in other.leases), None)
        if holder is not None:
            return None, f"lease {lease_id} is worker {holder!r}'s, not {worker.worker_id!r}'s"
        why = self._ends.get(lease_id)
        return None, why or f"lease {lease_id} ended with its pass, or the server was restored since"

    def _pass_of(self, lease: Lease) -> WorkPass:
        return self._passes[lease.pass_ - self.pass_]

    def _give_back(self, lease: Lease, *, why: str) -> None:
        """End a lease without a result, so that another worker may have its portion."""
        self._pass_of(lease).give_back(lease)
        self._end_lease(lease, why=why)
        self._calls.wake(*self._calls.names)

    def _end_lease(self, lease: Lease, *, why: str) -> None:
        del lease.worker.leases[lease.portion.lease_id]
        if why:
            _remember(self._ends, lease.portion.lease_id, why, ENDS_REMEMBERED)

    def _delivered_before(self, worker: WorkerProgress, lease_id: int, *, stage_id: int) -> bool:
        """Return whether this process delivered the lease before, in the same stage if that is remembered."""
        done = self._deliveries.get(lease_id)
        if done is None or (done.worker_id, done.incarnation) != (worker.worker_id, worker.incarnation):
            return False
        if not (self._coordinated and self._passes and done.pass_ == self.pass_):
            return True
        return self._passes[0].stage_of[done.portion.portion_id] == stage_id

    def _take_in(self, worker: WorkerProgress, leases: Sequence[Lease]) -> None:
        """Mark portions as delivered, and passes as done."""
        for lease in leases:
            done = Delivered(lease.pass_, lease.portion, worker.worker_id, worker.incarnation)
            _remember(self._deliveries, lease.portion.lease_id, done, DELIVERIES_REMEMBERED)
            why = f"portion {lease.portion.portion_id} was delivered by worker {worker.worker_id!r} before"
            for other in self._pass_of(lease).deliver(lease):
                self._counts.wasted += other is not lease
                self._end_lease(other, why=why if other is not lease else "")
        while self._passes[0].done:
            self._counts.passes_done += 1
            self._calls.wake_all()
            if len(self._passes) == 1:
                break
            self._begin(*self._passes[1:])


def _remember(newest: dict[int, T], lease_id: int, what: T, most: int) -> None:
    """Add an entry, and remove the oldest if there are more than `most`."""
    newest[lease_id] = what
    if len(newest) > most:
        del newest[next(iter(newest))]
