"""The queue of a data set's portions: each is delivered exactly once a pass, whatever dies.

Nobody waits in here: a worker that gets nothing leaves a wake function, which is called when it is worth asking again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from pyps.work.answers import LeaseAnswer, NothingNow, Progress, Verdict, WorkerShare
from pyps.work.coordinated_queue import CoordinatedQueue
from pyps.work.plain_queue import PlainQueue
from pyps.work.portions import DataSpec
from pyps.work.workers import WaitingCalls, Wake
from pyps_wire.errors import BadRequest

# A worker may take so many times as long as its own speed says before it is taken to be stuck.
SLACK = 3.0


def _tell_nobody(kind: str, what: str, **facts: object) -> None:
    """For queues whose owner has no use for events."""


class WorkQueue:
    """Portions, pass after pass. Every method may be called from any thread; `now` is in seconds of one clock."""

    def __init__(
        self,
        *,
        stall_seconds: float,
        batch_size_of: Callable[[int], int] = lambda epoch: 0,
        accumulate: Callable[[], int] = lambda: 0,
        epochs_ahead: Callable[[], int] = lambda: 0,
        tell: Callable[..., None] = _tell_nobody,
        first_lease: int = 1,
    ) -> None:
        """`batch_size_of(epoch)`: the server's growing minibatch, 0 where it has none. `accumulate()`: minibatches
        that the protocol sums in a push. `epochs_ahead()`: how many passes after the present one free workers may
        begin. All are called under the queue's lock, and may take none.
        `tell(kind, what, **facts)`: notes an event. `first_lease`: above every lease of an earlier process of this
        server, which a checkpoint may not know of.
        """
        self._stall_seconds = stall_seconds
        # It has the lock.
        self._calls = WaitingCalls(tell)
        self._plain = partial(
            PlainQueue, calls=self._calls, batch_size_of=batch_size_of, accumulate=accumulate, epochs_ahead=epochs_ahead
        )
        # A coordinator may come before the workers that say what the data set is.
        self._queue: PlainQueue | CoordinatedQueue = CoordinatedQueue(self._calls, first_lease=first_lease)

    @property
    def spec(self) -> DataSpec | None:
        """The data set, None before a worker named one."""
        return self._queue.spec

    @property
    def pass_(self) -> int:
        """The present pass, from 0."""
        return self._queue.number

    @property
    def coordinator(self) -> CoordinatedQueue:
        """What a coordinator may ask; BadRequest where the workers go through the data without one."""
        if isinstance(self._queue, PlainQueue):
            raise BadRequest(
                f"the workers opened the data set {self._queue.spec.name!r} for passes without a coordinator: have them"
                " call pyps_client.sandblaster"
            )
        return self._queue

    # What workers call.

    def open(self, spec: DataSpec, *, worker_id: str) -> None:
        """Says what the data set is. BadRequest names the first field in which a later word differs from the first."""
        with self._settled() as queue:
            if queue.spec is not None:
                queue.spec.require_same(spec, worker_id=worker_id)
                return
            if spec.coordinated:
                queue.spec = spec
            else:
                plain = self._plain(spec, first_lease=queue.next_lease)
                plain.begin_epoch(0)
                self._queue = plain
            self._calls.wake_all()
            self._calls.note("data set opened", name=spec.name, examples=spec.num_examples, worker=worker_id)

    def announce(self, worker_id: str, call: Wake) -> None:
        """Records a worker's call, by its wake function, in the order in which calls come: it may ask only later."""
        with self._settled():
            self._calls.announce(worker_id, call)

    def forget(self, call: Wake) -> None:
        """Drops a call: it has ended."""
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
        announced: bool = False,
        held: Collection[int] | None = None,
    ) -> LeaseAnswer:
        """Gives a free worker a portion of the pass asked for, or of the present one.

        It may be of a later one where the worker says how many `passes` it goes through: else nobody may come for what
        it leaves of the one after its last.
        With NothingNow, `wake` is kept and called once, when it is worth asking again; one wake function a worker.
        `announced`: the call was, or asks again. WaitTimedOut where it has ended or its worker has asked anew
        elsewhere: what it knows is out of date.
        `held`: the leases that the worker knows of; others of its own go back, as their answers were lost on the way.
        """
        with self._settled() as queue:
            queue.require_open()
            if announced:
                self._calls.ask(worker_id, wake)
            worker = queue.enter(worker_id, incarnation)
            if not announced:
                self._calls.announce(worker_id, wake)
            for lease in list(worker.leases.values()):
                if held is not None and lease.lease_id not in held:
                    queue.give_back(lease, why=f"worker {worker_id!r} asked for work without a word of it")
                    # It begins with them again.
                    worker.enter(lease.pass_)
                    worker.next_portion = lease.portion_id
            answer = queue.answer(worker, pass_, passes=passes, now=now)
            if isinstance(answer, NothingNow):
                self._calls.wait(worker_id, wake, now=now)
            return answer

    def claim(self, worker_id: str, incarnation: int, lease_id: int, *, now: float) -> Verdict:
        """Asks whether a portion's result counts: of several copies the first to ask wins, and does so again."""
        with self._settled() as queue:
            queue.require_open()
            return self.coordinator.claim(queue.enter(worker_id, incarnation), lease_id, now=now)

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
        """Takes in portions whose gradients are pushed or, in coordinated work, claimed and staged.

        All of them count or none. Where one lease was lost the others that are named end too: their sum is of no use.
        """
        with self._settled() as queue:
            queue.require_open()
            worker = queue.enter(worker_id, incarnation)
            if not lease_ids or len(set(lease_ids)) < len(lease_ids):
                raise BadRequest(
                    f"worker {worker_id!r} delivers the leases {list(lease_ids)}; expected one or more, each once"
                )
            if all(queue.delivered_before(worker, lease_id, stage_id=stage_id) for lease_id in lease_ids):
                return Verdict(True)
            found = [queue.find(worker, lease_id) for lease_id in lease_ids]
            leases = [lease for lease, _ in found if lease is not None]
            reason = next((reason for lease, reason in found if lease is None), "") or queue.objection(leases)
            if reason:
                queue.counts.wasted += len(leases)
                for lease in leases:
                    queue.give_back(lease, why=f"it was delivered in one with another that did not count: {reason}")
                return Verdict(False, reason)
            expected = sum(lease.portion.num_examples for lease in leases)
            if example_count != expected:
                raise BadRequest(
                    f"worker {worker_id!r} delivers {example_count} examples, but its portions have {expected}:"
                    " deliver whole portions"
                )
            queue.take_in(worker, leases, stage_id=stage_id, loss_sum=loss_sum, now=now)
            return Verdict(True)

    def release(self, worker_id: str, *, now: float, lost: bool) -> None:
        """Lets a worker go: all that it holds goes back. `lost`: it is taken to be dead, or a later life came."""
        with self._settled() as queue:
            queue.release(worker_id, lost=lost)

    # What the owner calls.

    def tick(self, now: float) -> None:
        """Takes portions away that others wait for and whose workers have given nothing for too long.

        A worker gets three times as long as its own speed says, and twice as long for a portion that was taken away
        before: a portion that is slow everywhere is done in the end.
        """
        with self._settled() as queue:
            since = self._calls.since(now)
            if since is None:
                return
            for lease in [lease for work_pass in queue.passes for lease in work_pass.held()]:
                worker, times_stalled = lease.worker, queue.pass_of(lease).times_stalled
                if self._calls.names == {worker.worker_id}:
                    # It waits for itself, and its next question tells what it knows of.
                    continue
                expected = SLACK * lease.portion.num_examples / worker.speed if worker.speed else 0.0
                patience = math.ldexp(max(self._stall_seconds, expected), min(times_stalled[lease.portion_id], 32))
                idle = now - max(since, lease.leased_at, worker.gave_at or lease.leased_at)
                if idle >= patience:
                    times_stalled[lease.portion_id] += 1
                    queue.counts.lost += 1
                    why = f"worker {worker.worker_id!r} gave nothing for {idle:.1f} s, and others waited"
                    queue.give_back(lease, why=why)
                    facts = {"worker": worker.worker_id, "portion": lease.portion_id, "idle_seconds": round(idle, 1)}
                    self._calls.note("portion taken from a worker that others waited for", warning=True, **facts)

    def waits_for(self, worker_id: str) -> tuple[str, ...]:
        """Whose portions a worker waits for, in order of name; "the coordinator" between its passes."""
        with self._calls.lock:
            return self._queue.waits_for(worker_id)

    def progress(self, *, deliveries: bool = False) -> Progress:
        """Where the work stands; with the deliveries that are remembered where they are asked for."""
        with self._calls.lock:
            queue, present = self._queue, self._queue.present
            workers = [
                WorkerShare(
                    name,
                    done=present.done_by[name] if present else 0,
                    running=len(worker.leases),
                    examples_per_second=worker.speed,
                )
                for name, worker in sorted({**queue.workers, **queue.departed}.items())
            ]
            return Progress(
                queue.spec,
                queue.number,
                **asdict(queue.counts),
                num_portions=present.cut.num_portions if present else 0,
                done=present.num_done if present else 0,
                running=len(present.running) if present else 0,
                pending=len(present.pending) if present else 0,
                ahead=sum(later.num_done for later in queue.passes[1:]),
                workers=tuple(workers),
                deliveries=tuple(queue.deliveries.values()) if deliveries else (),
                ended=queue.end_reason is not None,
                scalars=queue.scalars,
            )

    def state(self) -> dict[str, Any]:
        """All that a restored queue needs, as JSON; portions that are with workers count as pending."""
        with self._calls.lock:
            return self._queue.to_json()

    def restore(self, plain: Mapping[str, Any]) -> None:
        """Goes on where `state()` stood, before anybody asks. BadRequest where it is no state."""
        with self._calls.lock:
            first_lease = self._queue.next_lease
            queue: PlainQueue | CoordinatedQueue = CoordinatedQueue(self._calls, first_lease=first_lease)
            try:
                spec = DataSpec(**plain["spec"]) if plain["spec"] is not None else None
                if spec is not None and not spec.coordinated:
                    queue = self._plain(spec, first_lease=first_lease)
                queue.spec = spec
                queue.restore(plain)
            except BadRequest:
                raise
            except (KeyError, TypeError, ValueError, IndexError) as error:
                raise BadRequest(
                    f"the checkpoint's work queue cannot be read ({type(error).__name__}: {error}):"
                    " take another checkpoint"
                ) from None
            self._queue = queue

    # Helpers.

    @contextmanager
    def _settled(self) -> Iterator[PlainQueue | CoordinatedQueue]:
        """The queue of either kind under the lock, after which calls are woken."""
        with self._calls.settled():
            yield self._queue
