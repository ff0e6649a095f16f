"""The answer to a push."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

WAITING_FOR_MAX = 8


class Outcome(IntEnum):
    """What became of a push; the wire contract's numbers."""

    APPLIED = 1
    PENDING = 2
    REJECTED = 3


class Reason(IntEnum):
    """Why a push was rejected; the wire contract's numbers."""

    UNSPECIFIED = 0
    NOT_FINITE = 1
    STALE = 2
    EPOCH = 3
    FINISHED = 4
    FORGOTTEN = 5
    DROPPED = 6
    REPEATED = 7


class Receipt(NamedTuple):
    """The answer to one pushed shard; the fields are those of the wire contract's Receipt.

    `rate`, `rate_scale` and `weight` are 0 for a rejected push. For a PENDING one they are the values at its arrival,
    without its share of the update.
    """

    shard_id: int
    sequence: int
    outcome: Outcome
    version_before: int
    version_after: int
    reason: Reason = Reason.UNSPECIFIED
    message: str = ""
    duplicate: bool = False
    staleness: int = 0
    rate: float = 0.0
    rate_scale: float = 0.0
    weight: float = 0.0
    num_workers: int = 0
    epoch: int = 0
    # The version to wait for before the next gradient is computed; 0 for none.
    min_version: int = 0
    # Workers that the shard's present round waits for, WAITING_FOR_MAX at most; empty unless PENDING.
    waiting_for: tuple[str, ...] = ()
