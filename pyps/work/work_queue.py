"""The queue of a data set's portions: each is delivered exactly once a pass, whatever dies.

Two kinds of work. *Plain* work (Downpour, ASGD): a pass is an epoch; the next opens when every portion is delivered
and somebody asks for it, or earlier for a worker that finds nothing left; a portion is with one worker at a time.
Passes are complete one after the other, each when its last portion is delivered. *Coordinated* work (Sandblaster,
Dean et al. 2012, section 4.2): a coordinator begins each pass, a result must be claimed before it counts, and near the
end of a pass several workers get the same portion.

Nobody waits in here: a worker that gets nothing leaves a wake function, which is called when it is worth asking again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any

from pyps.work.answers import Claim, Delivery, LeaseAnswer, NothingNow, PassOutcome, Progress
from pyps.work.crew import Hand
from pyps.work.data_spec import DataSpec
from pyps.work.portions import Cut
from pyps.work.waiting import Wake
from pyps.work.work_pass import WorkPass
from pyps.work.work_state import WorkState
from pyps_wire.errors import BadRequest, StateLost, Superseded

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
        self._tell = tell
        self._lock = Lock()
        # Guarded by _lock.
        self._state = WorkState(
            batch_size_of=batch_size_of, accumulate=accumulate, epochs_ahead=epochs_ahead, first_lease=first_lease
        )

    @property
    def spec(self) -> DataSpec | None:
        """The data set, None before a worker named one."""
        return self._state.spec

    @property
    def pass_(self) -> int:
        """The present pass, from 0."""
        return self._state.number

    # What workers call.

    def open(self, spec: DataSpec, *, worker_id: str) -> None:
        """Says what the data set is. BadRequest names the first field in which a later word differs from the first."""
        with self._settled() as state:
            if state.spec is not None:
                state.spec.require_same(spec, worker_id=worker_id)
                return
            if not spec.coordinated:
                state.begin_plain(spec, 0)
            state.spec = spec
            state.due += state.waiting.all()
            self._note("data set opened", name=spec.name, examples=spec.num_examples, worker=worker_id)

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
        again: bool = False,
        announced: Wake | None = None,
    ) -> LeaseAnswer:
        """Gives a free worker a portion of the pass asked for, or of the present one.

        It may be of a later one where the worker says how many `passes` it goes through: else nobody may come for what
        it leaves of the one after its last.
        With NothingNow, `wake` is kept and called once, when it is worth asking `again`; one wake function a worker.
        `held`: the leases that the worker knows of; others of its own go back, as their answers were lost on the way.
        `announced`: the call, where it was. WaitTimedOut to a call that asks after it ended, or its worker asked anew
        elsewhere: what it knows is out of date.
        """
        with self._settled() as state:
            self._require_open()
            if announced is not None:
                state.waiting.require_last(worker_id, announced)
            hand = self._enter(worker_id, incarnation)
            state.due += state.waiting.ask(worker_id, wake, again=again)
            if held is not None and not again:
                state.take_back_unknown(hand, held)
            answer = state.answer(hand, pass_, passes=passes, now=now)
            if isinstance(answer, NothingNow):
                state.waiting.wait(worker_id, wake, now=now)
            return answer

    def announce(self, worker_id: str, call: Wake) -> None:
        """Takes note of a worker's call in the order in which calls come: it may ask later, on another thread."""
        with self._settled() as state:
            state.due += state.waiting.announce(worker_id, call)

    def forget(self, wake: Wake) -> None:
        """Drops a call, by its wake function: it has ended."""
        with self._lock:
            self._state.waiting.forget(wake)

    def claim(self, worker_id: str, incarnation: int, lease_id: int, *, now: float) -> Claim:
        """Asks whether a portion's result counts: of several copies the first to ask wins, and does so again."""
        with self._settled() as state:
            if not self._require_open().coordinated:
                raise BadRequest(f"lease {lease_id} needs no claim: no coordinator begins the passes; deliver it")
            hand = self._enter(worker_id, incarnation)
            lease, reason = state.lease_of(hand, lease_id)
            if lease is None:
                return Claim(False, reason)
            assert state.work_pass is not None
            task = state.work_pass.tasks[lease.portion_id]
            if task.winner is lease:
                return Claim(True)
            state.computed(hand, [lease], now=now)
            if task.winner is not None:
                state.counts.wasted += 1
                return Claim(False, state.work_pass.beaten(lease))
            task.winner = lease
            state.counts.stolen += lease.copy and len(task.computing) > 1
            return Claim(True)

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
    ) -> Delivery:
        """Takes in portions whose gradients are pushed or, in coordinated work, claimed and staged.

        All of them count or none. Where one lease was lost the others that are named end too: their sum is of no use.
        """
        with self._settled() as state:
            spec = self._require_open()
            hand = self._enter(worker_id, incarnation)
            if not lease_ids or len(set(lease_ids)) < len(lease_ids):
                raise BadRequest(
                    f"worker {worker_id!r} delivers the leases {list(lease_ids)}; expected one or more, each once"
                )
            if all(state.delivered_before(hand, lease_id, stage_id=stage_id) for lease_id in lease_ids):
                return Delivery(True)
            found = [state.lease_of(hand, lease_id) for lease_id in lease_ids]
            leases = [lease for lease, _ in found if lease is not None]
            reason = next((reason for lease, reason in found if lease is None), "")
            if spec.coordinated and not reason:
                reason = state.unclaimed(leases)
            if reason:
                state.counts.wasted += len(leases)
                for lease in leases:
                    state.give_back(lease, why=f"it was delivered in one with another that did not count: {reason}")
                return Delivery(False, reason)
            state.check_delivery(hand, leases, stage_id=stage_id, loss_sum=loss_sum, example_count=example_count)
            state.take_in(hand, leases, stage_id=stage_id, loss_sum=loss_sum, now=now)
            return Delivery(True)

    def release(self, worker_id: str, *, now: float, lost: bool) -> None:
        """Lets a worker go: all that it holds goes back. `lost`: it is taken to be dead, or a later life came."""
        with self._settled() as state:
            hand = state.crew.get(worker_id)
            if hand is None:
                return
            state.crew.leave(hand)
            state.due += state.waiting.leave(worker_id)
            self._take_back_all(hand, why=f"worker {worker_id!r} was taken to be gone", lost=lost)

    # What the coordinator calls.

    def attach(self, coordinator_epoch: int) -> None:
        """Makes a coordinator the only one, in place of any before it; work that one of those had ended goes on.

        Superseded for an earlier coordinator.
        """
        with self._settled() as state:
            if not self._require_coordinator(coordinator_epoch):
                return
            if state.end is not None:
                self._note("work goes on: another coordinator came", ended=state.end)
            state.coordinator_epoch, state.end = coordinator_epoch, None
            # Those before it that wait hear that they are.
            state.due += state.waiting.all()

    def begin_pass(
        self,
        pass_: int,
        *,
        coordinator_epoch: int,
        num_portions: int,
        copies_max: int,
        portions_per_stage: int,
        scalars: Mapping[str, float] | None = None,
        now: float,
    ) -> None:
        """Begins a pass in place of the present one, whose leases end. The same one again does nothing.

        Superseded for an earlier coordinator; BadRequest for a pass that does not come after those before.
        """
        with self._settled() as state:
            spec = self._require_open()
            if not spec.coordinated:
                raise BadRequest(
                    f"pass {pass_} cannot begin: the workers opened the data set {spec.name!r} for passes without a"
                    " coordinator; have them call pyps_client.sandblaster"
                )
            sizes = {
                "pass": pass_,
                "num_portions": num_portions,
                "copies_max": copies_max,
                "portions_per_stage": portions_per_stage,
            }
            for name, value in sizes.items():
                if value < 1:
                    raise BadRequest(f"{name} is {value}; expected 1 at least")
            came_back = self._require_coordinator(coordinator_epoch)
            if state.end is not None and not came_back:
                raise BadRequest(f"pass {pass_} cannot begin: the coordinator has ended the work ({state.end})")
            if state.work_pass is not None and (state.number, state.begun_by) == (pass_, coordinator_epoch):
                return
            # A worker that has parameters of a pass by that number would compute on them.
            if pass_ <= state.number:
                raise BadRequest(f"pass {pass_} cannot begin: pass {state.number} has begun before; take a higher one")
            state.coordinator_epoch, state.end, state.scalars = coordinator_epoch, None, dict(scalars or {})
            state.begun_by = coordinator_epoch
            cut = Cut.by_number(spec.num_examples, num_portions)
            state.begin(WorkPass(pass_, cut, copies_max=copies_max, portions_per_stage=portions_per_stage))
            state.due += state.waiting.all()

    def await_pass(self, pass_: int, *, coordinator_epoch: int, now: float, wake: Wake | None = None) -> PassOutcome:
        """Tells what a pass came to. While it goes on, `wake` is kept and called once, when it is worth asking again.

        Pass 0 never begins: who awaits it is woken when the data set is opened. BadRequest for another
        pass than the present one, StateLost for one that was under way when the server's checkpoint was written.
        """
        with self._settled() as state:
            self._require_coordinator(coordinator_epoch)
            if pass_ == 0:
                if wake is not None:
                    state.waiting.watch(wake)
                return PassOutcome(complete=False)
            if pass_ != state.number:
                raise BadRequest(f"pass {pass_} is awaited, but the present one is {state.number}: await that")
            if state.work_pass is None:
                raise StateLost(
                    f"pass {pass_} is not under way: the server came back from a checkpoint, and what was staged is"
                    " gone; begin another pass"
                )
            outcome = state.work_pass.outcome()
            if not outcome.complete and wake is not None:
                state.waiting.watch(wake)
            return outcome

    def end(self, *, coordinator_epoch: int, message: str) -> None:
        """Ends the work: every worker that asks hears so."""
        with self._settled() as state:
            if state.spec is not None and not state.spec.coordinated:
                raise BadRequest(f"the data set {state.spec.name!r} has no coordinator who could end its work")
            self._require_coordinator(coordinator_epoch)
            if state.end is None:
                self._note("work ended", reason=message)
            state.coordinator_epoch, state.end = coordinator_epoch, message
            state.due += state.waiting.all()

    # What the owner calls.

    def tick(self, now: float) -> None:
        """Takes portions away that others wait for and whose workers have given nothing for too long.

        A worker gets three times as long as its own speed says, and twice as long for a portion that was taken away
        before: a portion that is slow everywhere is done in the end.
        """
        with self._settled() as state:
            since = state.waiting.since(now)
            if since is None:
                return
            for lease in [lease for work_pass in state.passes for lease in work_pass.held()]:
                work_pass = state.pass_of(lease)
                hand = state.crew.get(lease.worker_id)
                assert hand is not None
                if state.waiting.names == {hand.worker_id}:
                    # It waits for itself, and its next question tells what it knows of.
                    continue
                expected = SLACK * work_pass.portion(lease).num_examples / hand.speed if hand.speed else 0.0
                patience = work_pass.patience(lease, seconds=max(self._stall_seconds, expected))
                idle = now - max(since, lease.leased_at, hand.gave_at or lease.leased_at)
                if idle >= patience:
                    work_pass.stalled(lease)
                    state.give_back(
                        lease, why=f"worker {hand.worker_id!r} gave nothing for {idle:.1f} s, and others waited"
                    )
                    state.counts.lost += 1
                    facts = {"worker": hand.worker_id, "portion": lease.portion_id, "idle_seconds": round(idle, 1)}
                    self._note("portion taken from a worker that others waited for", warning=True, **facts)

    def waits_for(self, worker_id: str) -> tuple[str, ...]:
        """Whose portions a worker waits for, in order of name; "the coordinator" between its passes."""
        with self._lock:
            spec, work_pass = self._state.spec, self._state.work_pass
            if work_pass is None or work_pass.done:
                return ("the coordinator",) if spec is not None and spec.coordinated else ()
            holders = work_pass.holders()
            return tuple(sorted(holders - {worker_id} or holders))

    def progress(self, *, deliveries: bool = False) -> Progress:
        """Where the work stands; with the deliveries that are remembered where they are asked for."""
        with self._lock:
            return self._state.progress(deliveries=deliveries)

    def state(self) -> dict[str, Any]:
        """All that a restored queue needs, as JSON; portions that are with workers count as pending."""
        with self._lock:
            return self._state.to_json()

    def restore(self, plain: Mapping[str, Any]) -> None:
        """Goes on where `state()` stood, before anybody asks. BadRequest where it is no state."""
        try:
            with self._lock:
                self._state.restore(plain)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise BadRequest(
                f"the checkpoint's work queue cannot be read ({type(error).__name__}: {error}): take another checkpoint"
            ) from None

    # Helpers.

    @contextmanager
    def _settled(self) -> Iterator[WorkState]:
        """The state under the lock; then, without it, calls those that are to be called."""
        due: list[Callable[[], object]] = []
        try:
            with self._lock:
                try:
                    yield self._state
                finally:
                    due, self._state.due = self._state.due, []
        finally:
            for call in due:
                call()

    def _note(self, what: str, **facts: object) -> None:
        self._state.due.append(partial(self._tell, "work", what, **facts))

    def _enter(self, worker_id: str, incarnation: int) -> Hand:
        """The worker that calls; what an earlier process of its name held goes back."""
        hand, renewed = self._state.crew.enter(worker_id, incarnation)
        if renewed:
            self._take_back_all(hand, why=f"a newer process goes by the name of worker {worker_id!r}", lost=True)
        return hand

    def _take_back_all(self, hand: Hand, *, why: str, lost: bool) -> None:
        portions = self._state.take_back_all(hand, why=why)
        if lost and portions:
            self._state.counts.lost += portions
            self._note("portions of a lost worker go to others", warning=True, worker=hand.worker_id, portions=portions)

    def _require_open(self) -> DataSpec:
        if self._state.spec is None:
            raise BadRequest("no worker has said what the data set is: let one open it first")
        return self._state.spec

    def _require_coordinator(self, coordinator_epoch: int) -> bool:
        """Whether the coordinator is a later one than those before; Superseded for an earlier one."""
        present = self._state.coordinator_epoch
        if coordinator_epoch < present:
            raise Superseded(f"coordinator {coordinator_epoch} was followed by coordinator {present}: stop this one")
        return coordinator_epoch > present
