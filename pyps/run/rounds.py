"""The protocol at work: pushes, rounds, steps, stalls and the behaviour in force."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, ParamSpec, TypedDict, Unpack, cast

from pyps.core import protocols, rules, schedule, staleness
from pyps.core.behaviour import Behaviour
from pyps.core.bounds import Bounds
from pyps.core.effects import Effects, Wake, wake_all
from pyps.core.gradient import (
    NATIVE,
    Finding,
    Gradient,
    PayloadKind,
    PublishedReply,
    PushPlan,
    made_native,
    require_kind,
    require_possible_version,
    require_rate,
    scan,
)
from pyps.core.membership import Membership
from pyps.core.pacing import Free, StepGate
from pyps.core.receipt import Outcome, Reason, Receipt
from pyps.core.recorder import Recorder
from pyps.core.roster import Roster
from pyps.core.schedule import Constant
from pyps.core.store import PendingBudget, Pushed, Store
from pyps.core.table import TableBudget, TableShard
from pyps.core.update import Update
from pyps.run.content import ReadyContent
from pyps.run.handshake import check_codec
from pyps.run.observers import Events
from pyps.run.positions import Positions
from pyps.statistics import Statistics
from pyps_wire.errors import InvalidArgument, ScheduleOwned
from pyps_wire.rows import bucket_of

if TYPE_CHECKING:
    from pyps.config import ServerConfig

P = ParamSpec("P")


class Changes(TypedDict, total=False):
    """Settings to change while a run goes on; "" and None for those that stay."""

    protocol: str
    staleness: str
    schedule: str
    learning_rate: float | None


@dataclass(frozen=True)
class Settled:
    """The number of waiting gradients that a change of the protocol settled, and of the updates that it made."""

    gradients: int
    updates: int


class RoundController:
    """Applies the protocol to pushes, steps and changes of the membership. Every method may be called from any thread.

    Methods that complete rounds or settle gradients run kernels under shards' locks: not for the event loop.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        membership: Membership,
        statistics: Statistics,
        events: Events,
        clock: Callable[[], float],
        recorder: Recorder | None,
    ):
        self.config = config
        # None where no push is written to a log.
        self.recorder = recorder
        # Whether a standby follows the shards.
        self.followed = False
        self._membership = membership
        self._statistics = statistics
        self._events = events
        self._clock = clock
        # None for no bounds.
        self._bounds = Bounds.parse(config.bounds) if config.bounds else None
        self.pending = PendingBudget(config.max_pending_bytes)
        self.tables = TableBudget(config.max_table_bytes)
        self.owner = ScheduleOwner()
        self.positions = Positions()
        self.steps = StepGate()
        # Held for one call of the gate of steps; no other lock is taken meanwhile.
        self._steps_lock = Lock()
        # True where gradients came with a count of their examples, False where some came without.
        self._counted = set[bool]()
        # Called for a worker that is gone: its id, and True where it was lost rather than left.
        self.on_gone: Callable[[str, bool], None] = lambda worker_id, lost: None
        # Called after an update with its shard; None for no call.
        self.on_update: Callable[[Store], None] | None = None
        self._overdue_lock = Lock()
        # Guarded by _overdue_lock: by shard, a version whose round has a quorum, and when its grace ends.
        self._overdue: dict[int, tuple[int, float]] = {}
        # By shard, the version that its newest round with a gradient that was sent again makes.
        self._made_again: dict[int, int] = {}
        # Held for one change, or one check of all rounds, at a time; taken before any shard's lock.
        self._lock = Lock()
        # Guarded by _lock; read without it, since each is replaced as a whole.
        self.behaviour = config.behaviour
        self._content: ReadyContent | None = None
        # The roster with which rounds were last completed.
        self._roster = Roster()
        # The workers that rounds waited for until they were last completed without a push.
        self.left_out: tuple[str, ...] = ()
        # How often settings were changed.
        self.num_changes = 0
        # The warnings that were logged last.
        self._warned: tuple[str, ...] = ()

    def begin(self, content: ReadyContent, *, former_workers: int = 0) -> None:
        """Serve these shards from now on; of a restored run so many workers are known to have been active."""
        with self._lock:
            self._content = content
            self._made_again.clear()
            if content.initializer is None and (former_workers or not self._membership.expected_workers):
                # Workers that had pushed to a round before the server ended will probably return. Where they send again
                # what no checkpoint holds, each round must have all of them.
                former: dict[int, set[str]] = {}
                again = self.config.resends and self.behaviour.aggregation.barrier
                for shard_id, shard in content.shards.items():
                    workers = shard.workers_of_round() if again else shard.contributors()
                    former.setdefault(content.parts[shard_id], set()).update(workers)
                # A replica pushes to each part of the model by one of its processes.
                self._membership.expect(max([former_workers, *map(len, former.values())]), said=False)
            self._renew_pacer(content)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about the behaviour with the active workers, in sentences."""
        return self._warnings_with(self._membership.roster.num_expected)

    @property
    def warnings_of_a_change(self) -> tuple[str, ...]:
        """The same after a change of settings; with the expected or known workers where none is active."""
        members = len(self._membership.names())
        return self._warnings_with(self._membership.roster.num_expected or self._membership.expected_workers or members)

    def _warnings_with(self, num_workers: int) -> tuple[str, ...]:
        behaviour = self.behaviour
        warnings = behaviour.aggregation.warnings(num_workers) if num_workers else ()
        # A server of a small model may hold none of its shards.
        shard = self._content.first if self._content is not None else None
        weighting = behaviour.aggregation.at(shard.version).weighting if shard else "equal"
        if weighting != "equal" and self._counted == {True, False}:
            warnings += (_COUNTS_DIFFER,)
        if weighting == "by_speed" and self._counted == {False}:
            warnings += (_NO_EXAMPLES.format("weighting=by_speed does not act: all have equal shares"),)
        if behaviour.counts_epochs and shard and shard.version >= UPDATES_BEFORE_DOUBT and not shard.examples:
            what = "the growth of the minibatch" if behaviour.batch_growth else "the schedule by epochs"
            warnings += (_NO_EXAMPLES.format(f"{what} does not move"),)
        return warnings

    @property
    def batch_size(self) -> int:
        """The present minibatch of the schedule; 0 if it has none or the run has not begun."""
        shard, growth = self._content.first if self._content is not None else None, self.behaviour.batch_growth
        return growth.size(shard.examples) if shard is not None and growth else 0

    def roster_of(self, shard_id: int) -> Roster:
        """Return the workers, or processes of replicas, that are active and hold a shard's part of the model."""
        # A call that waits may name a shard of a run that was reset.
        parts = self._content.parts if self._content is not None else {}
        return self._membership.roster.of_part(parts.get(shard_id, 0))

    # Pushes.

    def push(self, content: ReadyContent, plan: PushPlan, *, finding: Finding | None = None) -> Pushed:
        """Handle one pushed shard; see `Shard.push`."""
        began, sent = self._clock(), plan
        shard, plan, finding = self._checked(content, plan, finding)
        gradient = plan.gradient
        if (gradient.learning_rate is not None or gradient.momentum is not None) and gradient.schedules:
            # Checked first: a caller without the secret must not own the schedule even for a moment.
            self._membership.require_own(gradient.worker_id, gradient.incarnation, plan.secret)
            with self._claiming(gradient) as receipts:
                roster = self._note_push(plan, now=began)
                pushed = self._apply(content, shard, plan, roster, finding)
                receipts.append(pushed.receipt)
        else:
            # Not in a context that does nothing: it would cost two of a small push's fifteen microseconds.
            roster = self._note_push(plan, now=began)
            pushed = self._apply(content, shard, plan, roster, finding)
        # Its payload has the size in which it came.
        self._after_push(content, shard, sent, pushed, roster, began=began)
        return pushed

    def push_whole(
        self, content: ReadyContent, plans: Sequence[PushPlan], *, finding: Finding | None = None
    ) -> list[Pushed]:
        """Handle the parts of a push as one, under the model's mutex; return the result of each, in order.

        The parameters in all replies are one state of the model. Raises as `Shard.push`; no part is applied then. A
        refused part does not keep the others from being applied.
        """
        began, roster = self._clock(), self._membership.roster
        checked = [self._checked(content, plan, finding) for plan in plans]
        for shard, plan, _ in checked:
            require_kind(plan.gradient, shard_id=plan.shard_id, kind=shard.kind)
            self._membership.require_own(plan.gradient.worker_id, plan.gradient.incarnation, plan.secret)
        gradients = [plan.gradient for plan in plans]
        with self._claiming(next((each for each in gradients if each.schedules), gradients[0])) as receipts:
            for plan in plans:
                roster = self._note_push(plan, now=began)
            with content.mutex:
                for shard, plan, _ in checked:
                    if plan.gradient.epoch == shard.epoch and plan.gradient.resent_staleness is None:
                        require_possible_version(plan.gradient, shard_id=plan.shard_id, version=shard.version)
                    if plan.memory is not None:
                        plan.memory.require_attached()
                # All parts or none: memory that is detached after this point is still read to the end.
                pushed = [
                    self._apply(content, shard, plan._replace(memory=None), roster, found)
                    for shard, plan, found in checked
                ]
            receipts += [each.receipt for each in pushed]
        for plan, (shard, _, _), each in zip(plans, checked, pushed, strict=True):
            self._after_push(content, shard, plan, each, roster, began=began)
        return pushed

    def _checked(
        self, content: ReadyContent, plan: PushPlan, finding: Finding | None
    ) -> tuple[Store, PushPlan, Finding]:
        """Check a push; return its shard, the push in a codec of the kernels, and the result of the scan."""
        shard_id, gradient = plan.shard_id, plan.gradient
        shard = content.shards.get(shard_id) or content.shard(shard_id)
        if gradient.codec.sparse:
            # A schedule may have raised it since the worker's Hello, or may now.
            rule = content.settings.rule
            sent = {rules.find(rule).momentum_name: gradient.momentum or 0.0}
            check_codec(gradient.codec, gradient.worker_id, rule, (sent, shard.hyperparameters))
        # Where gradients wait, sparse ones stay small until they are merged.
        waits = gradient.codec.sparse and self.behaviour.aggregation.at(shard.version).merge
        if not waits and (gradient.codec not in NATIVE or gradient.extents):
            gradient = made_native(gradient, shard_id=shard_id, shard_length=shard.length)
        if gradient.volatile and (self.recorder is not None or self.followed):
            # Log and standby must have exactly the bits applied, so the copy is scanned, unless the push is refused
            # anyway.
            gradient = gradient.private()
            finding = None if finding is None or finding.finite else finding
        if finding is None:
            finding = scan(gradient, shard_id=shard_id, shard_length=shard.length)
        if gradient.num_rows and shard.has_rows:
            _require_own(cast(TableShard, shard), gradient)
        if self._bounds is not None:
            self._bounds.require_push(gradient, shard.length)
        if self._membership.parted:
            self._membership.require_part(gradient.worker_id, shard_id, content.parts[shard_id])
        return shard, plan if gradient is plan.gradient else plan._replace(gradient=gradient), finding

    def _apply(self, content: ReadyContent, shard: Store, plan: PushPlan, roster: Roster, finding: Finding) -> Pushed:
        return shard.push(
            plan.gradient,
            roster=roster if roster.parted is None else roster.of_part(content.parts[plan.shard_id]),
            reply=plan.reply,
            held_version=plan.held_version,
            memory=plan.memory,
            finding=finding,
        )

    @contextmanager
    def _claiming(self, gradient: Gradient) -> Iterator[list[Receipt]]:
        """Make a worker that sends rates the owner of the schedule, for good if one of its gradients is taken.

        Yield the list for the receipts. Raise ScheduleOwned where another worker is the owner, or the server has a
        schedule.
        """
        receipts: list[Receipt] = []
        if not gradient.schedules:
            yield receipts
            return
        name, schedule = self._membership.name_of(gradient.worker_id), self.behaviour.schedule.text
        if schedule != Constant.name:
            raise ScheduleOwned(
                f"worker {name!r} sent a learning rate, but this server has a schedule of its own "
                f"({schedule}): drop --schedule on the server, or the scheduler in the worker"
            )
        claim = self.owner.claim(name)
        try:
            yield receipts
        finally:
            # A dropped push sets the rate too.
            if self.owner.settle(claim, taken=any(map(_is_taken, receipts))):
                self._events.add("owner", "worker owns the schedule of the learning rate", worker=name)

    def _note_push(self, plan: PushPlan, *, now: float) -> Roster:
        """Note a worker's push in the membership; return the roster with that worker."""
        gradient, secret = plan.gradient, plan.secret
        worker_id, incarnation, clock = gradient.worker_id, gradient.incarnation, gradient.clock
        roster = self._membership.pushed_again(worker_id, incarnation, now=now, clock=clock, secret=secret)
        if roster is None:
            roster, effects = self._membership.pushed(
                worker_id, incarnation, now=now, clock=clock or None, secret=secret
            )
            self.carry_out(effects)
        if plan.data_position and (member := self._membership.get(worker_id)) is not None:
            self.positions.note(worker_id, member.info.index, incarnation, gradient.sequence, plan.data_position)
        if self.steps.pacer is not None and self.steps.pacer.missing:
            # The worker computes already, so the gate need not wait for its first request.
            self.at_gate(self.steps.excuse, [self._membership.name_of(worker_id)])
        return roster

    def _after_push(
        self, content: ReadyContent, shard: Store, plan: PushPlan, pushed: Pushed, roster: Roster, *, began: float
    ) -> None:
        gradient, (receipt, version, update), now = plan.gradient, pushed, self._clock()
        reply, answer_bytes = plan.reply, 0
        if reply is not None and version is not None:
            if isinstance(reply, PublishedReply):
                answer_bytes = reply.num_bytes
            else:
                answer_bytes = reply.codec.max_bytes(shard.length)
        self._statistics.pushed(
            gradient.worker_id,
            shard.shard_id,
            receipt,
            payload_bytes=len(gradient.payload),
            incarnation=gradient.incarnation,
            answer_bytes=answer_bytes,
            update=update,
            now=now,
            apply_seconds=now - began,
        )
        if gradient.resent_staleness is not None and receipt.outcome is Outcome.PENDING:
            self._made_again[shard.shard_id] = receipt.min_version
        if receipt.duplicate:
            return
        if plan.data_position and not _is_taken(receipt):
            self.positions.withdraw(gradient.worker_id, gradient.incarnation, gradient.sequence)
        if _is_taken(receipt):
            effects = self._membership.taken(gradient.worker_id, gradient.incarnation, now=now)
            if effects.notices:
                self.carry_out(effects)
        if gradient.kind != PayloadKind.NOTHING:
            self._counted.add(gradient.example_count > 0)
        if update is not None:
            self._version_grew(shard, receipt.version_after)
        elif receipt.outcome is Outcome.PENDING:
            if self._membership.roster is not roster:
                # A worker left meanwhile, and the rounds were completed before this push arrived.
                self._complete(content, shard, self._membership.roster)
            else:
                self._note_quorum(content, shard, roster)

    # Effects of membership and steps.

    def carry_out(self, effects: Effects) -> None:
        """Carry out the effects of an event. Call `complete_rounds` next where workers may be gone."""
        for kind, what, facts, warning in effects.notices:
            self._events.add(kind, what, warning=warning, **facts)
        for worker_id, lost in effects.gone:
            self.on_gone(worker_id, lost)
        if effects.departed:
            self.left_out = effects.departed
        for name in effects.departed:
            # No other worker waits for its next step any more.
            self.at_gate(self.steps.depart, name)
            if self.owner.release(name):
                self._events.add("owner", "the schedule of the learning rate has no owner now", worker=name)
        for name in effects.set_aside:
            self.at_gate(self.steps.set_aside, name)
        if effects.opens_gate:
            self.at_gate(self.steps.expect, 0)
        wake_all(effects.wakes)

    def at_gate(self, event: Callable[P, Effects], *arguments: P.args, **named: P.kwargs) -> None:
        """Call a method of the gate of steps under its lock, and carry out the effects."""
        with self._steps_lock:
            effects = event(*arguments, **named)
        self.carry_out(effects)

    def may_proceed(self, worker_id: str, *, clock: int, wake: Wake) -> bool:
        """Return whether the worker may begin the step after `clock` steps; if not, `wake` says when to ask again."""
        name = self._membership.name_of(worker_id)
        with self._steps_lock:
            granted, effects = self.steps.ask(name, clock, wake)
        self.carry_out(effects)
        return granted

    def complete_rounds(self) -> None:
        """Make the updates that are due since the roster has changed."""
        with self._lock:
            content, before, roster = self._content, self._roster, self._membership.roster
            if content is None or roster is before:
                return
            self._roster = roster
            updates = sum(self._complete(content, shard, roster) for shard in content.shards.values())
        gone = ", ".join(sorted({*before.workers} - {*roster.workers}))
        if updates:
            if not self.behaviour.aggregation.barrier:
                what = "gradients that waited became updates, as fewer workers are active"
            elif gone:
                what = "rounds were completed without a worker that others waited for"
            else:
                what = "rounds were completed without workers that were expected"
            self._events.add("round", what, worker=gone, shards=updates, workers=roster.num_workers)

    def _note_quorum(self, content: ReadyContent, shard: Store, roster: Roster) -> None:
        """Let a shard's round wait for the protocol's grace from now on, if it has just got a quorum."""
        version = shard.version
        protocol = self.behaviour.aggregation.at(version)
        if not (protocol.grace and protocol.has_quorum(shard.num_pending, content.roster_of(shard.shard_id, roster))):
            return
        with self._overdue_lock:
            if self._overdue.get(shard.shard_id, (-1, 0.0))[0] != version:
                self._overdue[shard.shard_id] = version, self._clock() + protocol.grace

    def _complete_overdue(self) -> None:
        """Make the updates whose quorum has waited for the protocol's grace, without the workers that are late."""
        now = self._clock()
        with self._lock:
            content, roster = self._content, self._membership.roster
            with self._overdue_lock:
                over = {shard_id: version for shard_id, (version, at) in self._overdue.items() if at <= now}
                for shard_id in over:
                    del self._overdue[shard_id]
            if content is None:
                return
            for shard_id, version in over.items():
                shard, of_part = content.shards.get(shard_id), content.roster_of(shard_id, roster)
                if shard is None or shard.version != version:
                    continue
                if self.behaviour.aggregation.at(version).has_quorum(shard.num_pending, of_part):
                    # The log says who was there, so that a replay makes the same update.
                    present = tuple(sorted(shard.contributors()))
                    self.left_out = tuple(sorted({*of_part.workers} - {*present}))
                    # A late push may have completed the round meanwhile: the next one has its own grace.
                    self._updated(shard, shard.complete(Roster(present), version=version))

    def _find_stalls(self, now: float) -> None:
        """Find the workers that delay others, and stop waiting for each after the stall time."""
        with self._lock:
            content, roster = self._content, self._membership.roster
            if content is None:
                return
            idle = self._membership.idle(now)
            waited_for, again = set[str](), set[str]()
            # In the order of the rosters, each once.
            awaited = list(dict.fromkeys(name for of_part in content.rosters(roster) for name in of_part.awaited))
            # Most of the time no worker is idle, and no shard's lock is taken.
            for shard_id, shard in content.shards.items():
                is_again = shard.version < self._made_again.get(shard_id, 0)
                if shard.num_pending and (idle or awaited or is_again):
                    late = shard.waiting_for(content.roster_of(shard_id, roster))
                    waited_for.update(late)
                    again.update(late if is_again else ())
        alive = self._membership.names(alive=True)
        with self._steps_lock:
            at_gate, at_steps = self.steps.holds_for(alive), self.steps.holding_up()
        stalled = self._membership.end_stalls(
            now=now,
            idle=idle,
            in_rounds=waited_for,
            made_again=again,
            awaited=awaited,
            at_gate=at_gate,
            at_steps=at_steps,
        )
        self.carry_out(stalled)

    def waited_for_by(self, worker_id: str) -> tuple[str, ...]:
        """Return the workers that a worker waits for before its next step."""
        alive, name = self._membership.names(alive=True), self._membership.name_of(worker_id)
        with self._steps_lock:
            return self.steps.awaited(alive) or self.steps.waiting_for(name)

    def tick(self, now: float) -> None:
        """Expire leases, find stalls, and complete rounds without the workers that are out."""
        self.carry_out(self._membership.expire(now))
        content = self._content
        if content is None:
            return
        if content.initializer is None:
            missing = any(of_part.missing for of_part in content.rosters(self._membership.roster))
            if missing and now - content.ready_at > self._membership.lease_seconds:
                # The run was restored: each of its workers that lives has sent a heartbeat by now.
                self.carry_out(self._membership.expect_no_more())
        self._find_stalls(now)
        self.complete_rounds()
        if self._overdue:
            self._complete_overdue()
        # Once the roster has settled.
        warnings = self.warnings
        if warnings != self._warned and self._membership.roster is self._roster:
            self._warned = warnings
            for warning in warnings:
                self._events.add("warning", warning, warning=True)

    # Changes of settings.

    def configure(self, content: ReadyContent, *, validate_only: bool = False, **changes: Unpack[Changes]) -> Settled:
        """Change the named settings on all shards, after all of them were checked.

        Gradients that wait under the old protocol become one update of each shard, by that protocol's rule.
        """
        protocol, learning_rate = changes.get("protocol", ""), changes.get("learning_rate")
        policy = changes.get("staleness") or protocols.brought_policy(protocol)
        new_schedule = changes.get("schedule", "")
        with self._lock:
            behaviour = self._changed(content, protocol, policy, new_schedule)
            for member in self._membership.alive():
                behaviour.aggregation.check_worker(member.worker_id, member.parts, member.replica)
            if learning_rate is not None:
                require_rate(learning_rate)
                if self._bounds is not None:
                    self._bounds.require_rate(learning_rate)
                self._require_unowned("before the server's is changed")
            if validate_only:
                return Settled(0, 0)
            settled = self._adopt(behaviour, learning_rate=learning_rate)
            self.num_changes += 1
        rate = "" if learning_rate is None else f"{learning_rate:g}"
        self._events.add(
            "configured",
            "settings changed",
            protocol=protocol and behaviour.aggregation.text,
            staleness=policy and behaviour.staleness.text,
            schedule=new_schedule and behaviour.schedule.text,
            learning_rate=rate,
            gradients_settled=settled.gradients or "",
            updates_made=settled.updates or "",
        )
        return settled

    def resume(self, in_force: Behaviour, *, kept: Behaviour, configured: Behaviour) -> None:
        """Put the behaviour of a restored run in force: that of its checkpoint, or of the server's flags."""
        with self._lock:
            self._adopt(in_force, learning_rate=None)
        if in_force != kept:
            what = "the server was started with other settings than the checkpoint's"
            self._events.add("configured", what, **in_force.texts)
        elif in_force != configured:
            what = "the run keeps its checkpoint's settings where no flag sets others"
            self._events.add("configured", what, **kept.texts)

    def expect(self, num_workers: int) -> None:
        """Wait for so many workers at the beginning, including those that pushed or are gone; 0 for none."""
        with self._lock:
            self._membership.expect(num_workers)
            self.at_gate(self.steps.expect, self._membership.quorum, self._membership.arrived())
        self._events.add("configured", "settings changed", expected_workers=num_workers)
        self.complete_rounds()

    # What follows is called under the lock.

    def _changed(self, content: ReadyContent, protocol: str, policy: str, new_schedule: str) -> Behaviour:
        changed = old = self.behaviour
        if protocol:
            changed = dataclasses.replace(changed, aggregation=protocols.parse(protocol))
        if policy:
            changed = dataclasses.replace(changed, staleness=staleness.parse(policy))
        if new_schedule:
            parsed = schedule.parse(new_schedule, epoch_examples=old.epoch_examples)
            changed = dataclasses.replace(changed, schedule=parsed)
        roster = self._membership.roster
        for of_part in (roster, *content.rosters(roster)):
            changed.aggregation.check(of_part.num_expected)
        changed.aggregation.check_change(old.aggregation)
        changed.aggregation.check_servers(content.partition.num_servers)
        if new_schedule and changed.schedule.text != Constant.name:
            self._require_unowned("before the server gets a schedule")
        return changed

    def _require_unowned(self, what: str) -> None:
        if self.owner.worker_id:
            raise ScheduleOwned(
                f"worker {self.owner.worker_id!r} owns the schedule and sends its learning rates: end its scheduler"
                f" (or let it go on with owns_schedule=False) {what}"
            )

    def _adopt(self, behaviour: Behaviour, *, learning_rate: float | None) -> Settled:
        content, roster = self._content, self._membership.roster
        new_protocol = behaviour.aggregation != self.behaviour.aggregation
        self.behaviour = behaviour
        if content is None:
            return Settled(0, 0)
        gradients = updates = 0
        for shard in content.shards.values():
            gradients += shard.num_pending
            of_shard = content.roster_of(shard.shard_id, roster)
            made = shard.configure(behaviour=behaviour, learning_rate=learning_rate, roster=of_shard)
            updates += len(made)
            self._updated(shard, made)
        if new_protocol:
            self._renew_pacer(content)
        return Settled(gradients if new_protocol else 0, updates)

    def _complete(self, content: ReadyContent, shard: Store, roster: Roster) -> int:
        updates = shard.complete(content.roster_of(shard.shard_id, roster))
        self._updated(shard, updates)
        self._note_quorum(content, shard, roster)
        return len(updates)

    def _updated(self, shard: Store, updates: Sequence[Update]) -> None:
        if updates:
            self._statistics.updated(shard.shard_id, updates, now=self._clock())
            self._version_grew(shard, shard.version)

    def _version_grew(self, shard: Store, version: int) -> None:
        """Let the workers go on that wait for this version before a step, and call `on_update`."""
        if self.steps.pacer is not None:
            self.at_gate(self.steps.advanced, version)
        if self.on_update is not None:
            self.on_update(shard)

    def _renew_pacer(self, content: ReadyContent) -> None:
        pacer = None
        # Nothing crosses between servers: the first alone grants steps.
        if content.server_index == 0:
            pacer = self.behaviour.aggregation.pacer() or (Free() if self.config.start_together else None)
        quorum, at_work = self._membership.quorum, self._membership.arrived()
        self.at_gate(self.steps.replace, pacer, quorum=quorum, at_work=at_work, version=content.version_max)


