"""What a push brings: its worker is heard of, its shard takes it, and it is counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from pyps.core.behaviour import Behaviour
from pyps.core.finding import Finding, scan
from pyps.core.gradient import Gradient, PayloadKind, item_bytes, require_fitting
from pyps.core.receipt import Outcome, Reason, Receipt
from pyps.core.reply import Answer, Reply
from pyps.core.roster import Roster
from pyps.core.schedule import Constant
from pyps.core.shard import Shard
from pyps.run.attendance import Attendance
from pyps.run.caveats import Caveats
from pyps.run.content import Content
from pyps.run.events import Events
from pyps.run.pacing import Pacing
from pyps.run.pending_account import PendingAccount
from pyps.run.schedule_owner import ScheduleOwner
from pyps.statistics import Statistics


class Pushes:
    """Handles pushes to a run's shards. Every method may be called from any thread.

    With small models its cost is the round's: what is rarely needed stays off the path of a push.
    """

    def __init__(
        self,
        *,
        attendance: Attendance,
        statistics: Statistics,
        events: Events,
        clock: Callable[[], float],
        account: PendingAccount,
        owner: ScheduleOwner,
        pacing: Pacing,
        caveats: Caveats,
        logged: bool,
        behaviour: Callable[[], Behaviour],
        on_update: Callable[[Shard], None],
        on_smaller_roster: Callable[[Content, Shard], object],
    ):
        """`logged` says that a recorder keeps payloads. `on_update` hears of a shard that a push has updated.

        `on_smaller_roster` is told of one in which a push has just begun to wait, where the workers that count have
        changed meanwhile.
        """
        self._attendance = attendance
        self._membership = attendance.membership
        self._statistics = statistics
        self._events = events
        self._clock = clock
        self._account = account
        self._owner = owner
        self._pacing = pacing
        self._caveats = caveats
        self._logged = logged
        self._behaviour = behaviour
        self._on_update = on_update
        self._on_smaller_roster = on_smaller_roster

    def push(
        self,
        content: Content,
        gradient: Gradient,
        shard_id: int,
        *,
        answer: Answer | None = None,
        finding: Finding | None = None,
    ) -> Receipt:
        """Handles one pushed shard; see `Shard.push`."""
        shard = content.shard(shard_id)
        began = self._clock()
        if gradient.volatile and self._logged:
            # The log tells what was applied to the bit, so that is looked at anew.
            gradient, finding = gradient.private(), _against(finding)
        # Whoever pushes what does not fit is not heard of.
        if finding is None:
            finding = scan(gradient, shard_id=shard_id, shard_length=shard.length)
        part = content.parts[shard_id]
        if self._membership.parted:
            self._membership.require_part(gradient.worker_id, shard_id, part)
        counted = None if answer is None else CountedAnswer(answer, shard)
        if not gradient.schedules:
            roster = self._hear(gradient, now=began)
            receipt = shard.push(gradient, roster=roster.of_part(part), answer=counted, finding=finding)
        else:
            with self._claiming([gradient]) as receipts:
                roster = self._hear(gradient, now=began)
                receipt = shard.push(gradient, roster=roster.of_part(part), answer=counted, finding=finding)
                receipts.append(receipt)
        self._answered(content, shard, gradient, receipt, roster, began=began, answer=counted)
        return receipt

    def push_whole(
        self,
        content: Content,
        gradients: Sequence[tuple[int, Gradient]],
        *,
        answers: Mapping[int, Answer] | None = None,
        finding: Finding | None = None,
    ) -> list[Receipt]:
        """Handles all parts of one push, (shard_id, gradient) each, as one; see `WholeModel.push`."""
        shards = [content.shard(shard_id) for shard_id, _ in gradients]
        began, roster = self._clock(), self._membership.roster
        for shard, (shard_id, gradient) in zip(shards, gradients, strict=True):
            require_fitting(gradient, shard_id=shard_id, shard_length=shard.length)
        if self._logged and any(gradient.volatile for _, gradient in gradients):
            gradients = [(shard_id, gradient.private()) for shard_id, gradient in gradients]
            finding = _against(finding)
        counted = {
            shard_id: CountedAnswer(answer, content.shard(shard_id)) for shard_id, answer in (answers or {}).items()
        }
        with self._claiming([gradient for _, gradient in gradients]) as receipts:
            for _, gradient in gradients:
                roster = self._hear(gradient, now=began)
            receipts += content.whole.push(gradients, roster=roster, answers=counted, finding=finding)
        for shard, (shard_id, gradient), receipt in zip(shards, gradients, receipts, strict=True):
            self._answered(content, shard, gradient, receipt, roster, began=began, answer=counted.get(shard_id))
        return receipts

    def _claiming(self, gradients: Sequence[Gradient]) -> AbstractContextManager[list[Receipt]]:
        """Lets whoever sends a learning rate or a momentum own the schedule; see `ScheduleOwner.claiming`."""
        rated = [gradient.worker_id for gradient in gradients if gradient.schedules]
        names = [self._membership.name_of(worker_id) for worker_id in rated]
        return self._owner.claiming(names, schedule=self._own_schedule, events=self._events)

    def _hear(self, gradient: Gradient, *, now: float) -> Roster:
        """Takes note of whose push it is; returns the workers that count with it."""
        clock = gradient.clock or None
        roster = self._attendance.pushed(gradient.worker_id, gradient.incarnation, now=now, clock=clock)
        if self._pacing.gate_holds:
            # At work already, with or without asking.
            self._pacing.excuse([self._membership.name_of(gradient.worker_id)])
        return roster

    def _answered(
        self,
        content: Content,
        shard: Shard,
        gradient: Gradient,
        receipt: Receipt,
        roster: Roster,
        *,
        began: float,
        answer: CountedAnswer | None,
    ) -> None:
        now = self._clock()
        self._statistics.pushed(
            gradient.worker_id,
            shard.shard_id,
            receipt,
            payload_bytes=len(gradient.payload),
            answer_bytes=0 if answer is None else answer.num_bytes,
            examples=gradient.example_count,
            now=now,
            apply_seconds=now - began,
        )
        self._account.note(shard)
        if receipt.duplicate:
            return
        if receipt.outcome is not Outcome.REJECTED or receipt.reason is Reason.DROPPED:
            self._attendance.taken(gradient.worker_id, gradient.incarnation, now=now)
        if gradient.kind != PayloadKind.NOTHING:
            self._caveats.heard(gradient)
        if receipt.version_after > receipt.version_before:
            self._pacing.advanced(receipt.version_after)
            self._on_update(shard)
        elif receipt.outcome is Outcome.PENDING and self._membership.roster is not roster:
            # Somebody went while this push was on its way: whoever completed rounds then did not see it.
            self._on_smaller_roster(content, shard)

    @property
    def _own_schedule(self) -> str:
        """The server's schedule, empty where it has none."""
        text = self._behaviour().schedule.text
        return "" if text == Constant.name else text


class CountedAnswer:
    """An answer, and how many bytes of parameters it took. Called under the shard's lock."""

    __slots__ = ("_answer", "_shard", "num_bytes")

    def __init__(self, answer: Answer, shard: Shard):
        self._answer = answer
        self._shard = shard
        self.num_bytes = 0

    def place(self, receipt: Receipt, version: int) -> Reply | None:
        """Asks the answer, and counts."""
        reply = self._answer.place(receipt, version)
        if reply is not None:
            self.num_bytes = self._shard.length * item_bytes(reply.codec)
        return reply


def _against(finding: Finding | None) -> Finding | None:
    """What speaks against a push, which holds for its copy too."""
    return None if finding is None or finding.finite else finding
