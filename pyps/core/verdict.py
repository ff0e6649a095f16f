"""Receipts of pushes, from the decision of the protocol or the reason of a refusal."""

from __future__ import annotations

from pyps.core.gradient import Finding, Gradient, PayloadKind
from pyps.core.protocols.base import Apply, Arrival, Contribution, Decision, Drop, Park, Refuse
from pyps.core.receipt import Outcome, Reason, Receipt
from pyps.core.roster import Roster

# A union would be built again for every push.
_REJECTING = (Refuse, Drop)


def receipt_of(
    decision: Decision, arrival: Arrival, *, shard_id: int, epoch: int, rate: float, update_scale: float
) -> Receipt:
    """Return the receipt of a push on which a protocol has decided; `rate` is the step size before staleness."""
    contribution, _, version, roster = arrival
    gradient, staleness, weighing = contribution
    outcome, version_after, weight, min_version = Outcome.APPLIED, version, weighing.weight, 0
    waiting_for: tuple[str, ...] = ()
    if isinstance(decision, Apply):
        version_after += 1
        # A loop without a call, at every push.
        for part in decision.parts:
            if part.contribution is contribution:
                weight *= part.share * part.clip
    elif isinstance(decision, Park):
        outcome, min_version, waiting_for = Outcome.PENDING, decision.min_version, decision.waiting_for
    elif isinstance(decision, _REJECTING):
        return rejection(decision, gradient, version, roster, shard_id=shard_id, epoch=epoch, staleness=staleness)
    return Receipt(
        shard_id=shard_id,
        sequence=gradient.sequence,
        outcome=outcome,
        version_before=version,
        version_after=version_after,
        staleness=staleness,
        # A buffer's step does not depend on the rate.
        rate=(1.0 if gradient.kind == PayloadKind.BUFFER else rate) * weighing.rate_scale * update_scale,
        rate_scale=weighing.rate_scale * update_scale,
        weight=weight,
        num_workers=len(roster.workers),
        epoch=epoch,
        min_version=min_version,
        waiting_for=waiting_for,
    )


def rejection(
    decision: Refuse | Drop,
    gradient: Gradient,
    version: int,
    roster: Roster,
    *,
    shard_id: int,
    epoch: int,
    staleness: int = 0,
) -> Receipt:
    """Return the receipt of a push that is refused or dropped."""
    return Receipt(
        shard_id=shard_id,
        sequence=gradient.sequence,
        outcome=Outcome.REJECTED,
        reason=decision.reason if isinstance(decision, Refuse) else Reason.DROPPED,
        message=decision.message,
        version_before=version,
        version_after=version,
        staleness=staleness,
        num_workers=roster.num_workers,
        epoch=epoch,
        min_version=decision.min_version,
    )


def forgotten(gradient: Gradient, *, shard_id: int) -> Refuse:
    """Refuse a push whose receipt the ledger has forgotten, if there was one."""
    return Refuse(
        Reason.FORGOTTEN,
        f"shard {shard_id} no longer remembers push {gradient.sequence} of worker {gradient.worker_id!r}, so it may"
        " have been applied; go on with a new push",
    )


def finished(*, shard_id: int, version: int) -> Refuse:
    """Refuse a push after the end of the run."""
    return Refuse(Reason.FINISHED, f"the run is finished; shard {shard_id} stays at version {version}")


def other_epoch(gradient: Gradient, *, shard_id: int, epoch: int) -> Refuse:
    """Refuse a push computed at parameters of another epoch of the run."""
    return Refuse(
        Reason.EPOCH,
        f"the gradient is of epoch {gradient.epoch}, shard {shard_id} of epoch {epoch} since the server was restored;"
        " pull again, then go on",
    )


def not_finite(finding: Finding, gradient: Gradient, *, shard_id: int) -> Refuse:
    """Refuse a push because this part of it, or another, holds NaN or infinity."""
    row = "" if finding.row is None else f"row {finding.row}, "
    return Refuse(
        Reason.NOT_FINITE,
        f"worker {gradient.worker_id!r} pushed NaN or infinity for {row}parameter {finding.parameter} of shard"
        f" {finding.shard_id}; nothing of this gradient was applied to shard {shard_id}",
    )


def too_stale(contribution: Contribution, *, policy: str, version: int) -> Refuse:
    """Refuse a gradient that the staleness policy does not accept."""
    message = f"the policy {policy!r} takes no gradient that is {contribution.staleness} updates old"
    return Refuse(Reason.STALE, message, min_version=version)


def with_left_out(receipt: Receipt, gradient: Gradient, *, count: int) -> Receipt:
    """Add to the receipt how many numbers of a volatile gradient were left out when it was applied."""
    return receipt._replace(
        message=f"worker {gradient.worker_id!r} changed its gradient while it was applied: {count} numbers were left"
        " out, as NaN or infinity stood among them by then; write to a gradient only once its push is answered"
    )
