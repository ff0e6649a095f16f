"""All that a shard is, as checkpoints keep it, and what a restored shard is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pyps.core.aggregation import Contribution
from pyps.core.arrays import Floats
from pyps.core.ledger import LedgerState
from pyps.core.rules import Slots, UpdateRule
from pyps_wire.errors import BadRequest, WrongSize


@dataclass(frozen=True, slots=True)
class ShardState:
    """A copy of all that a shard is, taken at one version."""

    version: int
    parameters: Floats
    slots: Slots
    ledger: LedgerState
    # Gradients with a PENDING receipt, in order of arrival.
    pending: tuple[Contribution, ...] = ()
    # Examples behind the applied gradients.
    examples: int = 0
    # The base rate; None in a state from before it was kept: the rule's own.
    learning_rate: float | None = None
    # The momentum; None where the rule has none, or from before it was kept.
    momentum: float | None = None


def first_slots(
    rule: UpdateRule,
    hyperparameters: Mapping[str, float],
    restored: Mapping[str, Floats] | None,
    *,
    shard_id: int,
    length: int,
    take: Callable[[Floats], Floats],
) -> Slots:
    """Returns what `take` makes of the restored slots, or those of a shard that has had no update.

    Raises BadRequest where they are another rule's, WrongSize where they are another shard's.
    """
    if restored is None:
        return rule.make_slots(length, hyperparameters)
    if set(restored) != set(rule.slot_names):
        raise BadRequest(
            f"shard {shard_id} was given the slots {sorted(restored)}; {rule.name} has {sorted(rule.slot_names)}"
        )
    for name, slot in restored.items():
        if slot.size != length:
            raise WrongSize(f"shard {shard_id}: the slot {name!r} has {slot.size} values for {length} parameters")
    return {name: take(slot) for name, slot in restored.items()}
