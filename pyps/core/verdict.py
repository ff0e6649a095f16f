"""What was decided of a gradient, as the receipt that its worker gets."""

from __future__ import annotations

from pyps.core.aggregation import Apply, Arrival, Decision, Drop, Park, Refuse
from pyps.core.gradient import Gradient
from pyps.core.receipt import WAITING_FOR_MAX, Outcome, Reason, Receipt
from pyps.core.roster import Roster
from pyps.core.update import rate_of


def receipt_of(
    decision: Decision,
    arrival: Arrival,
    *,
    shard_id: int,
    epoch: int,
    rate: float,
    update_scale: float,
    waiting_for: tuple[str, ...],
) -> Receipt:
    """Returns the receipt of a push that a protocol has decided on.

    `rate` is that of an update made now, before staleness; `update_scale` what the staleness of all its gradients
    leaves of it.
    """
    contribution, _, version, roster = arrival
    gradient, staleness, weighing = contribution
    outcome, version_after, weight, min_version = Outcome.APPLIED, version, weighing.weight, 0
    if isinstance(decision, Apply):
        version_after += 1
        weight *= decision.share_of(contribution)
    elif isinstance(decision, Park):
        outcome, min_version = Outcome.PENDING, decision.min_version
    elif isinstance(decision, Refuse | Drop):
        return rejection(decision, gradient, version, roster, shard_id=shard_id, epoch=epoch, staleness=staleness)
    return Receipt(
        shard_id=shard_id,
        sequence=gradient.sequence,
        outcome=outcome,
        version_before=version,
        version_after=version_after,
        staleness=staleness,
        rate=rate_of(contribution, rate=rate, update_scale=update_scale),
        rate_scale=weighing.rate_scale * update_scale,
        weight=weight,
        num_workers=roster.num_workers,
        epoch=epoch,
        min_version=min_version,
        waiting_for=waiting_for[:WAITING_FOR_MAX],
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
    """Returns the receipt of a push that is not taken."""
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