def _require_own(table: TableShard, gradient: Gradient) -> None:
    """Raise InvalidArgument for a row that belongs to another shard of its table."""
    others = gradient.ids[bucket_of(gradient.ids, table.num_buckets) != table.bucket]
    if others.size:
        raise InvalidArgument(
            f"id {others[0]} of table {table.name!r} is not of shard {table.shard_id}: spread ids over its "
            f"{table.num_buckets} shards as pyps_wire.rows.bucket_of does"
        )


def _is_taken(receipt: Receipt) -> bool:
    return receipt.outcome is not Outcome.REJECTED or receipt.reason is Reason.DROPPED


@dataclass(slots=True)
class Claim:
    """A worker's ownership of the schedule; it ends with the pushes under way unless one of them is taken."""

    worker_id: str
    num_pushes: int = 0
    taken: bool = False


class ScheduleOwner:
    """The one worker, or replica, that sets learning rates until it is gone. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        # Guarded by _lock. None when no worker has sent a learning rate.
        self._claim: Claim | None = None

    @property
    def worker_id(self) -> str:
        """The worker that owns the schedule; empty for none."""
        claim = self._claim
        return claim.worker_id if claim else ""

    def claim(self, worker_id: str) -> Claim:
        """Make a worker the owner while its push is under way. Raises ScheduleOwned where another worker is."""
        with self._lock:
            claim = self._claim = self._claim or Claim(worker_id)
            if claim.worker_id != worker_id:
                raise ScheduleOwned(
                    f"worker {worker_id!r} sent a learning rate, but worker {claim.worker_id!r} owns the schedule: "
                    "let one worker change the rate (owns_schedule=True) and give the others owns_schedule=False"
                )
            claim.num_pushes += 1
            return claim

    def settle(self, claim: Claim, *, taken: bool) -> bool:
        """End a push; return True where the worker is the owner for good from this push on."""
        with self._lock:
            is_new = taken and not claim.taken and self._claim is claim
            claim.taken |= taken
            claim.num_pushes -= 1
            if self._claim is claim and not claim.taken and not claim.num_pushes:
                self._claim = None
            return is_new

    def release(self, worker_id: str) -> bool:
        """End a worker's ownership; return False if it is not the owner."""
        with self._lock:
            owned = self._claim is not None and self._claim.worker_id == worker_id
            if owned:
                self._claim = None
            return owned


_COUNTS_DIFFER = (
    "some workers push gradients without a count of examples and some with one: a round with both is averaged with"
    " equal shares; give `examples` with every push, or choose weighting=equal"
)

_NO_EXAMPLES = "no worker reports how many examples its gradients are of (optimizer.examples_in_batch), so {}"

# By then each worker has pushed, with a count of examples if it sends one.
UPDATES_BEFORE_DOUBT = 100
