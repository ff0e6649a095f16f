"""Counts gradients that servers did not take, and says so once for each reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pyps_client.log import logger
from pyps_wire.common_pb2 import (
    OUTCOME_REJECTED,
    REASON_DROPPED,
    REASON_EPOCH,
    REASON_FINISHED,
    REASON_REPEATED,
    REASON_STALE,
    Reason,
    Receipt,
)

# The refusals that mean: what the worker holds is too old to be of use. A pull helps.
OUTDATED = (REASON_STALE, REASON_DROPPED)

_ADVICE = {
    REASON_STALE: " Pull before each gradient is computed, or choose a protocol that takes older ones.",
    REASON_REPEATED: " Pull before the next gradient is computed: the pull waits for the round's end.",
    REASON_DROPPED: " This is normal under backup workers.",
}


class Refusals:
    """Pushed shards that were refused or dropped, by reason. Used by the thread that pushes."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    @property
    def counts(self) -> dict[str, int]:
        """Refused shards by the reason's name: {"STALE": 3}."""
        return dict(self._counts)

    def note(self, receipts: Iterable[Receipt]) -> None:
        """Counts what was refused, with one line in the log at the first of each reason."""
        for receipt in receipts:
            if receipt.outcome != OUTCOME_REJECTED or receipt.reason in (REASON_EPOCH, REASON_FINISHED):
                continue
            name = Reason.Name(receipt.reason).removeprefix("REASON_")
            self._counts[name] += 1
            if self._counts[name] == 1:
                logger.warning(
                    "a gradient of shard %d was not taken: %s.%s Further ones are only counted.",
                    *(receipt.shard_id, receipt.message.rstrip("."), _ADVICE.get(receipt.reason, "")),
                )
